//! The output of attention's forward pass, and the values saved for its backward pass.

use burn_backend::Backend;
use burn_backend::tensor::FloatTensor;

use super::dropout::AttentionDropout;

/// The result of a forward pass.
#[derive(Debug)]
pub struct AttentionOutput<B: Backend> {
    /// The attention output, `[batch * positions, width]`.
    pub output: FloatTensor<B>,
    /// The log-sum-exp of each row of scores, `[batch * heads, positions]`, in at least f32.
    pub log_sums: FloatTensor<B>,
}

/// The values saved for the backward pass.
#[derive(Debug, Clone)]
pub struct AttentionSaved<B: Backend> {
    /// The input: queries, keys and values of all heads, a row per position.
    pub projected: FloatTensor<B>,
    /// See [`AttentionOutput`].
    pub output: FloatTensor<B>,
    /// See [`AttentionOutput`].
    pub log_sums: FloatTensor<B>,
    /// The dropout of the forward pass.
    pub dropout: Option<AttentionDropout>,
}
