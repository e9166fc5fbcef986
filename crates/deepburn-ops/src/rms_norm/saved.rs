//! The output of RMS normalization's forward pass, and the values saved for its backward pass.

use burn_backend::Backend;
use burn_backend::tensor::FloatTensor;

/// The result of a forward pass.
#[derive(Debug)]
pub struct RmsNormOutput<B: Backend> {
    /// The normalized rows, `[rows, width]`.
    pub output: FloatTensor<B>,
    /// `1 / sqrt(mean(x^2) + epsilon)` of each row, `[rows, 1]`, in at least f32.
    pub reciprocal_root: FloatTensor<B>,
}

/// The values saved for the backward pass.
#[derive(Debug, Clone)]
pub struct RmsNormSaved<B: Backend> {
    /// The input, `[rows, width]`.
    pub x: FloatTensor<B>,
    /// The weight, `[width]`.
    pub weight: FloatTensor<B>,
    /// See [`RmsNormOutput`].
    pub reciprocal_root: FloatTensor<B>,
}

/// The gradients of the inputs.
#[derive(Debug)]
pub struct RmsNormGradients<B: Backend> {
    /// The gradient of the input, `[rows, width]`.
    pub x: FloatTensor<B>,
    /// The gradient of the weight, `[width]`.
    pub weight: FloatTensor<B>,
}
