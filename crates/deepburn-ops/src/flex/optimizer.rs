//! Optimizer steps on the memory of flex tensors.
//!
//! Master weights and optimizer states are updated in place by `deepburn_kernels` on all threads of
//! the rayon pool. A tensor is copied only if it has another owner, for example a checkpoint that
//! is being saved. It is copied before the first write, so the other owner keeps the old values.
//!
//! ```text
//! gradient  f32 or 16 bits, read only      | g0 g1 g2 ... |
//! master    f32, updated in place          | p0 p1 p2 ... |    one pass over all arrays
//! states    f32, updated in place          | m0 m1 m2 ... |    in blocks of 16,384 elements
//! working   16 bits, new memory            | w0 w1 w2 ... |
//! ```

use burn_backend::ops::FloatTensorOps;
use burn_backend::tensor::FloatTensor;
use burn_backend::{DType, Element, FloatDType, Shape, TensorData, TensorMetadata};
use burn_flex::{Flex, FlexTensor};
use deepburn_kernels::{self as kernels, ElementwiseStep, GradientStats, OwnedSlice, WorkingCopy};
use half::{bf16, f16};

use super::array::{contiguous, elements, owned, unwritten};
use crate::layout::LayoutOps;
use crate::optimizer::{OptimizerOps, UpdateArrays};
use crate::stream::StreamOps;

/// Gradients must be f32, f16 or bf16; other types cause a panic.
impl OptimizerOps for Flex {
    /// Allocates only the working copy. For a working type other than f16 and bf16, no working copy
    /// is returned, and the caller uses the master weights.
    fn update(
        step: &ElementwiseStep,
        grad_scale: f32,
        arrays: UpdateArrays<Self>,
        gradient: FloatTensor<Self>,
        working: Option<FloatDType>,
    ) -> (UpdateArrays<Self>, Option<FloatTensor<Self>>) {
        let UpdateArrays { master, states } = arrays;
        let mut master = owned(master);
        let mut states: Vec<_> = states.into_iter().map(owned).collect();
        let len = master.layout().num_elements();
        let gradient = contiguous(&gradient);
        // `storage_mut` copies a shared storage. Master weights and states usually have a single
        // owner.
        let mut update = |working: Option<WorkingCopy<'_>>| {
            let used = states.iter_mut().take(step.states());
            let mut used: Vec<_> = used.map(|state| state.storage_mut()).collect();
            let slice = OwnedSlice { param: master.storage_mut(), states: &mut used, working };
            step.update(grad_scale, elements(&gradient), slice);
        };
        let copy = match working {
            Some(FloatDType::F16) => Some(filled::<f16>(len, |copy| update(Some(copy.into())))),
            Some(FloatDType::BF16) => Some(filled::<bf16>(len, |copy| update(Some(copy.into())))),
            // An f32 copy would equal the master weights.
            _ => {
                update(None);
                None
            }
        };
        (UpdateArrays { master, states }, copy)
    }

    /// Sums the squares of each gradient in f64, in a fixed order.
    fn gradient_stats(
        count: usize,
        gradient: &dyn Fn(usize) -> FloatTensor<Self>,
    ) -> Vec<GradientStats> {
        let stats = |index| kernels::gradient_stats(elements(&contiguous(&gradient(index))));
        (0..count).map(stats).collect()
    }

    /// Conversions between f32 and the 16-bit types run on all threads; other conversions use
    /// burn-flex's cast. The result keeps the shape.
    fn cast(tensor: FloatTensor<Self>, dtype: FloatDType) -> FloatTensor<Self> {
        let shape = tensor.shape();
        let len = shape.num_elements();
        let cast = match (tensor.dtype(), dtype) {
            (held, wanted) if held == DType::from(wanted) => return tensor,
            (DType::F32, FloatDType::F16) => {
                let tensor = contiguous(&tensor);
                filled::<f16>(len, |copy| kernels::cast(slice(&tensor), copy.into()))
            }
            (DType::F32, FloatDType::BF16) => {
                let tensor = contiguous(&tensor);
                filled::<bf16>(len, |copy| kernels::cast(slice(&tensor), copy.into()))
            }
            (DType::F16 | DType::BF16, FloatDType::F32) => {
                let tensor = contiguous(&tensor);
                filled::<f32>(len, |copy| kernels::widen(elements(&tensor), copy))
            }
            _ => return Self::float_cast(tensor, dtype),
        };
        cast.reshape(shape)
    }

    /// Copies the parts on all threads. All parts must have the same type. Parts that are not
    /// contiguous are copied twice.
    fn flatten(parts: Vec<FloatTensor<Self>>, len: usize) -> FloatTensor<Self> {
        /// Concatenates contiguous parts with elements `E`.
        fn copied<E: Element + bytemuck::Pod + Default>(
            parts: &[FlexTensor],
            len: usize,
        ) -> FlexTensor {
            let parts: Vec<&[E]> = parts.iter().map(slice).collect();
            filled(len, |flat| kernels::flatten(&parts, flat))
        }
        let parts: Vec<_> = parts.iter().map(contiguous).collect();
        match parts[0].dtype() {
            DType::F64 => copied::<f64>(&parts, len),
            DType::F16 => copied::<f16>(&parts, len),
            DType::BF16 => copied::<bf16>(&parts, len),
            _ => copied::<f32>(&parts, len),
        }
    }
}

/// Ops run on the calling thread and the rayon pool, and are complete when they return, so there is
/// no queue to share.
impl StreamOps for Flex {}

/// The layout of a tensor is always known.
impl LayoutOps for Flex {
    fn is_contiguous(tensor: &FlexTensor) -> bool {
        tensor.is_contiguous()
    }
}

/// Returns the elements of a contiguous tensor.
///
/// # Panics
/// Panics if the tensor is not contiguous or its elements are not `E`.
fn slice<E: Element + bytemuck::Pod>(tensor: &FlexTensor) -> &[E] {
    tensor.as_slice().expect("the tensor was made contiguous, and its type asked for")
}

/// Returns a flat tensor of `len` elements. `fill` gets uninitialized memory and must write all of
/// it.
fn filled<E: Element + bytemuck::Pod>(len: usize, fill: impl FnOnce(&mut [E])) -> FlexTensor {
    let mut values = unwritten(len);
    fill(&mut values);
    FlexTensor::from_data(TensorData::new(values, Shape::from(vec![len])))
}
