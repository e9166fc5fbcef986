//! Sums of all elements on the device.
//!
//! Without autotuning, burn-cubecl adds the sums of four groups of threads with atomic additions if
//! the device has them for the type. Devices of CUDA have them, and wgpu's do not. The groups
//! arrive in any order, so the last bits of a sum would differ from run to run.

use burn_backend::ops::FloatTensorOps;
use burn_backend::tensor::FloatTensor;
use burn_backend::{Shape, TensorMetadata};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::{BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement};
use deepburn_kernels::cube;

use super::array::{buffer, element_type, flat_tensor};
use crate::sum::SumOps;

/// f32, f16 and bf16 are summed by a kernel, in f32. Other types are summed along one axis, by one
/// thread.
impl<R, F, I, BT> SumOps for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    fn sum(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
        if element_type(tensor.dtype().into()).is_none() {
            let len = tensor.shape().num_elements();
            return Self::float_sum_dim(Self::float_reshape(tensor, Shape::from(vec![len])), 0);
        }
        let tensor = into_contiguous(tensor);
        flat_tensor(cube::sum(&tensor.client, &buffer(&tensor)), &tensor)
    }
}
