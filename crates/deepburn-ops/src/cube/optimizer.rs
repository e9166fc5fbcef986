//! Optimizer kernels on the device: nothing but sums and flags comes back to the host.

use burn_backend::ops::FloatTensorOps;
use burn_backend::tensor::FloatTensor;
use burn_backend::{DType, FloatDType, Shape, TensorMetadata};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{BoolElement, CubeBackend, CubeRuntime, FloatElement, IntElement};
use deepburn_kernels::cube::{self, Buffer, ElementType, OwnedBuffers};
use deepburn_kernels::{ElementwiseStep, GradientStats};

use crate::optimizer::{OptimizerOps, UpdateArrays};

impl<R, F, I, BT> OptimizerOps for CubeBackend<R, F, I, BT>
where
    R: CubeRuntime,
    F: FloatElement,
    I: IntElement,
    BT: BoolElement,
{
    fn update(
        step: &ElementwiseStep,
        grad_scale: f32,
        arrays: UpdateArrays<Self>,
        gradient: FloatTensor<Self>,
        working: Option<FloatDType>,
    ) -> (UpdateArrays<Self>, Option<FloatTensor<Self>>) {
        let UpdateArrays { master, mut states } = arrays;
        let unused = states.split_off(step.states().min(states.len()));
        let master = exclusive(master);
        let mut states: Vec<_> = states.into_iter().map(exclusive).collect();
        let gradient = known::<Self, R>(gradient);
        let len = master.shape().num_elements();
        let copy =
            working.and_then(element_type).map(|dtype| Buffer::empty(&master.client, len, dtype));
        let buffers: Vec<_> = states.iter().map(buffer).collect();
        let owned = OwnedBuffers {
            param: &buffer(&master),
            states: &buffers.iter().collect::<Vec<_>>(),
            working: copy.as_ref(),
        };
        cube::update(&master.client, step, grad_scale, &buffer(&gradient), owned);
        states.extend(unused);
        let copy = copy.map(|copy| tensor(copy, &master));
        (UpdateArrays { master, states }, copy)
    }

    fn gradient_stats(gradient: FloatTensor<Self>) -> GradientStats {
        let gradient = known::<Self, R>(gradient);
        cube::gradient_stats(&gradient.client, &buffer(&gradient))
    }

    fn cast(tensor: FloatTensor<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        let held = tensor.dtype();
        if held == DType::from(dtype) {
            return tensor;
        }
        let (Some(_), Some(wanted)) = (element_type(held.into()), element_type(dtype)) else {
            return Self::float_cast(tensor, dtype);
        };
        let shape = tensor.shape();
        let from = into_contiguous(tensor);
        let cast = self::tensor(cube::cast(&from.client, &buffer(&from), wanted), &from);
        Self::float_reshape(cast, shape)
    }

    fn flatten(parts: Vec<FloatTensor<Self>>, len: usize) -> FloatTensor<Self> {
        let parts: Vec<_> = parts.into_iter().map(known::<Self, R>).collect();
        let buffers: Vec<_> = parts.iter().map(buffer).collect();
        tensor(cube::flatten(&parts[0].client, &buffers, len), &parts[0])
    }
}

/// The kernels' name of a type that they know.
fn element_type(dtype: FloatDType) -> Option<ElementType> {
    match dtype {
        FloatDType::F32 => Some(ElementType::F32),
        FloatDType::F16 => Some(ElementType::F16),
        FloatDType::BF16 => Some(ElementType::Bf16),
        _ => None,
    }
}

/// A contiguous tensor of a type that the kernels know.
fn known<B, R>(tensor: CubeTensor<R>) -> CubeTensor<R>
where
    R: CubeRuntime,
    B: FloatTensorOps<B> + burn_backend::Backend<FloatTensorPrimitive = CubeTensor<R>>,
{
    let tensor = match element_type(tensor.dtype().into()) {
        Some(_) => tensor,
        None => B::float_cast(tensor, FloatDType::F32),
    };
    into_contiguous(tensor)
}

/// A contiguous tensor whose memory nobody else holds, so that it can be updated in place.
fn exclusive<R: CubeRuntime>(tensor: CubeTensor<R>) -> CubeTensor<R> {
    let tensor = into_contiguous(tensor);
    if tensor.can_mut() { tensor } else { tensor.copy() }
}

fn buffer<R: CubeRuntime>(tensor: &CubeTensor<R>) -> Buffer {
    let dtype = element_type(tensor.dtype().into());
    let dtype = dtype.expect("masters are f32, and gradients were made of a known type");
    Buffer::new(tensor.handle.clone(), tensor.shape().num_elements(), dtype)
}

/// A flat tensor of a buffer, on the device of another tensor.
fn tensor<R: CubeRuntime>(buffer: Buffer, like: &CubeTensor<R>) -> CubeTensor<R> {
    let dtype = match buffer.dtype() {
        ElementType::F32 => DType::F32,
        ElementType::F16 => DType::F16,
        ElementType::Bf16 => DType::BF16,
    };
    let shape = Shape::from(vec![buffer.len()]);
    let (client, device) = (like.client.clone(), like.device.clone());
    CubeTensor::new_contiguous(client, device, shape, buffer.into_handle(), dtype)
}
