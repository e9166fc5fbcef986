//! The values of an attention that its passes hand on.

use burn_backend::Backend;
use burn_backend::tensor::FloatTensor;

use super::dropout::AttentionDropout;

/// The result of a forward pass.
#[derive(Debug)]
pub struct AttentionOutput<B: Backend> {
    /// `[batch * positions, width]`.
    pub output: FloatTensor<B>,
    /// The logarithm of the sum of exponentials of each row of scores, `[batch
    /// * heads, positions]`, in at least f32.
    pub log_sums: FloatTensor<B>,
}

/// The values that backward needs.
#[derive(Debug, Clone)]
pub struct AttentionSaved<B: Backend> {
    /// The input.
    pub projected: FloatTensor<B>,
    /// See [`AttentionOutput`].
    pub output: FloatTensor<B>,
    /// See [`AttentionOutput`].
    pub log_sums: FloatTensor<B>,
    /// The same as in forward.
    pub dropout: Option<AttentionDropout>,
}
