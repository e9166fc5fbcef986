//! The process group: the collectives that sharded training is made of.

use crate::{CommError, Payload, ReduceOp, Tag};

/// A fixed set of ranks that exchange data.
///
/// Every collective takes a list of arrays, so that many small ones travel as one message, and
/// returns at once with a handle: the data is there after [`Pending::wait`]. All ranks start the
/// same collectives in the same order; the [`Tag`] says what is exchanged, the group adds a
/// sequence number, and ranks that disagree all get an error that names both sides.
///
/// Reductions add in rank order, so that a result depends on the number of ranks only.
pub trait ProcessGroup<T: Payload>: Send + Sync {
    /// This rank, from 0.
    fn rank(&self) -> usize;

    /// Number of ranks.
    fn world_size(&self) -> usize;

    /// Reduces each array over all ranks; every rank gets its own copy of the whole result, flat.
    fn all_reduce(&self, tag: Tag, arrays: Vec<T>, op: ReduceOp) -> Result<Pending<T>, CommError>;

    /// Reduces each array over all ranks; rank r gets elements `[r * c, (r + 1) * c)` of the flat
    /// result with `c = ceil(numel / world_size)`, zero-padded to `c` elements.
    fn reduce_scatter(
        &self,
        tag: Tag,
        arrays: Vec<T>,
        op: ReduceOp,
    ) -> Result<Pending<T>, CommError>;

    /// Concatenates the chunks of all ranks in rank order, one flat result per chunk, cut to
    /// `numels[i]` elements. Ranks that share a memory share one read-only result.
    fn all_gather(
        &self,
        tag: Tag,
        chunks: Vec<T>,
        numels: Vec<usize>,
    ) -> Result<Pending<T>, CommError>;

    /// Hands the r-th part of each array to rank r, the part that it owns of a reduction: elements
    /// `[r * c, (r + 1) * c)` with `c = ceil(numel / world_size)`, fewer at the end. Each rank gets its
    /// parts of all ranks concatenated in rank order, one flat result per array. Nothing is padded.
    fn all_to_all(&self, tag: Tag, arrays: Vec<T>) -> Result<Pending<T>, CommError>;

    /// Hands the arrays of `root` to every rank. Others pass arrays of the same shape, whose
    /// memory says where the result is to live.
    fn broadcast(&self, tag: Tag, arrays: Vec<T>, root: usize) -> Result<Pending<T>, CommError>;

    /// Returns when every rank has called it.
    fn barrier(&self, tag: Tag) -> Result<(), CommError>;

    /// Asks whether the group still works, without exchanging anything: for a rank that computes
    /// for long between two collectives.
    ///
    /// # Errors
    /// What ended the group.
    fn check(&self) -> Result<(), CommError>;

    /// Ends the group: every present and later call of any rank fails with `cause`.
    fn abort(&self, cause: CommError);
}

/// The result of a collective that may still be under way.
///
/// The arrays handed in are kept alive by the group until every rank has taken its result.
/// Dropping the handle gives up the result without holding up the other ranks.
///
/// A handle that is forgotten is a compiler warning:
///
/// ```compile_fail
/// #![deny(unused_must_use)]
/// # use deepburn_comm::{CommError, Host, Member, ProcessGroup, ReduceOp, Tag};
/// # fn f(member: Member, gradients: Vec<Host<f32>>) -> Result<(), CommError> {
/// member.all_reduce(Tag::new("gradients", 0), gradients, ReduceOp::Mean)?;
/// # Ok(()) }
/// ```
#[must_use = "a collective is complete only after `wait`"]
pub struct Pending<T: Payload> {
    finish: Box<dyn FnOnce() -> Result<Vec<T>, CommError> + Send>,
}

impl<T: Payload> Pending<T> {
    /// A handle that `finish` completes.
    pub fn new(finish: impl FnOnce() -> Result<Vec<T>, CommError> + Send + 'static) -> Self {
        Self { finish: Box::new(finish) }
    }

    /// Blocks until the result is there.
    ///
    /// # Errors
    /// When a rank failed, disagreed or did not arrive in time; the error names it.
    pub fn wait(self) -> Result<Vec<T>, CommError> {
        (self.finish)()
    }
}

impl<T: Payload> std::fmt::Debug for Pending<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Pending")
    }
}
