//! Layer normalization: `(x - mean) / sqrt(var + epsilon) * gamma + beta`, biased variance (Ba,
//! Kiros and Hinton 2016).
//!
//! Main trait: [`LayerNormOps`]. The forward pass saves the input and two numbers per row. Saving
//! the input usually takes no extra memory, because the preceding op keeps it as its output. The
//! backward pass recomputes the normalized rows.

pub(crate) mod saved;

use burn::tensor::{Tensor, TensorPrimitive};
use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_autodiff::ops::Backward;
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, TensorMetadata};

use crate::autodiff_step::{backward_step, record};
use crate::portable;
pub use saved::{LayerNormGradients, LayerNormOutput, LayerNormSaved};

/// Layer normalization of the rows of a matrix. Means and deviations are computed in at least f32.
///
/// A row that contains NaN or an infinity becomes NaN. The variance of a constant row is 0, and
/// `epsilon` keeps the result finite.
pub trait LayerNormOps: Backend {
    /// Normalizes the rows of `x` `[rows, width]`, multiplies by `gamma` and adds `beta`, both
    /// `[width]`. The result has the shape and type of `x`. Autodiff records this method.
    fn fused_layer_norm(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        epsilon: f64,
    ) -> FloatTensor<Self> {
        Self::layer_norm_forward(x, gamma, beta, epsilon).output
    }

    /// Computes the same output, and the mean and reciprocal deviation of each row, which the
    /// backward pass needs.
    fn layer_norm_forward(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        epsilon: f64,
    ) -> LayerNormOutput<Self> {
        portable::norm::forward::<Self>(x, gamma, beta, epsilon)
    }

    /// Returns the gradients of the inputs, each in the type of its input. `grad` is the gradient
    /// of the output.
    ///
    /// An implementation may update `grad` in place.
    fn layer_norm_backward(
        grad: FloatTensor<Self>,
        saved: LayerNormSaved<Self>,
    ) -> LayerNormGradients<Self> {
        portable::norm::backward::<Self>(grad, saved)
    }
}

backward_step! {
    /// The autodiff step. Its parents are `x`, `gamma` and `beta`.
    LayerNormStep<3>: LayerNormOps, |grad, saved: LayerNormSaved<B>| {
        let LayerNormGradients { x, gamma, beta } = B::layer_norm_backward(grad, saved);
        [x, gamma, beta]
    }
}

impl<B: LayerNormOps, C: CheckpointStrategy> LayerNormOps for Autodiff<B, C> {
    fn fused_layer_norm(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        epsilon: f64,
    ) -> FloatTensor<Self> {
        record(
            LayerNormStep.prepare::<C>([x.node, gamma.node, beta.node]),
            (x.primitive, gamma.primitive, beta.primitive),
            |(x, gamma, beta)| {
                let LayerNormOutput { output, mean, reciprocal_deviation } =
                    B::layer_norm_forward(x.clone(), gamma.clone(), beta, epsilon);
                (LayerNormSaved { x, gamma, mean, reciprocal_deviation }, output)
            },
            |(x, gamma, beta)| B::fused_layer_norm(x, gamma, beta, epsilon),
        )
    }
}

/// Normalizes over the last axis of `x`, multiplies by `gamma` and, if given, adds `beta`. Both
/// have the length of that axis.
///
/// `x` may have any other axes; they are merged to rows. Without `beta`, zeros are added.
pub fn layer_norm<B: LayerNormOps, const D: usize>(
    x: Tensor<B, D>,
    gamma: Tensor<B, 1>,
    beta: Option<Tensor<B, 1>>,
    epsilon: f64,
) -> Tensor<B, D> {
    let beta = beta.unwrap_or_else(|| gamma.clone().detach().zeros_like());
    let [gamma, beta] = [gamma, beta].map(portable::primitive);
    on_rows(x, |x| B::fused_layer_norm(x, gamma, beta, epsilon))
}

/// Applies a function of `[rows, width]` matrices to a tensor of any rank. The result keeps all
/// axes of `x` except the last one, whose length the function may change.
///
/// A matrix is passed without a reshape, which autodiff would record as an additional step.
pub(crate) fn on_rows<B: Backend, const D: usize>(
    x: Tensor<B, D>,
    function: impl FnOnce(FloatTensor<B>) -> FloatTensor<B>,
) -> Tensor<B, D> {
    let mut shape = x.shape();
    let width = shape[D - 1];
    let x = match D {
        2 => portable::primitive(x),
        _ => {
            let rows = shape.iter().take(D - 1).product::<usize>();
            portable::primitive(x.reshape([rows, width]))
        }
    };
    let y = function(x);
    if D == 2 {
        return Tensor::from_primitive(TensorPrimitive::Float(y));
    }
    shape[D - 1] = y.shape()[1];
    portable::tensor::<B, 2>(y).reshape(shape)
}
