//! Gated activations: `f(gate) * up`, element by element (Shazeer 2020).
//!
//! Main trait: [`GatedOps`]. The backward pass needs only `gate` and `up`, from which it computes
//! `f` and its derivative again, and the output for a linear layer that reads it. Gate and up are
//! two matrices, or the left and the right half of the columns of one.

pub(crate) mod gradients;

use burn::tensor::Tensor;
use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_backend::Backend;
use burn_backend::tensor::FloatTensor;

use crate::autodiff_step::{backward_step, record_elementwise};
use crate::norm::on_rows;
use crate::portable;
pub use gradients::GatedGradients;

/// The function of a gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GateFunction {
    /// `x sigmoid(x)` (SwiGLU).
    Silu,
    /// GELU with the tanh approximation (GeGLU), see [`GeluOps`](crate::GeluOps).
    GeluTanh,
}

/// Gated activations. Both factors are computed in at least f32, and their product is rounded once.
pub trait GatedOps: Backend {
    /// Returns `function(gate) * up`, with the shape and type of `gate`. `up` has the same shape
    /// and type. Autodiff records this method.
    fn gated(
        gate: FloatTensor<Self>,
        up: FloatTensor<Self>,
        function: GateFunction,
    ) -> FloatTensor<Self> {
        portable::gated::forward::<Self>(gate, up, function)
    }

    /// Returns the gradients of both inputs. `grad` is the gradient of the output.
    ///
    /// An implementation may update `grad` in place.
    fn gated_backward(
        grad: FloatTensor<Self>,
        gate: FloatTensor<Self>,
        up: FloatTensor<Self>,
        function: GateFunction,
    ) -> GatedGradients<Self> {
        portable::gated::backward::<Self>(grad, gate, up, function)
    }

    /// Returns the same for `joint` `[rows, 2 * width]`, whose columns are `gate`, then `up`. The
    /// result is `[rows, width]`. Autodiff records this method.
    fn gated_joint(joint: FloatTensor<Self>, function: GateFunction) -> FloatTensor<Self> {
        portable::gated::joint_forward::<Self>(joint, function)
    }

    /// Returns the gradient with respect to `joint`.
    fn gated_joint_backward(
        grad: FloatTensor<Self>,
        joint: FloatTensor<Self>,
        function: GateFunction,
    ) -> FloatTensor<Self> {
        portable::gated::joint_backward::<Self>(grad, joint, function)
    }
}

backward_step! {
    /// The autodiff step of two matrices. Its parents are the gate and `up`.
    GatedStep<2>: GatedOps,
    |grad, (gate, up, function): (FloatTensor<B>, FloatTensor<B>, GateFunction)| {
        let GatedGradients { gate, up } = B::gated_backward(grad, gate, up, function);
        [gate, up]
    }
}

backward_step! {
    /// The autodiff step of a joint matrix, which is its state.
    GatedJointStep<1>: GatedOps, |grad, (joint, function): (FloatTensor<B>, GateFunction)| {
        [B::gated_joint_backward(grad, joint, function)]
    }
}

impl<B: GatedOps, C: CheckpointStrategy> GatedOps for Autodiff<B, C> {
    fn gated(
        gate: FloatTensor<Self>,
        up: FloatTensor<Self>,
        function: GateFunction,
    ) -> FloatTensor<Self> {
        record_elementwise(
            GatedStep,
            [gate, up],
            |[gate, up]| (gate, up, function),
            move |[gate, up]| B::gated(gate, up, function),
        )
    }

    fn gated_joint(joint: FloatTensor<Self>, function: GateFunction) -> FloatTensor<Self> {
        record_elementwise(
            GatedJointStep,
            [joint],
            |[joint]| (joint, function),
            move |[joint]| B::gated_joint(joint, function),
        )
    }
}

/// Returns `function(gate) * up` for each element. Both matrices have the same shape.
pub fn gated<B: GatedOps>(
    gate: Tensor<B, 2>,
    up: Tensor<B, 2>,
    function: GateFunction,
) -> Tensor<B, 2> {
    let up = portable::primitive(up);
    on_rows(gate, |gate| B::gated(gate, up, function))
}

/// Returns `function(gate) * up` for each row of `joint`, whose first half is the gate.
///
/// # Panics
/// Panics if the number of columns is odd.
pub fn gated_joint<B: GatedOps>(joint: Tensor<B, 2>, function: GateFunction) -> Tensor<B, 2> {
    let columns = joint.dims()[1];
    assert_eq!(columns % 2, 0, "a gate and its values have {columns} columns together");
    on_rows(joint, |joint| B::gated_joint(joint, function))
}
