//! Optimizer kernels on the device.
//!
//! Master weights, optimizer states and gradients stay in device memory. A step of up to eight
//! parameters is one kernel launch: one thread per element reads the gradient, updates the master
//! weight and the states in place, and writes the working copy. The call returns when the kernel is
//! queued. Only [`OptimizerOps::gradient_stats`] waits for the device.
//!
//! The kernels support f32, f16 and bf16. Gradients of other types are converted to f32 first.

use std::cell::Cell;

use burn_backend::ops::FloatTensorOps;
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType, FloatDType, TensorMetadata};
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement};
use deepburn_kernels::cube::{self, DeviceBuffer, DeviceDType, DeviceUpdate, OwnedBuffers};
use deepburn_kernels::{ElementwiseStep, GradientStats};

use super::array::{buffer, contiguous, element_type, exclusive, flat_tensor, known};
use crate::optimizer::{OptimizerOps, ParameterUpdate, UpdateArrays};

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
        let update = ParameterUpdate { arrays, gradient };
        Self::update_all(step, grad_scale, vec![update], working).swap_remove(0)
    }

    /// Queues a launch for up to eight parameters whose gradients have the same type.
    fn update_all(
        step: &ElementwiseStep,
        grad_scale: f32,
        updates: Vec<ParameterUpdate<Self>>,
        working: Option<FloatDType>,
    ) -> Vec<(UpdateArrays<Self>, Option<FloatTensor<Self>>)> {
        let working = working.and_then(element_type);
        let updates: Vec<_> = updates
            .into_iter()
            .map(|update| ExclusiveUpdate::new::<Self>(step, update, working))
            .collect();
        for alike in updates.chunk_by(|left, right| left.gradient.dtype() == right.gradient.dtype())
        {
            launch(step, grad_scale, alike);
        }
        updates.into_iter().map(ExclusiveUpdate::into_result).collect()
    }

    fn updates_at_once() -> usize {
        cube::MOST_AT_ONCE
    }

    /// Waits for the device once. The sum of squares of each gradient is copied to the host.
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
        let from = contiguous(tensor);
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

/// A parameter whose arrays a kernel may update in place.
struct ExclusiveUpdate<R: CubeRuntime> {
    master: CubeTensor<R>,
    /// The states that the step updates.
    states: Vec<CubeTensor<R>>,
    /// The states that it does not use, which keep their handles.
    unused: Vec<CubeTensor<R>>,
    /// The gradient. Only read, so it may be shared.
    gradient: CubeTensor<R>,
    /// The working copy that the kernel writes.
    copy: Option<DeviceBuffer>,
}

impl<R: CubeRuntime> ExclusiveUpdate<R> {
    /// Copies shared arrays and allocates the working copy.
    fn new<B>(
        step: &ElementwiseStep,
        update: ParameterUpdate<B>,
        working: Option<DeviceDType>,
    ) -> Self
    where
        B: OptimizerOps + Backend<FloatTensorPrimitive = CubeTensor<R>>,
    {
        let UpdateArrays { master, mut states } = update.arrays;
        let unused = states.split_off(step.states().min(states.len()));
        let master = exclusive(master);
        let states = states.into_iter().map(exclusive).collect();
        let gradient = known::<B, R>(update.gradient);
        let len = master.shape().num_elements();
        let copy = working.map(|dtype| DeviceBuffer::empty(&master.client, len, dtype));
        Self { master, states, unused, gradient, copy }
    }

    /// Returns the updated arrays and the working copy.
    fn into_result<B>(self) -> (UpdateArrays<B>, Option<CubeTensor<R>>)
    where
        B: OptimizerOps + Backend<FloatTensorPrimitive = CubeTensor<R>>,
    {
        let copy = self.copy.map(|copy| flat_tensor(copy, &self.master));
        let states = self.states.into_iter().chain(self.unused).collect();
        (UpdateArrays { master: self.master, states }, copy)
    }
}

/// Queues the step of parameters whose gradients have the same type.
fn launch<R: CubeRuntime>(step: &ElementwiseStep, scale: f32, updates: &[ExclusiveUpdate<R>]) {
    let buffers: Vec<_> = updates
        .iter()
        .map(|it| {
            let states: Vec<_> = it.states.iter().map(buffer).collect();
            (buffer(&it.gradient), buffer(&it.master), states)
        })
        .collect();
    let states: Vec<Vec<_>> = buffers.iter().map(|(.., states)| states.iter().collect()).collect();
    let parameters = updates.iter().zip(&buffers).zip(&states);
    let parameters: Vec<_> = parameters
        .map(|((update, (grad, param, _)), states)| DeviceUpdate {
            grad,
            buffers: OwnedBuffers { param, states, working: update.copy.as_ref() },
        })
        .collect();
    step.launch(&updates[0].master.client, scale, &parameters);
}
