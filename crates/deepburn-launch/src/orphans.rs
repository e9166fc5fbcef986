//! Processes that a killed `mpirun` leaves behind.
//!
//! Ranks are in process groups of their own, so killing `mpirun` and its group spares them. The
//! launcher adopts such orphans and kills them. On other hosts `mpirun`'s daemon ends its ranks when
//! the connection is gone.

use rustix::process::{Signal, WaitOptions, getpid, kill_process, waitpid};

use crate::children::children;

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
        for child in children(getpid()) {
            let _ = kill_process(child.process, Signal::KILL);
            // A thread that waits for the child itself may be first.
            if waitpid(Some(child.process), WaitOptions::empty()).is_ok() {
                waited = true;
                running += usize::from(!child.ended);
            }
        }
        if !waited {
            return running;
        }
    }
}
