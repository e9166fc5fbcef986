//! GELU with the tanh approximation: `0.5 x (1 + tanh(u))`, `u = sqrt(2 / pi) (x + 0.044715 x^3)`
//! (Hendrycks and Gimpel 2016).
//!
//! GELU is computed as `x sigmoid(2 u)`, which is equal because `tanh(u) = 2 sigmoid(2 u) - 1`.
//! Main trait: [`GeluOps`]. The backward pass needs only the input, from which it also computes
//! the output again for a linear layer that reads it.

use burn::tensor::Tensor;
use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_backend::Backend;
use burn_backend::tensor::FloatTensor;

use crate::autodiff_step::{backward_step, record_elementwise};
use crate::norm::on_rows;
use crate::portable;

/// GELU with the tanh approximation, for each element of a matrix, computed in at least f32.
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

backward_step! {
    /// The autodiff step. Its state is the input.
    GeluStep<1>: GeluOps, |grad, x: FloatTensor<B>| [B::gelu_tanh_backward(grad, x)]
}

impl<B: GeluOps, C: CheckpointStrategy> GeluOps for Autodiff<B, C> {
    fn gelu_tanh(x: FloatTensor<Self>) -> FloatTensor<Self> {
        record_elementwise(GeluStep, [x], |[x]| x, |[x]| B::gelu_tanh(x))
    }
}

/// Applies GELU with the tanh approximation to each element.
pub fn gelu_tanh<B: GeluOps, const D: usize>(x: Tensor<B, D>) -> Tensor<B, D> {
    on_rows(x, B::gelu_tanh)
}
