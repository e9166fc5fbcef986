//! RMS normalization: `x / sqrt(mean(x^2) + epsilon)`, times a weight (Zhang and Sennrich 2019).
//!
//! Main trait: [`RmsNormOps`]. The forward pass saves the input and one number per row. The
//! backward pass recomputes the quotients.

pub(crate) mod saved;

use burn::tensor::Tensor;
use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_autodiff::ops::Backward;
use burn_backend::Backend;
use burn_backend::tensor::FloatTensor;

use crate::autodiff_step::{backward_step, record};
use crate::norm::on_rows;
use crate::portable;
pub use saved::{RmsNormGradients, RmsNormOutput, RmsNormSaved};

/// How the quotient `x / sqrt(mean(x^2) + epsilon)` is multiplied by the weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RmsWeight {
    //= transformers 5.23.0 models/llama/modeling_llama.py LlamaRMSNorm
    /// The quotient is rounded to the type of `x` before it is multiplied, as in Llama.
    Factor,
    //= transformers 5.23.0 models/gemma2/modeling_gemma2.py Gemma2RMSNorm
    /// The quotient is multiplied by `1 + weight` and rounded once, as in Gemma.
    PlusOne,
}

/// The formula of an RMS normalization.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RmsNorm {
    /// Added to the mean of the squares.
    pub epsilon: f64,
    /// The use of the weight.
    pub weight: RmsWeight,
}

/// RMS normalization of the rows of a matrix. Squares and quotients are computed in at least f32.
///
/// A row that contains NaN or an infinity has NaN where it does, and elsewhere NaN or 0. A row of
/// zeros stays 0, because of `epsilon`.
pub trait RmsNormOps: Backend {
    /// Normalizes the rows of `x` `[rows, width]` and multiplies them by `weight` `[width]`. The
    /// result has the shape and type of `x`. Autodiff records this method.
    fn fused_rms_norm(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        norm: RmsNorm,
    ) -> FloatTensor<Self> {
        Self::rms_norm_forward(x, weight, norm).output
    }

    /// Computes the same output, and the reciprocal root of each row, which the backward pass
    /// needs.
    fn rms_norm_forward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        norm: RmsNorm,
    ) -> RmsNormOutput<Self> {
        portable::rms_norm::forward::<Self>(x, weight, norm)
    }

    /// Returns the gradients of the inputs, each in the type of its input. `grad` is the gradient
    /// of the output.
    ///
    /// An implementation may update `grad` in place.
    fn rms_norm_backward(
        grad: FloatTensor<Self>,
        saved: RmsNormSaved<Self>,
        norm: RmsNorm,
    ) -> RmsNormGradients<Self> {
        portable::rms_norm::backward::<Self>(grad, saved, norm)
    }
}

backward_step! {
    /// The autodiff step. Its parents are `x` and the weight.
    RmsNormStep<2>: RmsNormOps, |grad, (saved, norm): (RmsNormSaved<B>, RmsNorm)| {
        let RmsNormGradients { x, weight } = B::rms_norm_backward(grad, saved, norm);
        [x, weight]
    }
}

impl<B: RmsNormOps, C: CheckpointStrategy> RmsNormOps for Autodiff<B, C> {
    fn fused_rms_norm(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        norm: RmsNorm,
    ) -> FloatTensor<Self> {
        record(
            RmsNormStep.prepare::<C>([x.node, weight.node]),
            (x.primitive, weight.primitive),
            |(x, weight)| {
                let RmsNormOutput { output, reciprocal_root } =
                    B::rms_norm_forward(x.clone(), weight.clone(), norm);
                ((RmsNormSaved { x, weight, reciprocal_root }, norm), output)
            },
            |(x, weight)| B::fused_rms_norm(x, weight, norm),
        )
    }
}

/// Normalizes over the last axis of `x` and multiplies by `weight`, which has the length of that
/// axis. `x` may have any other axes; they are merged to rows.
pub fn rms_norm<B: RmsNormOps, const D: usize>(
    x: Tensor<B, D>,
    weight: Tensor<B, 1>,
    norm: RmsNorm,
) -> Tensor<B, D> {
    let weight = portable::primitive(weight);
    on_rows(x, |x| B::fused_rms_norm(x, weight, norm))
}
