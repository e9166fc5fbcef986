//! Linear layers with a bias, applied to rows.
//!
//! Weights are `[in, out]`, as in Burn and in the `Conv1D` of `transformers`' GPT-2. So files of GPT-2 are read
//! without a transposition.

use burn::nn::Linear;
use burn::tensor::{Tensor, backend::Backend};
use deepburn_ops::{LinearOps, linear};

use crate::weights::{InitialValues, WeightInit};

/// Applies a projection to `[rows, in]`; the result is `[rows, out]`.
pub(crate) fn project<B: LinearOps>(projection: &Linear<B>, x: Tensor<B, 2>) -> Tensor<B, 2> {
    linear(x, projection.weight.val(), projection.bias.as_ref().map(|bias| bias.val()))
}

/// Returns a projection with weight `[in, out]`, as Burn's linear layer and the Conv1D of `transformers` have it,
/// and bias 0.
pub(crate) fn conv1d<B: Backend>(
    init: &WeightInit<B>,
    path: &str,
    shape: [usize; 2],
    std: f64,
) -> Linear<B> {
    Linear {
        weight: init.param(&format!("{path}.weight"), shape, InitialValues::Normal { std }),
        bias: Some(init.param(&format!("{path}.bias"), [shape[1]], InitialValues::Zeros)),
    }
}
