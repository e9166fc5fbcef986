//! GELU with the tanh approximation, as LibTorch's `gelu` with `approximate="tanh"`.
//!
//! LibTorch computes 16-bit elements in f32 and rounds the result once.

use burn_backend::tensor::FloatTensor;
use burn_tch::{LibTorch, TchElement};

use super::wrap;
use crate::gelu::GeluOps;

/// Each op is one kernel of LibTorch and allocates its result.
impl<E: TchElement> GeluOps for LibTorch<E> {
    fn gelu_tanh(x: FloatTensor<Self>) -> FloatTensor<Self> {
        wrap(x.tensor.gelu("tanh"))
    }

    fn gelu_tanh_backward(grad: FloatTensor<Self>, x: FloatTensor<Self>) -> FloatTensor<Self> {
        wrap(x.tensor.gelu_backward(&grad.tensor, "tanh"))
    }
}
