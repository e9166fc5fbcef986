//! GELU with the tanh approximation.

use burn_backend::TensorMetadata;
use burn_backend::tensor::FloatTensor;
use burn_flex::Flex;
use rayon::prelude::*;

use super::array::{blocks, changed, contiguous, elements, is_supported, read, written};
use super::vector::{exp, vectorised};
use crate::gelu::{CUBIC, GeluOps, TWICE_SQRT_2_OVER_PI};
use crate::portable;

const LINEAR: f32 = TWICE_SQRT_2_OVER_PI as f32;
const CUBE: f32 = (CUBIC * TWICE_SQRT_2_OVER_PI) as f32;

/// `sigmoid(2 u(x))`.
#[inline(always)]
fn gate(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x * (LINEAR + CUBE * x * x)))
}

vectorised! {
    fn forward(x: &[f32], y: &mut [f32]) {
        for (x, y) in x.iter().zip(y) {
            *y = x * gate(*x);
        }
    }
}

vectorised! {
    /// Multiplies `grad` by the derivative at `x`.
    fn backward(x: &[f32], grad: &mut [f32]) {
        for (x, grad) in x.iter().zip(grad) {
            let x = *x;
            let gate = gate(x);
            *grad *= gate + x * gate * (1.0 - gate) * (LINEAR + 3.0 * CUBE * x * x);
        }
    }
}

impl GeluOps for Flex {
    fn gelu_tanh(x: FloatTensor<Self>) -> FloatTensor<Self> {
        if !is_supported(&x) {
            return portable::gelu::forward::<Self>(x);
        }
        let x = contiguous(&x);
        let values = elements(&x);
        written(x.shape(), x.dtype(), |y| {
            blocks(x.shape().num_elements()).for_each_init(
                <[Vec<f32>; 2]>::default,
                |[x_room, y_room], block| {
                    let x = read(values, block.clone(), x_room);
                    // SAFETY: blocks are disjoint.
                    unsafe { y.write(block, y_room, |y| forward(x, y)) };
                },
            );
        })
    }

    fn gelu_tanh_backward(grad: FloatTensor<Self>, x: FloatTensor<Self>) -> FloatTensor<Self> {
        if !is_supported(&x) || grad.dtype() != x.dtype() {
            return portable::gelu::backward::<Self>(grad, x);
        }
        let x = contiguous(&x);
        let values = elements(&x);
        changed(grad, |grad| {
            blocks(x.shape().num_elements()).for_each_init(
                <[Vec<f32>; 2]>::default,
                |[x_room, room], block| {
                    let x = read(values, block.clone(), x_room);
                    // SAFETY: blocks are disjoint, and all elements of a gradient are written.
                    unsafe { grad.update(block, room, |grad| backward(x, grad)) };
                },
            );
        })
    }
}
