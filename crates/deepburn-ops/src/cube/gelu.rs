//! GELU on the device: one launch forward, one backward.

use burn_backend::TensorMetadata;
use burn_backend::tensor::FloatTensor;
use burn_cubecl::{BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement};
use deepburn_kernels::cube;

use super::array::{are_alike, buffer, contiguous, shaped_tensor};
use crate::gelu::GeluOps;
use crate::portable;

/// Supports f32, f16 and bf16. Other types, and gradients of another type than `x`, use the
/// portable implementation.
impl<R, F, I, BT> GeluOps for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    fn gelu_tanh(x: FloatTensor<Self>) -> FloatTensor<Self> {
        if !are_alike([&x]) {
            return portable::gelu::forward::<Self>(x);
        }
        let x = contiguous(x);
        shaped_tensor(cube::gelu(&x.client, &buffer(&x)), x.shape(), &x)
    }

    fn gelu_tanh_backward(grad: FloatTensor<Self>, x: FloatTensor<Self>) -> FloatTensor<Self> {
        if !are_alike([&grad, &x]) {
            return portable::gelu::backward::<Self>(grad, x);
        }
        let [grad, x] = [grad, x].map(contiguous);
        let gradient = cube::gelu_gradient(&x.client, &buffer(&grad), &buffer(&x));
        shaped_tensor(gradient, x.shape(), &x)
    }
}
