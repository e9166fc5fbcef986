//! Optimizer kernels straight on LibTorch's host memory; on its other devices, by way of the host.

use burn_backend::ops::FloatTensorOps;
use burn_backend::tensor::FloatTensor;
use burn_backend::{FloatDType, TensorMetadata};
use burn_tch::{LibTorch, TchElement, TchTensor};
use deepburn_kernels::{
    self as kernels, AdamShare, AdamStep, Gradient, GradientStats, WorkingCopy,
};
use half::{bf16, f16};
use tch::{Device, Kind, Tensor};

use crate::layout::LayoutOps;
use crate::optimizer::{AdamArrays, OptimizerOps, adam_on_host, flatten_on_host};
use crate::stream::StreamOps;

impl<E: TchElement> OptimizerOps for LibTorch<E> {
    fn adam(
        step: &AdamStep,
        grad_scale: f32,
        arrays: AdamArrays<Self>,
        gradient: FloatTensor<Self>,
        working: Option<FloatDType>,
    ) -> (AdamArrays<Self>, Option<FloatTensor<Self>>) {
        let AdamArrays { master, first, second } = arrays;
        if master.tensor.device() != Device::Cpu {
            let arrays = AdamArrays { master, first, second };
            return adam_on_host::<Self>(step, grad_scale, arrays, gradient, working);
        }
        let (mut master, mut first, mut second) =
            (exclusive(master), exclusive(first), exclusive(second));
        let gradient = gradient.tensor.contiguous();
        let kind = match working {
            Some(FloatDType::F16) => Some(Kind::Half),
            Some(FloatDType::BF16) => Some(Kind::BFloat16),
            _ => None,
        };
        let mut copy = kind.map(|kind| {
            TchTensor::new(Tensor::empty([master.tensor.numel() as i64], (kind, Device::Cpu)))
        });
        let share = AdamShare {
            param: slice_mut(&mut master),
            m: slice_mut(&mut first),
            v: slice_mut(&mut second),
            working: copy.as_mut().map(|copy| match kind {
                Some(Kind::Half) => WorkingCopy::F16(slice_mut::<f16>(copy)),
                _ => WorkingCopy::Bf16(slice_mut::<bf16>(copy)),
            }),
        };
        kernels::adam(step, grad_scale, elements(&gradient), share);
        (AdamArrays { master, first, second }, copy)
    }

    fn gradient_stats(gradient: FloatTensor<Self>) -> GradientStats {
        let gradient = gradient.tensor.contiguous().to_device(Device::Cpu);
        kernels::gradient_stats(elements(&gradient))
    }

    fn flatten(parts: Vec<FloatTensor<Self>>, len: usize) -> FloatTensor<Self> {
        if parts[0].tensor.device() != Device::Cpu {
            return flatten_on_host::<Self>(parts, len);
        }
        let kind = parts[0].tensor.kind();
        let flat = Tensor::zeros([len as i64], (kind, Device::Cpu));
        let mut start = 0;
        for part in parts {
            let count = part.tensor.numel() as i64;
            flat.narrow(0, start, count).copy_(&part.tensor);
            start += count;
        }
        TchTensor::new(flat)
    }

    fn cast(tensor: FloatTensor<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        if tensor.dtype() == dtype.into() { tensor } else { Self::float_cast(tensor, dtype) }
    }
}

impl<E: TchElement> StreamOps for LibTorch<E> {}

impl<E: TchElement> LayoutOps for LibTorch<E> {
    fn is_contiguous(tensor: &TchTensor) -> bool {
        tensor.tensor.is_contiguous()
    }
}

/// A contiguous tensor whose memory nobody else holds, so that it can be updated in place.
fn exclusive(tensor: TchTensor) -> TchTensor {
    if tensor.can_mut() && tensor.tensor.is_contiguous() {
        tensor
    } else {
        TchTensor::new(tensor.tensor.contiguous().copy())
    }
}

/// The elements of an [`exclusive`] tensor on the host, which is of type `T`.
fn slice_mut<T>(tensor: &mut TchTensor) -> &mut [T] {
    let (data, len) = (tensor.tensor.data_ptr().cast::<T>(), tensor.tensor.numel());
    assert_eq!(size_of::<T>(), tensor.tensor.kind().elt_size_in_bytes());
    if len == 0 {
        return &mut [];
    }
    // SAFETY: the tensor is contiguous, in host memory that nobody else holds, of elements as large
    // as `T`, and stays borrowed for as long as the slice.
    unsafe { std::slice::from_raw_parts_mut(data, len) }
}

/// The elements of a contiguous f32, f16 or bf16 tensor on the host.
fn elements(tensor: &Tensor) -> Gradient<'_> {
    fn slice<T>(tensor: &Tensor) -> &[T] {
        assert_eq!(size_of::<T>(), tensor.kind().elt_size_in_bytes());
        if tensor.numel() == 0 {
            return &[];
        }
        // SAFETY: the tensor is contiguous, in host memory, of elements as large as `T`, and stays
        // borrowed for as long as the slice.
        unsafe { std::slice::from_raw_parts(tensor.data_ptr().cast::<T>(), tensor.numel()) }
    }
    match tensor.kind() {
        Kind::Half => Gradient::F16(slice(tensor)),
        Kind::BFloat16 => Gradient::Bf16(slice(tensor)),
        _ => Gradient::F32(slice(tensor)),
    }
}
