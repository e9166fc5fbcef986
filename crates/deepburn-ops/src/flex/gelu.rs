//! GELU with the tanh approximation.

use burn_backend::TensorMetadata;
use burn_backend::tensor::FloatTensor;
use burn_flex::Flex;
use rayon::prelude::*;

use super::array::{
    BLOCK, from_values, into_widened, is_supported, narrow, unwritten, values_mut, widen,
};
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
        let values = widen(&x);
        let mut y = unwritten(values.len());
        values.par_chunks(BLOCK).zip(y.par_chunks_mut(BLOCK)).for_each(|(x, y)| forward(x, y));
        from_values(y, x.shape(), x.dtype())
    }

    fn gelu_tanh_backward(grad: FloatTensor<Self>, x: FloatTensor<Self>) -> FloatTensor<Self> {
        if !is_supported(&x) {
            return portable::gelu::backward::<Self>(grad, x);
        }
        let dtype = x.dtype();
        let mut grad = into_widened(grad);
        let values = widen(&x);
        values
            .par_chunks(BLOCK)
            .zip(values_mut(&mut grad).par_chunks_mut(BLOCK))
            .for_each(|(x, grad)| backward(x, grad));
        narrow(grad, dtype)
    }
}
