//! Linear layers with a bias, applied to rows.
//!
//! Weights have shape `[in, out]`, as in Burn and in the `Conv1D` layers of GPT-2 in `transformers`, so GPT-2 files can
//! be read without transposing the weights.

use burn::nn::Linear;
use burn::tensor::{Tensor, backend::Backend};
use deepburn_ops::{LinearOps, linear};

use crate::weights::WeightInit;

/// Applies a linear layer to `[rows, in]`. The result has shape `[rows, out]`.
pub(crate) fn project<B: LinearOps>(projection: &Linear<B>, x: Tensor<B, 2>) -> Tensor<B, 2> {
    linear(x, projection.weight.val(), projection.bias.as_ref().map(|bias| bias.val()))
}

/// Returns a linear layer with a bias and a weight of shape `[in, out]`, like Burn's linear layer and `Conv1D` of
/// `transformers`.
pub(crate) fn conv1d<B: Backend>(init: &WeightInit<B>, path: &str) -> Linear<B> {
    Linear {
        weight: init.param(&format!("{path}.weight")),
        bias: Some(init.param(&format!("{path}.bias"))),
    }
}
