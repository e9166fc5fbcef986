//! What a simulated training pass does, in order.
//!
//! Main type: [`PassEvent`]. The memory of a pass does not depend on time, so its events are the same on any machine
//! and network; [`cost`](crate::cost) replays them against clocks.

/// One event of a training pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PassEvent {
    /// An op of forward runs; its place in the graph.
    Forward(usize),
    /// Backward begins.
    StartBackward,
    /// Backward runs an op of forward again (activation checkpointing).
    Recompute(usize),
    /// The backward pass of an op reads the parameter that it needs. A product does before its input is computed again.
    ReadAgain(usize),
    /// The backward pass of an op runs.
    Backward(usize),
    /// The gradients of a bucket start to be reduced.
    Reduce(Vec<BucketedNumel>),
    /// The oldest bucket under way is awaited and added to the sums.
    Land,
}

/// The elements of a gradient in a bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BucketedNumel {
    /// The number of elements of the parameter, which the sum will have.
    pub(crate) numel: u64,
    /// The number of elements that the rank contributes. It is smaller for an
    /// embedding, of whose gradient a rank has only the rows of its tokens.
    pub(crate) held: u64,
}
