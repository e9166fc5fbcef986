//! The children of a process, as `/proc` lists them.

use std::fs;

use rustix::process::Pid;

/// A child.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Child {
    /// The process.
    pub(crate) process: Pid,
    /// Whether it has ended and its parent has not waited for it yet (a zombie).
    pub(crate) ended: bool,
}

/// Lists the children of `parent`.
pub(crate) fn children(parent: Pid) -> Vec<Child> {
    let parent = parent.as_raw_nonzero().to_string();
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let child = |number: i32| {
        let stat = fs::read_to_string(format!("/proc/{number}/stat")).ok()?;
        // `PID (NAME) STATE PARENT ...`, and the name may contain anything.
        let (_, rest) = stat.rsplit_once(") ")?;
        let (state, rest) = rest.split_once(' ')?;
        let is_child = rest.split(' ').next() == Some(parent.as_str());
        Some(Child { process: Pid::from_raw(number).filter(|_| is_child)?, ended: state == "Z" })
    };
    numbers.filter_map(child).collect()
}
