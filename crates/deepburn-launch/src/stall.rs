//! Notices an `mpirun` that ignores the end of a rank.
//!
//! Open MPI 4.1 ends the job when a rank dies. If the rank dies while it connects to `mpirun` (in
//! `MPI_Init`), `mpirun` sometimes kills the other ranks and then waits forever, with ranks that have
//! ended and that it never waits for. Three of 60 such jobs on Open MPI 4.1.4 hung like this.

use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, test_kill_process};

use crate::children::children;

/// Between two looks at the children of `mpirun`.
const INTERVAL: Duration = Duration::from_secs(2);

/// How long a rank may have ended without a reaction. `mpirun` waits for a rank as soon as it ends, but
/// sleeps for two seconds while it ends a job.
const REACTION_TIME: Duration = Duration::from_secs(10);

/// Waits for the end of `mpirun`, and returns whether it stalled before.
pub(crate) fn has_stalled(mpirun: Pid) -> bool {
    // A child that has ended, and since when it has been seen so.
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
