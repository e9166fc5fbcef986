//! GELU with the tanh approximation, an element-wise op in one pass.
//!
//! Each block of elements is read, computed in f32 and written. The backward pass updates the
//! gradient in place. NaN gives NaN. Minus infinity gives NaN too, because it is multiplied by a
//! gate of 0. From about 1e19 on, where `x^2` overflows, the derivative is NaN.

use burn_backend::tensor::FloatTensor;
use burn_flex::Flex;

use super::array::is_supported;
use super::blockwise;
use super::vector::{exp, vectorized};
use crate::gelu::GeluOps;
use crate::portable;
use crate::portable::gelu::{CUBIC, TWICE_SQRT_2_OVER_PI};

/// The coefficient of `x` in `2 u(x)`.
const LINEAR: f32 = TWICE_SQRT_2_OVER_PI as f32;
/// The coefficient of `x^3` in `2 u(x)`.
const CUBE: f32 = (CUBIC * TWICE_SQRT_2_OVER_PI) as f32;

/// Returns `sigmoid(2 u(x))`, the factor of `x` in GELU.
///
/// For large negative `x`, the exponential becomes infinite and the gate 0. The backward pass
/// recomputes the gate, because saving it would take as much memory as the input.
#[inline(always)]
pub(super) fn gate(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x * (LINEAR + CUBE * x * x)))
}

/// Returns the derivative of `2 u(x)`.
#[inline(always)]
pub(super) fn gelu_slope(x: f32) -> f32 {
    LINEAR + 3.0 * CUBE * x * x
}

vectorized! {
    /// Writes GELU of each element of `x` to `y`.
    fn forward(x: &[f32], y: &mut [f32]) {
        for (x, y) in x.iter().zip(y) {
            *y = x * gate(*x);
        }
    }
}

vectorized! {
    /// Multiplies each element of `grad` by the derivative of GELU at the element of `x`: with
    /// `s = sigmoid(2 u)`, this is `s + x s (1 - s) 2 u'`.
    fn backward(x: &[f32], grad: &mut [f32]) {
        for (x, grad) in x.iter().zip(grad) {
            let x = *x;
            // The gate is recomputed, because saving it would take as much memory as the input.
            let gate = gate(x);
            *grad *= gate + x * gate * (1.0 - gate) * gelu_slope(x);
        }
    }
}

/// GELU is element-wise, so results do not depend on the shape or on the division into blocks.
///
/// A thread reads and writes one block at a time; the only scratch memory is the f32 copies of a
/// block of 16-bit elements.
impl GeluOps for Flex {
    /// Allocates the result. The input is not modified, because the backward pass needs it.
    fn gelu_tanh(x: FloatTensor<Self>) -> FloatTensor<Self> {
        if !is_supported(&x) {
            return portable::gelu::forward::<Self>(x);
        }
        blockwise::map([&x], x.dtype(), |[x], y| forward(x, y))
    }

    /// Updates `grad` in place if its memory is not shared. Gradients of another type than `x` use
    /// the portable implementation.
    fn gelu_tanh_backward(grad: FloatTensor<Self>, x: FloatTensor<Self>) -> FloatTensor<Self> {
        if !is_supported(&x) || grad.dtype() != x.dtype() {
            return portable::gelu::backward::<Self>(grad, x);
        }
        blockwise::update(grad, [&x], |[x], grad| backward(x, grad))
    }
}
