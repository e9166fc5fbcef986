//! Environment variables that `deepburn launch` sets for every rank of a job.
//!
//! The launcher passes the start time of the job and its number of restarts to the training program
//! in these variables. Without a launcher none of them is set.
//!
//! | Variable | Meaning |
//! |---|---|
//! | `DEEPBURN_STARTED` | start of the launch, in seconds since 1970 |
//! | `DEEPBURN_RESTART` | number of restarts so far; missing before the first |

use std::env;

/// The time of the first start, in seconds since 1970. It does not change on a restart, so it also
/// identifies the launch.
const STARTED: &str = "DEEPBURN_STARTED";

/// The number of restarts so far.
const RESTARTS: &str = "DEEPBURN_RESTART";

/// Returns how often the launcher has restarted this job.
pub(crate) fn restarts() -> u32 {
    env::var(RESTARTS).ok().and_then(|count| count.parse().ok()).unwrap_or(0)
}

/// Returns the identifier of the launch of this process. It is `None` without a launcher.
pub(crate) fn launch_id() -> Option<String> {
    env::var(STARTED).ok()
}

/// Returns the start of the launch in seconds since 1970. It is `None` without a launcher.
pub(crate) fn launch_seconds() -> Option<f64> {
    launch_id()?.parse().ok()
}
