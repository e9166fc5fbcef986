//! Optimizer kernels on the device.
//!
//! Master weights, optimizer states and gradients stay in device memory. A step is one kernel
//! launch over all elements: one thread per element reads the gradient, updates the master weight
//! and the states in place, and writes the working copy. The call returns when the kernel is
//! queued. Only [`OptimizerOps::gradient_stats`] waits for the device.
//!
//! The kernels support f32, f16 and bf16. Gradients of other types are converted to f32 first.

use std::cell::Cell;

use burn_backend::ops::FloatTensorOps;
use burn_backend::tensor::FloatTensor;
use burn_backend::{DType, FloatDType, TensorMetadata};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::{BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement};
use deepburn_kernels::cube::{self, DeviceBuffer, OwnedBuffers};
use deepburn_kernels::{ElementwiseStep, GradientStats};

use super::array::{buffer, element_type, exclusive, flat_tensor, known};
use crate::optimizer::{OptimizerOps, UpdateArrays};

/// Results can differ from the CPU's in the last bits, because a device may fuse multiplications
/// and additions.
impl<R, F, I, BT> OptimizerOps for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    /// Allocates only the working copy, even if its type is f32.
    ///
    /// A shared array, for example one that is being saved to a checkpoint, is first copied on the
    /// device, so its other owner keeps the old values.
    fn update(
        step: &ElementwiseStep,
        grad_scale: f32,
        arrays: UpdateArrays<Self>,
        gradient: FloatTensor<Self>,
        working: Option<FloatDType>,
    ) -> (UpdateArrays<Self>, Option<FloatTensor<Self>>) {
        let UpdateArrays { master, mut states } = arrays;
        // The kernel gets exactly the states that it updates; the others keep their handles.
        let unused = states.split_off(step.states().min(states.len()));
        let master = exclusive(master);
        let mut states: Vec<_> = states.into_iter().map(exclusive).collect();
        // Only read, so it may be shared.
        let gradient = known::<Self, R>(gradient);
        let len = master.shape().num_elements();
        let copy = working
            .and_then(element_type)
            .map(|dtype| DeviceBuffer::empty(&master.client, len, dtype));
        let buffers: Vec<_> = states.iter().map(buffer).collect();
        let owned = OwnedBuffers {
            param: &buffer(&master),
            states: &buffers.iter().collect::<Vec<_>>(),
            working: copy.as_ref(),
        };
        step.launch(&master.client, grad_scale, &buffer(&gradient), owned);
        states.extend(unused);
        let copy = copy.map(|copy| flat_tensor(copy, &master));
        (UpdateArrays { master, states }, copy)
    }

    /// Waits for the device once. At most 1024 partial sums of squares of each gradient, in f32,
    /// are copied to the host and added there in f64.
    fn gradient_stats(
        count: usize,
        gradient: &dyn Fn(usize) -> FloatTensor<Self>,
    ) -> Vec<GradientStats> {
        if count == 0 {
            return Vec::new();
        }
        let first = gradient(0);
        let client = first.client.clone();
        // The kernel asks for gradient 0 first, which is already there.
        let first = Cell::new(Some(first));
        cube::gradient_stats(&client, count, |index| {
            let gradient = first.take().unwrap_or_else(|| gradient(index));
            buffer(&known::<Self, R>(gradient))
        })
    }

    /// Conversions between f32, f16 and bf16 use a kernel that rounds to nearest even. Other
    /// conversions use burn-cubecl's cast.
    ///
    /// The result keeps the shape and is contiguous.
    fn cast(tensor: FloatTensor<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        let held = tensor.dtype();
        if held == DType::from(dtype) {
            return tensor;
        }
        // The kernel must support both types.
        let (Some(_), Some(wanted)) = (element_type(held.into()), element_type(dtype)) else {
            return Self::float_cast(tensor, dtype);
        };
        let shape = tensor.shape();
        let from = into_contiguous(tensor);
        let cast = flat_tensor(cube::cast(&from.client, &buffer(&from), wanted), &from);
        Self::float_reshape(cast, shape)
    }

    /// Copies the parts on the device, with one launch for each eight parts.
    fn flatten(parts: Vec<FloatTensor<Self>>, len: usize) -> FloatTensor<Self> {
        let parts: Vec<_> = parts.into_iter().map(known::<Self, R>).collect();
        let buffers: Vec<_> = parts.iter().map(buffer).collect();
        flat_tensor(cube::flatten(&parts[0].client, &buffers, len), &parts[0])
    }
}
