//! Linear layers: `y = x W + b`.
//!
//! Main trait: [`LinearOps`]. The forward pass saves the input if weight or bias is trained, and
//! the weight if the input needs a gradient. A sharded weight is saved as a handle: it takes no
//! memory between the passes and is gathered again in the backward pass. An input that is the
//! output of an activation function is not saved either, but computed again.
//!
//! ```text
//! dx = dy W^T      needs W, only if x needs a gradient
//! dW = x^T dy      needs x, only if W or b is trained
//! db = sum of the rows of dy
//! ```

pub(crate) mod gradients;

use burn::tensor::Tensor;
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_autodiff::ops::{Backward, OpsKind};
use burn_autodiff::{Autodiff, NodeId};
use burn_backend::Backend;
use burn_backend::tensor::FloatTensor;

use crate::autodiff_step::backward_step;
use crate::matmul::MatmulOps;
use crate::norm::on_rows;
use crate::portable;
use crate::quantized::QuantizedMatrix;
pub use gradients::LinearGradients;

/// Linear layers, applied to the rows of a matrix.
///
/// The CPU kernels accumulate in at least f32. On other backends, the products of [`MatmulOps`]
/// determine the precision.
pub trait LinearOps: MatmulOps {
    /// Multiplies `x` `[rows, in]` by `weight` `[in, out]` and adds `bias` `[out]`. Autodiff
    /// records this method.
    fn fused_linear(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: Option<FloatTensor<Self>>,
    ) -> FloatTensor<Self> {
        portable::linear::forward::<Self>(x, weight, bias)
    }

    /// Returns the gradient with respect to `x`. `grad` is the gradient of the output.
    fn linear_x_gradient(grad: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self> {
        portable::linear::x_gradient::<Self>(grad, weight)
    }

    /// Computes [`fused_linear`](Self::fused_linear) with a quantized weight `[in, out]`. The
    /// result equals the one with the dequantized weight.
    fn quantized_linear(
        x: FloatTensor<Self>,
        weight: &QuantizedMatrix<Self>,
        bias: Option<FloatTensor<Self>>,
    ) -> FloatTensor<Self> {
        Self::fused_linear(x, weight.dequantized(), bias)
    }

    /// Computes [`linear_x_gradient`](Self::linear_x_gradient) with a quantized weight `[in, out]`.
    fn quantized_x_gradient(
        grad: FloatTensor<Self>,
        weight: &QuantizedMatrix<Self>,
    ) -> FloatTensor<Self> {
        Self::linear_x_gradient(grad, weight.dequantized())
    }

    /// Returns the gradients of weight and bias. `grad` is the gradient of the output.
    fn linear_gradients(grad: FloatTensor<Self>, x: FloatTensor<Self>) -> LinearGradients<Self> {
        portable::linear::gradients::<Self>(grad, x)
    }
}

/// The values saved for the backward pass.
#[derive(Debug, Clone)]
struct LinearSaved<B: Backend> {
    /// The node of the input `[rows, in]`, if weight or bias is trained.
    x: Option<NodeId>,
    /// The weight `[in, out]`, if the input needs a gradient.
    weight: Option<FloatTensor<B>>,
}

backward_step! {
    /// The autodiff step. Its parents are `x`, the weight and the bias.
    ///
    /// The input gradient is computed first, and the weight is then released. A gathered weight can
    /// thus be freed before the weight gradient is allocated.
    LinearStep<3>: LinearOps, LinearSaved<B>, |ops, grads, checkpointer| {
        let grad = grads.consume::<B>(&ops.node);
        let [x_node, weight_node, bias_node] = ops.parents;
        if let (Some(node), Some(weight)) = (x_node, ops.state.weight) {
            grads.register::<B>(node.id, B::linear_x_gradient(grad.clone(), weight));
        }
        let Some(x) = ops.state.x else { return };
        let gradients = B::linear_gradients(grad, checkpointer.retrieve_node_output(x));
        if let Some(node) = weight_node {
            grads.register::<B>(node.id, gradients.weight);
        }
        if let Some(node) = bias_node {
            grads.register::<B>(node.id, gradients.bias);
        }
    }
}

/// Recorded as compute-bound: Burn's own activation checkpointing keeps the output instead of
/// computing it again.
impl<B: LinearOps, C: CheckpointStrategy> LinearOps for Autodiff<B, C> {
    fn fused_linear(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: Option<FloatTensor<Self>>,
    ) -> FloatTensor<Self> {
        let is_trained = weight.is_tracked() || bias.as_ref().is_some_and(|it| it.is_tracked());
        // The step always has three parents, so an untracked one stands for a missing bias. A bias
        // that is not trained is untracked as well.
        let (bias, added) = match bias {
            Some(bias) => (bias.node, Some(bias.primitive)),
            None => (<FloatTensor<Self>>::new(x.primitive.clone()).node, None),
        };
        let nodes = [x.node.clone(), weight.node.clone(), bias];
        match LinearStep.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(mut step) => {
                let saved = LinearSaved {
                    x: is_trained.then(|| step.checkpoint(&x)),
                    weight: x.is_tracked().then(|| weight.primitive.clone()),
                };
                step.finish(saved, B::fused_linear(x.primitive, weight.primitive, added))
            }
            OpsKind::UnTracked(step) => {
                step.finish(B::fused_linear(x.primitive, weight.primitive, added))
            }
        }
    }
}

/// Returns `x weight + bias` over the last axis of `x`. `weight` is `[in, out]` and `bias` `[out]`;
/// the result has the axes of `x`, with `out` as the last axis.
///
/// # Panics
/// Panics if the last axis of `x` is not `in`.
pub fn linear<B: LinearOps, const D: usize>(
    x: Tensor<B, D>,
    weight: Tensor<B, 2>,
    bias: Option<Tensor<B, 1>>,
) -> Tensor<B, D> {
    let (weight, bias) = (portable::primitive(weight), bias.map(portable::primitive));
    on_rows(x, |x| B::fused_linear(x, weight, bias))
}
