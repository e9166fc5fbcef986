//! Processes that a killed `mpirun` leaves behind.
//!
//! Ranks are in process groups of their own, so killing `mpirun` and its group spares them. The
//! launcher adopts such orphans and kills them. On other hosts `mpirun`'s daemon ends its ranks when
//! the connection is gone.

use std::fs;

use rustix::process::{Pid, Signal, WaitOptions, getpid, kill_process, waitpid};

/// Makes this process the parent of processes whose own parent ends.
pub(crate) fn adopt() {
    // Old kernels cannot; then a killed mpirun may leave ranks behind.
    if let Err(error) = rustix::process::set_child_subreaper(Some(getpid())) {
        tracing::debug!("orphans cannot be adopted: {error}");
    }
}

/// Kills all children of this process and theirs, and returns how many were still running.
pub(crate) fn end_all() -> usize {
    let mut running = 0;
    // Children of a process that is killed become ours, hence the rounds.
    loop {
        let mut waited = false;
        for (child, ended) in children() {
            let _ = kill_process(child, Signal::KILL);
            // A thread that waits for the child itself may be first.
            if waitpid(Some(child), WaitOptions::empty()).is_ok() {
                waited = true;
                running += usize::from(!ended);
            }
        }
        if !waited {
            return running;
        }
    }
}

/// The processes whose parent this is, and whether each has ended and only has to be waited for.
fn children() -> Vec<(Pid, bool)> {
    let parent = getpid().as_raw_nonzero().to_string();
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let child = |number: i32| {
        let stat = fs::read_to_string(format!("/proc/{number}/stat")).ok()?;
        // `PID (NAME) STATE PARENT ...`, and the name may contain anything.
        let (_, rest) = stat.rsplit_once(") ")?;
        let (state, rest) = rest.split_once(' ')?;
        let is_child = rest.split(' ').next() == Some(parent.as_str());
        Some((Pid::from_raw(number).filter(|_| is_child)?, state == "Z"))
    };
    numbers.filter_map(child).collect()
}
