//! The process group for rank threads of one process.
//!
//! [`Member`] is the handle of one rank. To start a collective, a rank deposits
//! its arrays at a [`Rendezvous`] and returns. The ranks that wait for the
//! result compute it on their own threads (`exchange`); there is no background
//! thread. `in_process/README.md` describes the states of an exchange and
//! possible race conditions.
//!
//! Different collectives on two ranks, invalid arguments and use after leaving
//! the group cause errors.

mod exchange;
mod rendezvous;
mod round;

use std::sync::Arc;
use std::time::Duration;

use crate::{
    CollectiveTag, CommError, GroupFailure, Operation, Pending, ProcessGroup, RankHandle,
    SharedPayload, Side, Statistics,
};
use rendezvous::{Rendezvous, Ticket};

/// The handle of one rank to a process group of threads.
///
/// All ranks must start the same collectives in the same order, across all
/// [`SharedPayload`] types: collectives of device tensors, host arrays and
/// bytes may be mixed, and the group detects ranks that start them in a
/// different order.
///
/// Clones share one membership; dropping the last one leaves the group, and
/// ranks that wait for this rank then get an error.
#[derive(Debug, Clone)]
pub struct Member {
    membership: Arc<Membership>,
}

/// The state that is shared by the clones of a member. Dropping it leaves the
/// group.
#[derive(Debug)]
struct Membership {
    rank: usize,
    rendezvous: Arc<Rendezvous>,
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.rendezvous.leave(self.rank);
    }
}

impl Member {
    /// Creates a group and returns its members by rank.
    ///
    /// If a rank waits longer than `timeout` for other ranks, the group ends
    /// with an error. With `Duration::MAX` ranks wait forever.
    ///
    /// # Errors
    ///
    /// Returns an error if `world_size` is 0.
    pub fn group(world_size: usize, timeout: Duration) -> Result<Vec<Self>, CommError> {
        if world_size == 0 {
            return Err(CommError::NoRanks);
        }
        let rendezvous = Arc::new(Rendezvous::new(world_size, timeout));
        let membership = |rank| Membership { rank, rendezvous: rendezvous.clone() };
        Ok((0..world_size).map(|rank| Self { membership: Arc::new(membership(rank)) }).collect())
    }

    /// Returns the rank, from 0.
    pub fn rank(&self) -> usize {
        self.membership.rank
    }

    /// Returns the number of ranks.
    pub fn world_size(&self) -> usize {
        self.membership.rendezvous.world_size()
    }

    /// Waits until every rank has called this function. Unlike
    /// [`ProcessGroup::barrier`], it does not require a payload type.
    ///
    /// # Errors
    ///
    /// Returns an error if a rank failed, started a different collective or did
    /// not reach the barrier in time.
    pub fn barrier(&self, tag: CollectiveTag) -> Result<(), CommError> {
        let side = Side::barrier(self.rank(), tag);
        let span = side.span();
        let ticket = self.post(side, Vec::<()>::new())?;
        span.in_scope(|| exchange::barrier(&ticket))
    }

    /// Ends the group: every pending and later call of any rank fails with the
    /// cause of the first `abort`.
    pub fn abort(&self, cause: CommError) {
        self.membership.rendezvous.abort(self.rank(), cause);
    }

    /// Declares that this rank starts no more collectives; see
    /// [`RankHandle::leave`].
    pub fn leave(&self) {
        self.membership.rendezvous.leave(self.rank());
    }

    /// Returns the counts of the collectives that this rank has started.
    pub fn statistics(&self) -> Statistics {
        self.membership.rendezvous.statistics(self.rank())
    }

    /// Takes the next position in the common order and deposits `arrays` there.
    fn post<T: Send + Sync + 'static>(
        &self,
        side: Side,
        arrays: Vec<T>,
    ) -> Result<Ticket, CommError> {
        Rendezvous::post(&self.membership.rendezvous, side, Arc::new(arrays))
    }
}

impl RankHandle for Member {
    fn rank(&self) -> usize {
        self.membership.rank
    }

    fn abort(&self, cause: CommError) {
        self.abort(cause);
    }

    fn leave(&self) {
        self.leave();
    }

    fn failure(&self) -> Option<GroupFailure> {
        self.membership.rendezvous.failure()
    }
}

impl<T: SharedPayload> ProcessGroup<T> for Member {
    fn rank(&self) -> usize {
        self.rank()
    }

    fn world_size(&self) -> usize {
        self.world_size()
    }

    fn start(&self, side: Side, arrays: Vec<T>) -> Result<Pending<T>, CommError> {
        let (operation, numels, span) = (side.operation, side.numels().to_vec(), side.span());
        let ticket = self.post(side, arrays)?;
        let result = move || match operation {
            Operation::AllReduce(op) => exchange::all_reduce(&ticket, op),
            Operation::ReduceScatter(op) => exchange::reduce_scatter(&ticket, op),
            Operation::AllGather => exchange::all_gather(&ticket, &numels),
            Operation::AllToAll => exchange::all_to_all(&ticket),
            Operation::Broadcast { root } => exchange::broadcast(&ticket, root),
            Operation::Barrier => exchange::barrier(&ticket).map(|()| Vec::new()),
        };
        Ok(Pending::new(move || span.in_scope(result)))
    }

    fn check(&self) -> Result<(), CommError> {
        self.failure().map_or(Ok(()), |failure| Err(failure.cause))
    }

    fn abort(&self, cause: CommError) {
        self.abort(cause);
    }
}
