//! The child processes of a process, from `/proc`.

use std::fs;

use rustix::process::Pid;

/// A child process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Child {
    /// The process.
    pub(crate) process: Pid,
    /// Whether it has ended but its parent has not waited for it yet (a zombie).
    pub(crate) ended: bool,
}

/// Returns the children of `parent`.
///
/// All of `/proc` is read, because not every kernel lists the children of a process. A process that
/// ends in the meantime is skipped.
pub(crate) fn children(parent: Pid) -> Vec<Child> {
    let parent = parent.as_raw_nonzero().to_string();
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let child = |number: i32| {
        let stat = fs::read_to_string(format!("/proc/{number}/stat")).ok()?;
        // The format is `PID (NAME) STATE PARENT ...`, and the name may contain any characters.
        let (_, rest) = stat.rsplit_once(") ")?;
        let (state, rest) = rest.split_once(' ')?;
        let is_child = rest.split(' ').next() == Some(parent.as_str());
        Some(Child { process: Pid::from_raw(number).filter(|_| is_child)?, ended: state == "Z" })
    };
    numbers.filter_map(child).collect()
}
