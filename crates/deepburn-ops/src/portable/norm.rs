//! Layer normalization with ops that every backend supports.
//!
//! Rows, means and deviations are computed in at least f32. Each op allocates a tensor with the
//! shape of `x`. The variance is the mean of the squared differences from the mean.

use burn::tensor::Tensor;
use burn_backend::Backend;

use super::{cast, in_f32, primitive, tensor};
use crate::norm::saved::{LayerNormGradients, LayerNormOutput, LayerNormSaved};

/// Implements [`LayerNormOps::layer_norm_forward`](crate::LayerNormOps::layer_norm_forward).
///
/// Returns the output in the type of `x`, and mean and reciprocal deviation of each row,
/// `[rows, 1]`, in at least f32. Weights of another type are converted.
pub fn forward<B: Backend>(
    x: B::FloatTensorPrimitive,
    gamma: B::FloatTensorPrimitive,
    beta: B::FloatTensorPrimitive,
    epsilon: f64,
) -> LayerNormOutput<B> {
    let x: Tensor<B, 2> = tensor(x);
    let dtype = x.dtype();
    let x = in_f32(x);
    let mean = x.clone().mean_dim(1);
    let centered = x - mean.clone();
    let variance = (centered.clone() * centered.clone()).mean_dim(1);
    let reciprocal_deviation = (variance + epsilon).sqrt().recip();
    let row = |weights| in_f32(tensor::<B, 1>(weights)).unsqueeze::<2>();
    let output = centered * reciprocal_deviation.clone() * row(gamma) + row(beta);
    LayerNormOutput {
        output: primitive(cast(output, dtype)),
        mean: primitive(mean),
        reciprocal_deviation: primitive(reciprocal_deviation),
    }
}

/// Implements [`LayerNormOps::layer_norm_backward`](crate::LayerNormOps::layer_norm_backward).
///
/// With the normalized row `n = (x - mean) r` and `g = dy gamma`:
/// `dx = r (g - mean(g) - n mean(g n))`, where the means are over a row (Ba, Kiros and Hinton
/// 2016). The gradients of `gamma` and `beta` are sums over all rows: `sum(dy n)` and `sum(dy)`.
///
/// The gradient of `x` has the type of `x`. The gradients of `gamma` and `beta` have the type of
/// `gamma`.
pub fn backward<B: Backend>(
    grad: B::FloatTensorPrimitive,
    saved: LayerNormSaved<B>,
) -> LayerNormGradients<B> {
    let (grad, x): (Tensor<B, 2>, Tensor<B, 2>) = (tensor(grad), tensor(saved.x));
    let gamma: Tensor<B, 1> = tensor(saved.gamma);
    let (dtype, weight_dtype) = (x.dtype(), gamma.dtype());
    let grad = in_f32(grad);
    let mean: Tensor<B, 2> = tensor(saved.mean);
    let reciprocal_deviation: Tensor<B, 2> = tensor(saved.reciprocal_deviation);
    // The normalized row is recomputed from `x`, which needs less memory than saving it.
    let normalized = (in_f32(x) - mean) * reciprocal_deviation.clone();
    let weights = |sum: Tensor<B, 2>| primitive(cast(sum.squeeze_dim::<1>(0), weight_dtype));
    let gamma_grad = weights((grad.clone() * normalized.clone()).sum_dim(0));
    let beta_grad = weights(grad.clone().sum_dim(0));
    let scaled = grad * in_f32(gamma).unsqueeze::<2>();
    let along = (scaled.clone() * normalized.clone()).mean_dim(1);
    let x_grad = (scaled.clone() - scaled.mean_dim(1) - normalized * along) * reciprocal_deviation;
    LayerNormGradients { x: primitive(cast(x_grad, dtype)), gamma: gamma_grad, beta: beta_grad }
}
