//! The gradients of a gated activation.

use burn_backend::Backend;
use burn_backend::tensor::FloatTensor;

/// The gradients of the inputs, each in its shape and type.
#[derive(Debug)]
pub struct GatedGradients<B: Backend> {
    /// The gradient of the gate, before its function.
    pub gate: FloatTensor<B>,
    /// The gradient of the gated values.
    pub up: FloatTensor<B>,
}
