//! The events of a simulated training pass.
//!
//! Main type: [`PassEvent`]. The events and their order do not depend on the speed of the machine
//! and the network. [`cost`](crate::cost) replays them with simulated clocks to predict the time of
//! a step.

/// One event of a training pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PassEvent {
    /// The forward pass of the op with this index in the graph runs.
    Forward(usize),
    /// The backward pass begins.
    StartBackward,
    /// Backward recomputes the op with this index (activation checkpointing).
    Recompute(usize),
    /// The backward pass of the op with this index reads its weight. A product reads the weight
    /// before its input is recomputed.
    ReadAgain(usize),
    /// The backward pass of the op with this index runs.
    Backward(usize),
    /// The reduction of a bucket starts.
    Reduce(Vec<BucketedNumel>),
    /// The rank waits for the oldest pending reduction and adds its gradients to the gradient sums.
    Land,
}

/// The number of elements of a gradient in a bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BucketedNumel {
    /// The number of elements of the parameter and of the reduced gradient.
    pub(crate) numel: u64,
    /// The number of elements that the rank contributes. It can be smaller for an embedding,
    /// because the gradient of a rank contains only the rows of its tokens.
    pub(crate) held: u64,
}
