//! The trait for a rank's handle to its group.

use std::time::Instant;

use crate::CommError;

/// The operations of a rank's handle that [`run_ranks`](crate::run_ranks) and
/// [`run_rank`](crate::run_rank) need.
pub trait RankHandle {
    /// Returns the rank in the world, from 0.
    fn rank(&self) -> usize;

    /// Ends the group: every pending and later call of any rank fails with the cause of the first
    /// `abort`. This function is called after the rank's own code has ended.
    fn abort(&self, cause: CommError);

    /// Declares that this rank starts no more collectives.
    ///
    /// Pending collectives of the rank can still be completed. Ranks that wait for a collective
    /// which this rank has not started get [`CommError::Left`].
    fn leave(&self);

    /// Returns the failure that ended the group; `None` if it has not ended.
    fn failure(&self) -> Option<GroupFailure>;
}

/// The failure that ended a group.
#[derive(Debug, Clone)]
pub struct GroupFailure {
    /// The rank that detected the failure and reports it.
    pub reporter: usize,
    /// The time at which this process was informed of the failure.
    pub at: Instant,
    /// The error that every rank gets.
    pub cause: CommError,
}
