//! A block of a model, the smallest part that a stage holds.

/// What runs between two points at which a model can be cut.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Block {
    /// Path of the block in the model, `h.0` for example.
    pub name: String,
    /// Number of parameters.
    pub parameters: u64,
    /// Operations of the forward pass of a micro-batch.
    pub forward_operations: u64,
    /// Operations of the backward pass of a micro-batch.
    pub backward_operations: u64,
    /// Bytes of parameters, gradients and optimizer states of a rank.
    pub state_bytes: u64,
    /// Bytes of activations between the forward and the backward pass of a micro-batch.
    pub activation_bytes: u64,
}
