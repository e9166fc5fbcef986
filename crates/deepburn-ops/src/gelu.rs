//! GELU with the tanh approximation: `0.5 x (1 + tanh(u))`, `u = sqrt(2 / pi) (x + 0.044715 x^3)`
//! (Hendrycks and Gimpel 2016).
//!
//! GELU is computed as `x sigmoid(2 u)`, which is equal because `tanh(u) = 2 sigmoid(2 u) - 1`.
//! Main trait: [`GeluOps`]. The backward pass needs only the input.

use burn::tensor::Tensor;
use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::base::Checkpointer;
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn_backend::Backend;
use burn_backend::tensor::FloatTensor;

use crate::norm::on_rows;
use crate::portable;

/// GELU with the tanh approximation, for each element of a matrix, computed in
/// at least f32.
pub trait GeluOps: Backend {
    /// Returns GELU of `x`, with the shape and type of `x`. Autodiff records this method.
    fn gelu_tanh(x: FloatTensor<Self>) -> FloatTensor<Self> {
        portable::gelu::forward::<Self>(x)
    }

    /// Returns the gradient with respect to `x`. `grad` is the gradient of the output.
    fn gelu_tanh_backward(grad: FloatTensor<Self>, x: FloatTensor<Self>) -> FloatTensor<Self> {
        portable::gelu::backward::<Self>(grad, x)
    }
}

/// The autodiff step. Its state is the input.
#[derive(Debug)]
struct GeluStep;

impl<B: GeluOps> Backward<B, 1> for GeluStep {
    type State = FloatTensor<B>;

    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        unary::<B, _>(ops.parents, ops.node, grads, |grad| B::gelu_tanh_backward(grad, ops.state));
    }
}

/// Recorded as compute-bound: Burn's own activation checkpointing keeps the output instead of
/// computing it again.
impl<B: GeluOps, C: CheckpointStrategy> GeluOps for Autodiff<B, C> {
    fn gelu_tanh(x: FloatTensor<Self>) -> FloatTensor<Self> {
        match GeluStep.prepare::<C>([x.node]).compute_bound().stateful() {
            OpsKind::Tracked(step) => {
                let output = B::gelu_tanh(x.primitive.clone());
                step.finish(x.primitive, output)
            }
            OpsKind::UnTracked(step) => step.finish(B::gelu_tanh(x.primitive)),
        }
    }
}

/// Applies GELU with the tanh approximation to each element.
pub fn gelu_tanh<B: GeluOps, const D: usize>(x: Tensor<B, D>) -> Tensor<B, D> {
    on_rows(x, B::gelu_tanh)
}
