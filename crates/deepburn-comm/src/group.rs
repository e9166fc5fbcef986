//! The process group: the collectives and messages of sharded training.

use crate::side::{check_chunks, check_reduction, check_root};
use crate::{
    CollectiveTag, CommError, GroupRanks, MessageTag, Operation, Payload, ReduceOp, Side, Signature,
};

/// A fixed set of ranks that exchange data.
///
/// Every collective takes a list of arrays, so that many small arrays can be exchanged together. It
/// returns a handle immediately, and [`Pending::wait`] returns the result.
///
/// All ranks must start the same collectives in the same order. The [`CollectiveTag`] names the
/// exchange, and the group adds a sequence number. If the calls of two ranks differ, all ranks get
/// an error that names both sides.
///
/// Two ranks exchange arrays with [`send`](Self::send) and [`receive`](Self::receive). Messages are
/// matched by their sender and tag, and never by the order of calls.
///
/// The group may be the world or a [subgroup](Subgroup) of it. Ranks in arguments are ranks of the
/// group. Errors name ranks of the world.
///
/// Reductions add in rank order. Results therefore depend only on the inputs and the number of
/// ranks, not on timing.
///
/// # Errors
/// A collective returns an error immediately if its arguments are invalid or the group has ended.
/// Other failures are returned by [`Pending::wait`].
pub trait ProcessGroup<T: Payload>: Send + Sync {
    /// Returns the ranks of the group.
    fn ranks(&self) -> &GroupRanks;

    /// Returns the rank in this group, from 0.
    fn rank(&self) -> usize {
        self.ranks().rank()
    }

    /// Returns the number of ranks in this group.
    fn world_size(&self) -> usize {
        self.ranks().len()
    }

    /// Starts the collective that `side` describes with the arrays of this rank.
    ///
    /// The methods below check their arguments, describe the call and pass it to this method, so
    /// programs do not call it.
    fn start(&self, side: Side, arrays: Vec<T>) -> Result<Pending<T>, CommError>;

    /// Reduces each array over all ranks. Every rank gets its own flat copy of the complete result.
    fn all_reduce(
        &self,
        tag: CollectiveTag,
        arrays: Vec<T>,
        op: ReduceOp,
    ) -> Result<Pending<T>, CommError> {
        let signature = check_reduction(&arrays, op);
        start_checked(self, Operation::AllReduce(op), tag, arrays, signature)
    }

    /// Reduces each array over all ranks. Rank r gets elements `[r * c, (r + 1)
    /// * c)` of the flat result with `c = ceil(numel / world_size)`, padded
    /// with zeros to `c` elements.
    fn reduce_scatter(
        &self,
        tag: CollectiveTag,
        arrays: Vec<T>,
        op: ReduceOp,
    ) -> Result<Pending<T>, CommError> {
        let signature = check_reduction(&arrays, op);
        start_checked(self, Operation::ReduceScatter(op), tag, arrays, signature)
    }

    /// Concatenates the chunks of all ranks in rank order and truncates each result to `numels[i]`
    /// elements. Ranks whose arrays are in the same memory share one read-only result.
    fn all_gather(
        &self,
        tag: CollectiveTag,
        chunks: Vec<T>,
        numels: Vec<usize>,
    ) -> Result<Pending<T>, CommError> {
        let signature = check_chunks(&chunks, &numels, self.world_size())
            .map(|()| Signature { numels, ..Signature::of(&chunks) });
        start_checked(self, Operation::AllGather, tag, chunks, signature)
    }

    /// Sends the r-th part of each array to rank r: elements `[r * c, (r + 1) * c)` with
    /// `c = ceil(numel / world_size)`. The last parts may be shorter.
    ///
    /// Each rank gets one flat result per array: its parts from all ranks, concatenated in rank
    /// order without padding.
    fn all_to_all(&self, tag: CollectiveTag, arrays: Vec<T>) -> Result<Pending<T>, CommError> {
        let signature = Ok(Signature::of(&arrays));
        start_checked(self, Operation::AllToAll, tag, arrays, signature)
    }

    /// Sends the arrays of `root` to every rank. The other ranks pass arrays of the same shape. The
    /// result is placed in the same memory as these arrays, for example on the same device.
    fn broadcast(
        &self,
        tag: CollectiveTag,
        arrays: Vec<T>,
        root: usize,
    ) -> Result<Pending<T>, CommError> {
        let signature = check_root(root, self.world_size()).map(|()| Signature::of(&arrays));
        // An invalid root stays as it was passed, for the error.
        let root = self.ranks().members().get(root).copied().unwrap_or(root);
        start_checked(self, Operation::Broadcast { root }, tag, arrays, signature)
    }

    /// Waits until every rank has called this function.
    fn barrier(&self, tag: CollectiveTag) -> Result<(), CommError> {
        // A barrier has no result that could be awaited later.
        self.start(Side::barrier(self.ranks(), tag), Vec::new())?.wait().map(drop)
    }

