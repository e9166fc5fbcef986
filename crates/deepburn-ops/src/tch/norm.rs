//! Layer normalization with LibTorch's forward kernel and a hand-written backward pass.
//!
//! LibTorch's own backward kernel is not in the Rust bindings. The formula here needs several
//! passes over `[rows, width]` tensors in at least f32.

use burn_backend::tensor::FloatTensor;
use burn_tch::{LibTorch, TchElement};
use tch::Tensor;

use super::{wide, wrap};
use crate::norm::{LayerNormGradients, LayerNormOps, LayerNormOutput, LayerNormSaved};

/// Means and deviations have at least f32 precision for rows of every type.
impl<E: TchElement> LayerNormOps for LibTorch<E> {
    /// Uses LibTorch's kernel for mixed types: 16-bit rows with f32 weights give a 16-bit output
    /// and f32 statistics.
    fn layer_norm_forward(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        epsilon: f64,
    ) -> LayerNormOutput<Self> {
        // With weights in f32, means and deviations of 16-bit rows are in f32 too.
        let kind = wide(x.tensor.kind());
        let [gamma, beta] = [gamma, beta].map(|weights| weights.tensor.to_kind(kind));
        let width = x.tensor.size()[1];
        let (output, mean, reciprocal_deviation) =
            x.tensor.native_layer_norm([width], Some(gamma), Some(beta), epsilon);
        LayerNormOutput {
            output: wrap(output),
            mean: wrap(mean),
            reciprocal_deviation: wrap(reciprocal_deviation),
        }
    }

    /// Computes the formula of the portable implementation with fewer passes:
    /// `r (g - mean(g) - n mean(g n))`, where `g = grad gamma` and `n` is the normalized row.
    ///
    /// Both means over a row are matrix-vector products, because `sum(grad gamma)` is the product
    /// of a row of `grad` with `gamma`. The intermediate tensors have the shape of `x`, in at least
    /// f32, and are freed at the end.
    fn layer_norm_backward(
        grad: FloatTensor<Self>,
        saved: LayerNormSaved<Self>,
    ) -> LayerNormGradients<Self> {
        let (dtype, weight_dtype) = (saved.x.tensor.kind(), saved.gamma.tensor.kind());
        let kind = wide(dtype);
        let [grad, gamma] = [grad, saved.gamma].map(|it| it.tensor.to_kind(kind));
        let (mean, reciprocal) = (saved.mean.tensor, saved.reciprocal_deviation.tensor);
        let width = mean_divisor(&gamma);
        let normalized = (saved.x.tensor.to_kind(kind) - mean) * &reciprocal;
        let by_gamma = &grad * &normalized;
        // Means along a row are products with a vector.
        let along = by_gamma.mv(&gamma).unsqueeze(1) / width;
        let level = grad.mv(&gamma).unsqueeze(1) / width;
        let x = ((&grad * gamma - level) - normalized * along) * reciprocal;
        // Sums over rows, in the type of the weights.
        let rows = |of: Tensor| of.sum_dim_intlist(0_i64, false, kind).to_kind(weight_dtype);
        LayerNormGradients {
            x: wrap(x.to_kind(dtype)),
            gamma: wrap(rows(by_gamma)),
            beta: wrap(rows(grad)),
        }
    }
}

/// Returns the length of a row as a divisor.
fn mean_divisor(gamma: &Tensor) -> f64 {
    gamma.numel() as f64
}
