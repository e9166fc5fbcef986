//! Gated activations with ops that every backend supports.

use burn::tensor::{Tensor, activation};
use burn_backend::Backend;

use super::gelu::gelu_gate;
use super::{cast, in_f32, primitive, tensor};
use crate::gated::{GateFunction, GatedGradients};

/// Implements [`GatedOps::gated`](crate::GatedOps::gated).
pub fn forward<B: Backend>(
    gate: B::FloatTensorPrimitive,
    up: B::FloatTensorPrimitive,
    function: GateFunction,
) -> B::FloatTensorPrimitive {
    primitive(product(tensor::<B, 2>(gate), tensor(up), function))
}

/// Implements [`GatedOps::gated_joint`](crate::GatedOps::gated_joint).
pub fn joint_forward<B: Backend>(
    joint: B::FloatTensorPrimitive,
    function: GateFunction,
) -> B::FloatTensorPrimitive {
    let [gate, up] = halves::<B>(tensor(joint));
    primitive(product(gate, up, function))
}

/// Implements [`GatedOps::gated_backward`](crate::GatedOps::gated_backward).
///
/// With the gradient `dy` of `y = f(g) u`: `dg = dy u f'(g)` and `du = dy f(g)`. Computed in at
/// least f32; each gradient has the type of its input.
pub fn backward<B: Backend>(
    grad: B::FloatTensorPrimitive,
    gate: B::FloatTensorPrimitive,
    up: B::FloatTensorPrimitive,
    function: GateFunction,
) -> GatedGradients<B> {
    let [gate, up] = gradients::<B>(tensor(grad), tensor(gate), tensor(up), function);
    GatedGradients { gate: primitive(gate), up: primitive(up) }
}

/// Implements [`GatedOps::gated_joint_backward`](crate::GatedOps::gated_joint_backward).
pub fn joint_backward<B: Backend>(
    grad: B::FloatTensorPrimitive,
    joint: B::FloatTensorPrimitive,
    function: GateFunction,
) -> B::FloatTensorPrimitive {
    let [gate, up] = halves::<B>(tensor(joint));
    primitive(Tensor::cat(gradients(tensor(grad), gate, up, function).to_vec(), 1))
}

/// Returns the left and the right half of the columns.
fn halves<B: Backend>(joint: Tensor<B, 2>) -> [Tensor<B, 2>; 2] {
    let width = joint.dims()[1] / 2;
    [0, width].map(|first| joint.clone().narrow(1, first, width))
}

fn product<B: Backend>(
    gate: Tensor<B, 2>,
    up: Tensor<B, 2>,
    function: GateFunction,
) -> Tensor<B, 2> {
    let dtype = gate.dtype();
    let gate = in_f32(gate);
    let (sigmoid, _) = sigmoid::<B>(gate.clone(), function);
    cast(gate * sigmoid * in_f32(up), dtype)
}

/// Returns the gradients of gate and up.
fn gradients<B: Backend>(
    grad: Tensor<B, 2>,
    gate: Tensor<B, 2>,
    up: Tensor<B, 2>,
    function: GateFunction,
) -> [Tensor<B, 2>; 2] {
    let (dtype, grad, gate) = (gate.dtype(), in_f32(grad), in_f32(gate));
    let (sigmoid, slope) = sigmoid::<B>(gate.clone(), function);
    let up_grad = grad.clone() * gate.clone() * sigmoid.clone();
    let derivative = sigmoid.clone() + gate * sigmoid.clone() * (sigmoid.neg() + 1.0) * slope;
    [cast(grad * in_f32(up) * derivative, dtype), cast(up_grad, dtype)]
}

/// Returns the factor `sigmoid(a(x))` of `x` in the function, and the derivative of `a`.
fn sigmoid<B: Backend>(x: Tensor<B, 2>, function: GateFunction) -> (Tensor<B, 2>, Tensor<B, 2>) {
    match function {
        GateFunction::Silu => (activation::sigmoid(x.clone()), x.ones_like()),
        GateFunction::GeluTanh => gelu_gate(x),
    }
}
