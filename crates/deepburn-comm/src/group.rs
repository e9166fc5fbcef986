//! The process group: the collectives of sharded training.

use crate::{CollectiveTag, CommError, Operation, Payload, ReduceOp, Side};

/// A fixed set of ranks that exchange data.
///
/// Every collective takes a list of arrays, so that many small arrays can be exchanged together. It
/// returns a handle immediately, and [`Pending::wait`] returns the result.
///
/// All ranks must start the same collectives in the same order. The [`CollectiveTag`] names the
/// exchange, and the group adds a sequence number. If the calls of two ranks differ, all ranks get
/// an error that names both sides.
///
/// Reductions add in rank order. Results therefore depend only on the inputs and the number of
/// ranks, not on timing.
///
/// # Errors
///
/// A collective returns an error immediately if its arguments are invalid or the group has ended.
/// Other failures are returned by [`Pending::wait`].
pub trait ProcessGroup<T: Payload>: Send + Sync {
    /// Returns the rank, from 0.
    fn rank(&self) -> usize;

    /// Returns the number of ranks.
    fn world_size(&self) -> usize;

    /// Starts the collective that `side` describes with the arrays of this rank.
    ///
    /// The methods below check their arguments, describe the call and pass it to this method, so
    /// programs do not call it.
    fn start(&self, side: Side, arrays: Vec<T>) -> Result<Pending<T>, CommError>;

    /// Reduces each array over all ranks. Every rank gets its own flat copy of
    /// the complete result.
    fn all_reduce(
        &self,
        tag: CollectiveTag,
        arrays: Vec<T>,
        op: ReduceOp,
    ) -> Result<Pending<T>, CommError> {
        let side = Side::reduction(self.rank(), Operation::AllReduce, tag, &arrays, op)?;
        self.start(side, arrays)
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
        let side = Side::reduction(self.rank(), Operation::ReduceScatter, tag, &arrays, op)?;
        self.start(side, arrays)
    }

    /// Concatenates the chunks of all ranks in rank order and truncates each result to `numels[i]`
    /// elements. Ranks whose arrays are in the same memory share one read-only result.
    fn all_gather(
        &self,
        tag: CollectiveTag,
        chunks: Vec<T>,
        numels: Vec<usize>,
    ) -> Result<Pending<T>, CommError> {
        let side = Side::all_gather(self.rank(), self.world_size(), tag, &chunks, numels)?;
        self.start(side, chunks)
    }

    /// Sends the r-th part of each array to rank r: elements `[r * c, (r + 1) * c)` with `c =
    /// ceil(numel / world_size)`. The last parts may be shorter.
    ///
    /// Each rank gets one flat result per array: its parts from all ranks, concatenated in rank
    /// order without padding.
    fn all_to_all(&self, tag: CollectiveTag, arrays: Vec<T>) -> Result<Pending<T>, CommError> {
        self.start(Side::all_to_all(self.rank(), tag, &arrays)?, arrays)
    }

    /// Sends the arrays of `root` to every rank. The other ranks pass arrays of the same shape. The
    /// result is placed in the same memory as these arrays, for example on the same device.
    fn broadcast(
        &self,
        tag: CollectiveTag,
        arrays: Vec<T>,
        root: usize,
    ) -> Result<Pending<T>, CommError> {
        let side = Side::broadcast(self.rank(), self.world_size(), tag, &arrays, root)?;
        self.start(side, arrays)
    }

    /// Waits until every rank has called this function.
    fn barrier(&self, tag: CollectiveTag) -> Result<(), CommError> {
        self.start(Side::barrier(self.rank(), tag), Vec::new())?.wait().map(drop)
    }

    /// Checks that the group has not ended, without communication. Ranks that compute for a long
    /// time between two collectives should call this function.
    ///
    /// # Errors
    ///
    /// Returns the failure that ended the group.
    fn check(&self) -> Result<(), CommError>;

    /// Ends the group: every pending and later call of any rank fails with `cause`.
    fn abort(&self, cause: CommError);
}

/// The result of a collective that may still be in progress.
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
    ///
    /// Returns an error that names the rank that failed, started a different
    /// collective, or did not arrive in time.
    pub fn wait(self) -> Result<Vec<T>, CommError> {
        (self.finish)()
    }
}

impl<T: Payload> std::fmt::Debug for Pending<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Pending")
    }
}