    /// Sends arrays to rank `to`. Never waits for the receiver: the arrays are kept until it has
    /// received them. A message that is never received is not an error.
    ///
    /// Any number of messages may be under way. The receiver finds a message by its sender and tag,
    /// so both ranks may start their calls in different orders. Messages with the same sender and
    /// tag are received in the order in which they were sent.
    ///
    /// # Errors
    /// Returns an error if `to` is this rank or not a rank of the group, or if the group has ended.
    fn send(&self, to: usize, tag: MessageTag, arrays: Vec<T>) -> Result<(), CommError>;

    /// Receives the arrays that rank `from` sends with this tag, before or after this call.
    ///
    /// `like` are arrays of the same sizes and types. The result is placed in the same memory, for
    /// example on the same device, and the values of `like` are not used. A sparse array counts as
    /// many elements as the dense array. [`Pending::wait`] waits at most for the time-out of the
    /// group, and fails at once if the sender fails or has left. Dropping the handle discards the
    /// message.
    ///
    /// # Errors
    /// Returns an error if `from` is this rank or not a rank of the group, or if the group has
    /// ended. [`Pending::wait`] returns an error if the message does not have the sizes and types
    /// of `like`; this ends the group.
    fn receive(&self, from: usize, tag: MessageTag, like: Vec<T>) -> Result<Pending<T>, CommError>;

    /// Returns true if a message from rank `from` with this tag has arrived and no receive has
    /// claimed it. Never waits. Returns false for a rank that is not in the group.
    ///
    /// A program that waits for an arrival in a loop must also [check](Self::check) the group.
    fn has_arrived(&self, from: usize, tag: &MessageTag) -> bool;

    /// Checks that the group has not ended, without communication. Ranks that compute for a long
    /// time between two collectives should call this function.
    ///
    /// # Errors
    /// Returns the failure that ended the group.
    fn check(&self) -> Result<(), CommError>;

    /// Ends the group, the world and all of its subgroups: every pending and later call of any rank
    /// fails with `cause`.
    fn abort(&self, cause: CommError);
}

/// Starts a collective unless its arguments are invalid, for which there is a reason instead of a
/// signature.
fn start_checked<T: Payload>(
    group: &(impl ProcessGroup<T> + ?Sized),
    operation: Operation,
    tag: CollectiveTag,
    arrays: Vec<T>,
    signature: Result<Signature, String>,
) -> Result<Pending<T>, CommError> {
    group.start(Side::checked::<T>(group.ranks(), operation, tag, signature)?, arrays)
}

/// A process group of which subgroups can be made.
///
/// A subgroup has its own ranks, its own common order of collectives and its own messages. It
/// shares everything else with the world: the failure that ends all groups of all ranks at once,
/// the time-out, the end of a rank, and the [`Statistics`](crate::Statistics) of the rank.
///
/// Groups of rank threads run independently. Between processes, a rank runs the collectives of all
/// its groups one after the other, in the order in which it starts them. Ranks that share two
/// groups must therefore start the collectives of both in an order that is consistent on all ranks,
/// as they do if all run the same program. Messages are not part of this order.
pub trait Subgroup: Sized {
    /// Returns this rank's member of the subgroup of the world ranks `ranks`, one of which is this
    /// rank. Their order, which is usually ascending, is the order of the subgroup. Also if `self`
    /// is a subgroup, `ranks` are ranks of the world, and need not be in it.
    ///
    /// Every member makes the same call. There is no communication to wait for. Groups of the same
    /// name are counted on each rank, and the n-th must be the same for all of its members.
    /// Disjoint groups, such as the shard groups of all stages, may have one name; groups that
    /// overlap need different names.
    ///
    /// # Errors
    /// Returns an error if a rank does not exist, is listed twice or is missing although it calls,
    /// or if the group has ended. If members disagree about the ranks, all groups end.
    fn subgroup(&self, name: &'static str, ranks: &[usize]) -> Result<Self, CommError>;
}

/// The result of a collective or a receive that may still be in progress.
///
/// The group keeps the arrays alive until every rank has its result. Dropping the handle discards
/// the result without delaying other ranks.
///
/// Ignoring a handle causes a compiler warning:
///
/// ```compile_fail
/// #![deny(unused_must_use)]
/// # use deepburn_comm::{CommError, Host, Member, ProcessGroup, ReduceOp, CollectiveTag};
/// # fn f(member: Member, gradients: Vec<Host<f32>>) -> Result<(), CommError> {
/// member.all_reduce(CollectiveTag::new("gradients", 0), gradients, ReduceOp::Mean)?;
/// # Ok(()) }
/// ```
#[must_use = "a collective is complete only after `wait`"]
pub struct Pending<T: Payload> {
    finish: Box<dyn FnOnce() -> Result<Vec<T>, CommError> + Send>,
}

impl<T: Payload> Pending<T> {
    /// Returns a handle. `finish` waits for the collective and computes the result.
    pub fn new(finish: impl FnOnce() -> Result<Vec<T>, CommError> + Send + 'static) -> Self {
        Self { finish: Box::new(finish) }
    }

    /// Blocks until the result is available.
    ///
    /// # Errors
    /// Returns an error that names the rank that failed, started a different collective, or did not
    /// arrive in time.
    pub fn wait(self) -> Result<Vec<T>, CommError> {
        (self.finish)()
    }
}

impl<T: Payload> std::fmt::Debug for Pending<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Pending")
    }
}
