//! GELU with the tanh approximation.

use burn::tensor::{Tensor, activation};
use burn_backend::Backend;

use super::{cast, in_f32, primitive, tensor};

/// The coefficient of the cubic term in `u`.
pub(crate) const CUBIC: f64 = 0.044_715;
/// `2 sqrt(2 / pi)`, the coefficient of the linear term in `2 u`.
pub(crate) const TWICE_SQRT_2_OVER_PI: f64 =
    2.0 * std::f64::consts::FRAC_2_SQRT_PI * std::f64::consts::FRAC_1_SQRT_2;

/// Returns `sigmoid(2 u(x))` and `2 u(x) / x`. The quotient has a finite limit at 0, and the
/// backward pass uses it in the derivative.
fn gate<B: Backend>(x: Tensor<B, 2>) -> (Tensor<B, 2>, Tensor<B, 2>) {
    let square = x.clone() * x.clone();
    let slope = square * (CUBIC * TWICE_SQRT_2_OVER_PI) + TWICE_SQRT_2_OVER_PI;
    (activation::sigmoid(slope.clone() * x), slope)
}

/// Returns `sigmoid(2 u(x))` and the derivative of `2 u(x)`.
pub(super) fn gelu_gate<B: Backend>(x: Tensor<B, 2>) -> (Tensor<B, 2>, Tensor<B, 2>) {
    let (gate, slope) = gate(x);
    // With `a = 2 sqrt(2 / pi)` and `c = CUBIC`, the slope is `2 u / x = a (1 + c x^2)`. Therefore
    // `2 u' = a (1 + 3 c x^2) = 3 slope - 2 a`.
    (gate, slope * 3.0 - 2.0 * TWICE_SQRT_2_OVER_PI)
}

/// Implements [`GeluOps::gelu_tanh`](crate::GeluOps::gelu_tanh): `x sigmoid(2 u)` in at least f32,
/// rounded once.
pub fn forward<B: Backend>(x: B::FloatTensorPrimitive) -> B::FloatTensorPrimitive {
    let x: Tensor<B, 2> = tensor(x);
    let dtype = x.dtype();
    let x = in_f32(x);
    let (gate, _) = gate(x.clone());
    primitive(cast(gate * x, dtype))
}

/// Implements [`GeluOps::gelu_tanh_backward`](crate::GeluOps::gelu_tanh_backward).
///
/// With `s = sigmoid(2 u)`: `dy/dx = s + x s (1 - s) 2 u'`. Computed in at least f32; the result
/// has the type of `x`.
pub fn backward<B: Backend>(
    grad: B::FloatTensorPrimitive,
    x: B::FloatTensorPrimitive,
) -> B::FloatTensorPrimitive {
    let (grad, x): (Tensor<B, 2>, Tensor<B, 2>) = (tensor(grad), tensor(x));
    let dtype = x.dtype();
    let x = in_f32(x);
    let (gate, twice_du) = gelu_gate(x.clone());
    let derivative = gate.clone() + x * gate.clone() * (gate.neg() + 1.0) * twice_du;
    primitive(cast(in_f32(grad) * derivative, dtype))
}
