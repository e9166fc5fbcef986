//! Processes that a killed `mpirun` leaves behind.
//!
//! Ranks have their own process groups, so they survive when `mpirun` and its group are killed. The
//! launcher adopts such orphans and kills them. On other hosts, the daemon of `mpirun` ends its
//! ranks when the connection is lost.

use rustix::process::{Signal, WaitOptions, getpid, kill_process, waitpid};

use crate::children::children;

/// Makes this process the parent of orphaned descendants.
pub(crate) fn adopt() {
    // Old kernels do not support this. On such a kernel, a killed mpirun may leave ranks behind.
    if let Err(error) = rustix::process::set_child_subreaper(Some(getpid())) {
        tracing::debug!("orphans cannot be adopted: {error}");
    }
}

/// Kills all descendants of this process and returns how many were still running.
pub(crate) fn end_all() -> usize {
    let mut running = 0;
    // When a process is killed, this process becomes the parent of its children, so the loop runs
    // until there are no children left.
    loop {
        let mut waited = false;
        for child in children(getpid()) {
            let _ = kill_process(child.process, Signal::KILL);
            // Another thread may already have waited for this child.
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
