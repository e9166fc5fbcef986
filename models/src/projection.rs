//! Linear layers, applied to rows.
//!
//! Weights have shape `[in, out]`, as in Burn and in the `Conv1D` layers of GPT-2 in `transformers`.

use burn::nn::Linear;
use burn::tensor::{Tensor, backend::Backend};
use deepburn_ops::{LinearOps, linear};

use crate::weights::WeightInit;

/// Applies a linear layer to `[rows, in]`. The result has shape `[rows, out]`.
pub(crate) fn project<B: LinearOps>(projection: &Linear<B>, x: Tensor<B, 2>) -> Tensor<B, 2> {
    linear(x, projection.weight.val(), projection.bias.as_ref().map(|bias| bias.val()))
}

/// Returns the linear layer at module path `path`, with a weight of shape `[in, out]`, and with a bias if the model has
/// one there.
pub(crate) fn projection<B: Backend>(init: &WeightInit<B>, path: &str) -> Linear<B> {
    Linear {
        weight: init.param(&format!("{path}.weight")),
        bias: init.optional_param(&format!("{path}.bias")),
    }
}
