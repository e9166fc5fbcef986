//! The parameter gradients of a linear layer.

use burn_backend::Backend;
use burn_backend::tensor::FloatTensor;

/// The gradients of weight and bias.
#[derive(Debug)]
pub struct LinearGradients<B: Backend> {
    /// The gradient of the weight, `[in, out]`.
    pub weight: FloatTensor<B>,
    /// The gradient of the bias, `[out]`.
    pub bias: FloatTensor<B>,
}
