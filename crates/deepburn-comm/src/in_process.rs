//! The process group for rank threads of one process.
//!
//! [`Member`] is the handle of one rank. To start a collective, a rank deposits its arrays at a
//! [`Rendezvous`] and returns. The ranks that wait for the result compute it on their own threads
//! (`exchange`); there is no background thread. `in_process/README.md` describes the states of an
//! exchange and possible race conditions.
//!
//! A message is moved to the receiver ([`Letter`]). Subgroups share the rendezvous of the world,
//! and with it failures, the time-out and statistics.
//!
//! Different collectives on two ranks, ranks that wait for each other (`wait`), invalid arguments
//! and use after leaving the group cause errors.

mod exchange;
mod letter;
mod rendezvous;
mod round;
mod wait;

use std::sync::Arc;
use std::time::Duration;

use crate::{
    CollectiveTag, CommError, GroupFailure, GroupRanks, Host, MessageContents, MessageDirection,
    MessageRoute, MessageTag, Operation, Pending, ProcessGroup, RankHandle, SharedPayload, Side,
    Statistics, Subgroup,
};
use letter::Letter;
use rendezvous::Rendezvous;

/// The handle of one rank to a process group of threads: the world or a [`Subgroup`].
///
/// All ranks must start the same collectives in the same order, across all [`SharedPayload`] types:
/// collectives of device tensors, host arrays and bytes may be mixed, and the group detects ranks
/// that start them in a different order.
///
/// Clones and subgroups share one membership; dropping the last handle leaves all groups, and ranks
/// that wait for this rank then get an error.
///
/// Ranks that wait for each other get [`CommError::Deadlock`]. A rank counts as waiting while its
/// thread waits, so a second thread that acts as the rank must start a collective or a message
/// before.
#[derive(Debug, Clone)]
pub struct Member {
    membership: Arc<Membership>,
    ranks: GroupRanks,
}

/// The state that is shared by the clones and subgroups of a member. Dropping it leaves all groups.
#[derive(Debug)]
struct Membership {
    /// The rank in the world.
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
    /// If a rank waits longer than `timeout` for other ranks, the group ends with an error. With
    /// `Duration::MAX` ranks wait forever.
    ///
    /// # Errors
    /// Returns an error if `world_size` is 0.
    pub fn group(world_size: usize, timeout: Duration) -> Result<Vec<Self>, CommError> {
        if world_size == 0 {
            return Err(CommError::NoRanks);
        }
        let rendezvous = Arc::new(Rendezvous::new(world_size, timeout));
        let member = |rank| Self {
            membership: Arc::new(Membership { rank, rendezvous: rendezvous.clone() }),
            ranks: GroupRanks::world(rank, world_size),
        };
        Ok((0..world_size).map(member).collect())
    }

    /// Returns the ranks of the group.
    pub fn ranks(&self) -> &GroupRanks {
        &self.ranks
    }

    /// Returns the rank in the group, from 0.
    pub fn rank(&self) -> usize {
        self.ranks.rank()
    }

    /// Returns the number of ranks in the group.
    pub fn world_size(&self) -> usize {
        self.ranks.len()
    }

    /// Waits until every rank has called this function. Unlike [`ProcessGroup::barrier`], it does
    /// not require a payload type.
    ///
    /// # Errors
    /// Returns an error if a rank failed, started a different collective or did not reach the
    /// barrier in time.
    pub fn barrier(&self, tag: CollectiveTag) -> Result<(), CommError> {
        // Nobody reads the deposits of a barrier, so their type is arbitrary.
        ProcessGroup::<Host<u8>>::barrier(self, tag)
    }

    /// Ends the world and all subgroups: every pending and later call of any rank fails with the
    /// cause of the first `abort`.
    pub fn abort(&self, cause: CommError) {
        self.membership.rendezvous.abort(self.membership.rank, cause);
    }

