use burn_backend::tensor::FloatTensor;
use burn_tch::{LibTorch, TchElement};

use super::wrap;
use crate::gelu::GeluOps;

impl<E: TchElement> GeluOps for LibTorch<E> {
    fn gelu_tanh(x: FloatTensor<Self>) -> FloatTensor<Self> {
        wrap(x.tensor.gelu("tanh"))
    }

    fn gelu_tanh_backward(grad: FloatTensor<Self>, x: FloatTensor<Self>) -> FloatTensor<Self> {
        wrap(x.tensor.gelu_backward(&grad.tensor, "tanh"))
    }
}
