//! The output of layer normalization's forward pass, and the values saved for its backward pass.

use burn_backend::Backend;
use burn_backend::tensor::FloatTensor;

/// The result of a forward pass.
#[derive(Debug)]
pub struct LayerNormOutput<B: Backend> {
    /// The normalized rows, `[rows, width]`.
    pub output: FloatTensor<B>,
    /// The mean of each row, `[rows, 1]`, in at least f32.
    pub mean: FloatTensor<B>,
    /// `1 / sqrt(var + epsilon)` of each row, `[rows, 1]`, in at least f32.
    pub reciprocal_deviation: FloatTensor<B>,
}

/// The values saved for the backward pass.
#[derive(Debug, Clone)]
pub struct LayerNormSaved<B: Backend> {
    /// The input, `[rows, width]`.
    pub x: FloatTensor<B>,
    /// The weight, `[width]`.
    pub gamma: FloatTensor<B>,
    /// See [`LayerNormOutput`].
    pub mean: FloatTensor<B>,
    /// See [`LayerNormOutput`].
    pub reciprocal_deviation: FloatTensor<B>,
}

/// The gradients of the inputs.
#[derive(Debug)]
pub struct LayerNormGradients<B: Backend> {
    /// The gradient of the input, `[rows, width]`.
    pub x: FloatTensor<B>,
    /// The gradient of the weight, `[width]`.
    pub gamma: FloatTensor<B>,
    /// The gradient of the bias, `[width]`.
    pub beta: FloatTensor<B>,
}
