//! The gradients of a linear layer on the device: a product, and the sums of the columns of the
//! output's gradient in two launches.

use burn_backend::TensorMetadata;
use burn_backend::ops::FloatTensorOps;
use burn_backend::tensor::FloatTensor;
use burn_cubecl::{BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement};
use deepburn_kernels::cube;

use super::array::{are_alike, buffer, contiguous, flat_tensor};
use crate::linear::{LinearGradients, LinearOps};
use crate::matmul::MatmulOps;
use crate::portable;

/// Uses the products of [`MatmulOps`].
impl<R, F, I, BT> LinearOps for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    /// Gradients in f32, f16 and bf16 are summed in f32 in a fixed order. Other types use the
    /// portable implementation.
    fn linear_gradients(grad: FloatTensor<Self>, x: FloatTensor<Self>) -> LinearGradients<Self> {
        if !are_alike([&grad]) {
            return portable::linear::gradients::<Self>(grad, x);
        }
        let weight = Self::matmul(Self::float_transpose(x), grad.clone());
        let grad = contiguous(grad);
        let bias = cube::column_sums(&grad.client, &buffer(&grad), grad.shape()[1]);
        LinearGradients { weight, bias: flat_tensor(bias, &grad) }
    }
}
