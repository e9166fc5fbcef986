//! Optimizer kernels on LibTorch's tensors.
//!
//! On the CPU, the kernels of `deepburn_kernels` update LibTorch's memory in place, on the rayon
//! pool. On other devices, all arrays of a step are copied to host memory and back, which is
//! correct but slow.

use burn_backend::FloatDType;
use burn_backend::tensor::FloatTensor;
use burn_tch::{LibTorch, TchElement, TchTensor};
use deepburn_kernels::{
    self as kernels, ElementwiseStep, FloatSlice, GradientStats, OwnedSlice, WorkingCopy,
};
use half::{bf16, f16};
use tch::{Device, Kind, Tensor};

use crate::layout::LayoutOps;
use crate::matmul::MatmulOps;
use crate::optimizer::{OptimizerOps, UpdateArrays, flatten_on_host, update_on_host};
use crate::random::RandomOps;
use crate::stream::StreamOps;
use crate::sum::SumOps;

/// Gradients must be f32, f16 or bf16; other types cause a panic.
impl<E: TchElement> OptimizerOps for LibTorch<E> {
    /// Allocates only the working copy on the CPU. For a working type other than f16 and bf16, no
    /// working copy is returned, and the caller uses the master weights.
    ///
    /// The kernel reads and writes LibTorch's memory through raw pointers, which is sound because
    /// the tensors are contiguous, in host memory and, after `exclusive`, not shared.
    fn update(
        step: &ElementwiseStep,
        grad_scale: f32,
        arrays: UpdateArrays<Self>,
        gradient: FloatTensor<Self>,
        working: Option<FloatDType>,
    ) -> (UpdateArrays<Self>, Option<FloatTensor<Self>>) {
        if arrays.master.tensor.device() != Device::Cpu {
            return update_on_host::<Self>(step, grad_scale, arrays, gradient, working);
        }
        let UpdateArrays { master, mut states } = arrays;
        let unused = states.split_off(step.states().min(states.len()));
        // A shared tensor, for example one that is being saved to a checkpoint, is copied, so its
        // other owner keeps the old values.
        let mut master = exclusive(master);
        let mut states: Vec<_> = states.into_iter().map(exclusive).collect();
        let gradient = gradient.tensor.contiguous();
        let kind = match working {
            Some(FloatDType::F16) => Some(Kind::Half),
            Some(FloatDType::BF16) => Some(Kind::BFloat16),
            _ => None,
        };
        let mut copy = kind.map(|kind| {
            TchTensor::new(Tensor::empty([master.tensor.numel() as i64], (kind, Device::Cpu)))
        });
        let mut slices: Vec<_> = states.iter_mut().map(slice_mut).collect();
        let slice = OwnedSlice {
            param: slice_mut(&mut master),
            states: &mut slices,
            working: copy.as_mut().map(|copy| match kind {
                Some(Kind::Half) => WorkingCopy::F16(slice_mut::<f16>(copy)),
                _ => WorkingCopy::Bf16(slice_mut::<bf16>(copy)),
            }),
        };
        step.update(grad_scale, elements(&gradient), slice);
        states.extend(unused);
        (UpdateArrays { master, states }, copy)
    }

    /// Copies gradients on another device to host memory, one by one. Sums of squares are in f64,
    /// in a fixed order.
    fn gradient_stats(
        count: usize,
        gradient: &dyn Fn(usize) -> FloatTensor<Self>,
    ) -> Vec<GradientStats> {
        let on_host = |index| gradient(index).tensor.contiguous().to_device(Device::Cpu);
        let gradients = (0..count).map(on_host);
        gradients.map(|gradient| kernels::gradient_stats(elements(&gradient))).collect()
    }

    /// Copies the parts into a zeroed tensor, one after the other. Parts on another device are
    /// copied through host memory.
    fn flatten(parts: Vec<FloatTensor<Self>>, len: usize) -> FloatTensor<Self> {
        if parts[0].tensor.device() != Device::Cpu {
            return flatten_on_host::<Self>(parts, len);
        }
        let kind = parts[0].tensor.kind();
        // Zeros, because the elements after the parts are padding.
        let flat = Tensor::zeros([len as i64], (kind, Device::Cpu));
        let mut start = 0;
        for part in parts {
            let count = part.tensor.numel() as i64;
            flat.narrow(0, start, count).copy_(&part.tensor);
            start += count;
        }
        TchTensor::new(flat)
    }
}

/// All threads use the default stream of a CUDA device, so LibTorch already runs the kernels of all
/// ranks in one queue.
impl<E: TchElement> StreamOps for LibTorch<E> {}

/// LibTorch's products use the hardware's 16-bit instructions, so the provided method is used.
impl<E: TchElement> MatmulOps for LibTorch<E> {}

/// The order of LibTorch's sums on the CPU depends only on the number of its threads.
impl<E: TchElement> SumOps for LibTorch<E> {}

/// LibTorch has other generators, so random numbers are drawn on the host.
impl<E: TchElement> RandomOps for LibTorch<E> {}

/// The layout of a tensor is always known.
impl<E: TchElement> LayoutOps for LibTorch<E> {
    fn is_contiguous(tensor: &TchTensor) -> bool {
        tensor.tensor.is_contiguous()
    }
}

/// Returns a contiguous tensor whose memory is not shared. Copies the tensor unless it already
/// meets both conditions.
fn exclusive(tensor: TchTensor) -> TchTensor {
    if tensor.can_mut() && tensor.tensor.is_contiguous() {
        tensor
    } else {
        TchTensor::new(tensor.tensor.contiguous().copy())
    }
}

/// Returns the elements of an [`exclusive`] tensor in host memory, whose type must be `T`.
///
/// A tensor without elements has no memory, so its slice does not use the pointer.
///
/// # Panics
/// Panics if the elements of the tensor do not have the size of `T`.
fn slice_mut<T>(tensor: &mut TchTensor) -> &mut [T] {
    let (data, len) = (tensor.tensor.data_ptr().cast::<T>(), tensor.tensor.numel());
    assert_eq!(size_of::<T>(), tensor.tensor.kind().elt_size_in_bytes());
    if len == 0 {
        return &mut [];
    }
    // SAFETY: the tensor is contiguous and in host memory without other owners, its elements have
    // the size of `T`, and it stays borrowed as long as the slice.
    unsafe { std::slice::from_raw_parts_mut(data, len) }
}

/// Returns the elements of a contiguous f32, f16 or bf16 tensor in host memory.
///
/// # Panics
/// Panics for types whose elements do not have the size of these three, such as f64.
fn elements(tensor: &Tensor) -> FloatSlice<'_> {
    /// Returns the elements, whose type must be `T`; checks only their size.
    fn slice<T>(tensor: &Tensor) -> &[T] {
        assert_eq!(size_of::<T>(), tensor.kind().elt_size_in_bytes());
        if tensor.numel() == 0 {
            return &[];
        }
        // SAFETY: the tensor is contiguous and in host memory, its elements have the size of `T`,
        // and it stays borrowed as long as the slice.
        unsafe { std::slice::from_raw_parts(tensor.data_ptr().cast::<T>(), tensor.numel()) }
    }
    match tensor.kind() {
        Kind::Half => FloatSlice::F16(slice(tensor)),
        Kind::BFloat16 => FloatSlice::Bf16(slice(tensor)),
        _ => FloatSlice::F32(slice(tensor)),
    }
}