    /// Declares that this rank starts no more collectives and messages, in any group; see
    /// [`RankHandle::leave`].
    pub fn leave(&self) {
        self.membership.rendezvous.leave(self.membership.rank);
    }

    /// Returns the counts of the collectives and messages that this rank has started, in all
    /// groups.
    pub fn statistics(&self) -> Statistics {
        self.membership.rendezvous.statistics(self.membership.rank)
    }

    /// Returns true if a message has arrived and was not received; see
    /// [`ProcessGroup::has_arrived`]. It does not require a payload type.
    pub fn has_arrived(&self, from: usize, tag: &MessageTag) -> bool {
        MessageRoute::new(&self.ranks, MessageDirection::Receive, from, tag.clone())
            .is_ok_and(|route| self.membership.rendezvous.has_arrived(&route))
    }
}

/// The rank of a handle is its rank in the world, also for a subgroup.
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

impl Subgroup for Member {
    fn subgroup(&self, name: &'static str, ranks: &[usize]) -> Result<Self, CommError> {
        let ranks = self.membership.rendezvous.subgroup(&self.ranks, name, ranks)?;
        Ok(Self { membership: self.membership.clone(), ranks })
    }
}

impl<T: SharedPayload> ProcessGroup<T> for Member {
    fn ranks(&self) -> &GroupRanks {
        &self.ranks
    }

    fn start(&self, side: Side, arrays: Vec<T>) -> Result<Pending<T>, CommError> {
        // Taken before `side` is moved. The result may be computed much later.
        let (operation, numels, span) = (side.operation, side.numels().to_vec(), side.span());
        let ranks = self.ranks.clone();
        let rendezvous = &self.membership.rendezvous;
        let ticket = Rendezvous::post(rendezvous, &self.ranks, side, Arc::new(arrays))?;
        // The arithmetic runs on the thread that waits, so a result that is dropped costs nothing.
        let result = move || match operation {
            Operation::AllReduce(op) => exchange::all_reduce(&ticket, op),
            Operation::ReduceScatter(op) => exchange::reduce_scatter(&ticket, op),
            Operation::AllGather => exchange::all_gather(&ticket, &numels),
            Operation::AllToAll => exchange::all_to_all(&ticket),
            Operation::Broadcast { root } => {
                // A `Side` names world ranks, and deposits are numbered within the group. The root
                // is a member, which was checked when the side was made.
                exchange::broadcast(&ticket, ranks.position(root).unwrap_or_default())
            }
            Operation::Barrier => exchange::barrier(&ticket).map(|()| Vec::new()),
        };
        Ok(Pending::new(move || span.in_scope(result)))
    }

    fn send(&self, to: usize, tag: MessageTag, arrays: Vec<T>) -> Result<(), CommError> {
        let route = MessageRoute::new(&self.ranks, MessageDirection::Send, to, tag)?;
        self.membership.rendezvous.send(route, Letter::new(arrays))
    }

    fn receive(&self, from: usize, tag: MessageTag, like: Vec<T>) -> Result<Pending<T>, CommError> {
        let route = MessageRoute::new(&self.ranks, MessageDirection::Receive, from, tag)?;
        let (span, expected) = (route.span(), MessageContents::of(&like));
        // The sender's bytes are not known yet: a receive may be started before the message is
        // sent.
        let bytes = like.iter().map(|array| array.numel() * array.element_size()).sum();
        let ticket = Rendezvous::receive(&self.membership.rendezvous, route, bytes)?;
        // `like` is kept until then, because its memory is where the arrays go.
        let receive = move || Ok(ticket.wait(&expected)?.open(&like));
        Ok(Pending::new(move || span.in_scope(receive)))
    }

    fn has_arrived(&self, from: usize, tag: &MessageTag) -> bool {
        self.has_arrived(from, tag)
    }

    fn check(&self) -> Result<(), CommError> {
        self.failure().map_or(Ok(()), |failure| Err(failure.cause))
    }

    fn abort(&self, cause: CommError) {
        self.abort(cause);
    }
}
