//! The gradients of an affine map.

use burn_backend::Backend;
use burn_backend::tensor::FloatTensor;

/// The gradients of the trained parameters.
#[derive(Debug)]
pub struct LinearGradients<B: Backend> {
    /// `[in, out]`.
    pub weight: FloatTensor<B>,
    /// `[out]`.
    pub bias: FloatTensor<B>,
}
