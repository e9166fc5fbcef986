//! Detects an `mpirun` that does not react to the end of a rank.
//!
//! Open MPI 4.1 ends the job when a rank dies. However, if the rank dies while it connects to
//! `mpirun` (in `MPI_Init`), `mpirun` sometimes kills the other ranks and then waits forever
//! without reaping them. Three of 60 such jobs hung in this way with Open MPI 4.1.4.

use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, test_kill_process};

use crate::children::children;

/// The interval between checks of the children of `mpirun`.
const INTERVAL: Duration = Duration::from_secs(2);

/// The time after which an unreaped rank counts as a stall. `mpirun` reaps a rank as soon as it
/// ends, but sleeps for two seconds while it ends a job.
const REACTION_TIME: Duration = Duration::from_secs(10);

/// Waits until `mpirun` stalls or ends, and returns whether it stalled.
pub(crate) fn has_stalled(mpirun: Pid) -> bool {
    // An ended child that has not been reaped, and the time when it was first observed.
    let mut ignored: Option<(Pid, Instant)> = None;
    while test_kill_process(mpirun).is_ok() {
        let ended: Vec<Pid> = children(mpirun)
            .into_iter()
            .filter_map(|child| child.ended.then_some(child.process))
            .collect();
        ignored = match ignored.filter(|(child, _)| ended.contains(child)) {
            Some((_, since)) if since.elapsed() >= REACTION_TIME => return true,
            Some(seen) => Some(seen),
            None => ended.first().map(|&child| (child, Instant::now())),
        };
        thread::sleep(INTERVAL);
    }
    false
}
