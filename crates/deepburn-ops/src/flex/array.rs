//! Flex tensors as slices of f32 and back.

use std::borrow::Cow;

use burn_backend::{DType, TensorData, TensorMetadata};
use burn_flex::FlexTensor;
use half::{bf16, f16};
use rayon::prelude::*;

/// Elements that a thread takes at a time in loops over elements.
pub(crate) const BLOCK: usize = 16 * 1024;

/// Whether the kernels here take this type; f64 is left to the portable way.
pub(crate) fn is_supported(tensor: &FlexTensor) -> bool {
    matches!(tensor.dtype(), DType::F32 | DType::F16 | DType::BF16)
}

/// The elements in flat order as f32; a copy only of what is neither f32 nor contiguous.
pub(crate) fn widen(tensor: &FlexTensor) -> Cow<'_, [f32]> {
    if tensor.dtype() == DType::F32 {
        return match tensor.as_slice::<f32>() {
            Some(values) => Cow::Borrowed(values),
            None => Cow::Owned(tensor.to_contiguous().storage::<f32>().to_vec()),
        };
    }
    let contiguous = tensor.to_contiguous();
    Cow::Owned(match tensor.dtype() {
        DType::F16 => widened(contiguous.storage::<f16>(), |value| value.to_f32()),
        DType::BF16 => widened(contiguous.storage::<bf16>(), |value| value.to_f32()),
        other => panic!("the kernels of the CPU backend take no {other:?}"),
    })
}

/// The elements in flat order as f32 that may be overwritten: no copy of a contiguous f32 tensor
/// that nobody else holds.
pub(crate) fn into_widened(tensor: FlexTensor) -> FlexTensor {
    if tensor.dtype() == DType::F32 { tensor.to_contiguous() } else { owned(&tensor) }
}

/// A widened copy as a tensor.
fn owned(tensor: &FlexTensor) -> FlexTensor {
    let values = widen(tensor).into_owned();
    from_values(values, tensor.shape().to_vec(), DType::F32)
}

/// A tensor of `shape` and `dtype` with these elements.
pub(crate) fn from_values(
    values: Vec<f32>,
    shape: impl Into<burn_backend::Shape>,
    dtype: DType,
) -> FlexTensor {
    let shape = shape.into();
    match dtype {
        DType::F32 => FlexTensor::from_data(TensorData::new(values, shape)),
        DType::F16 => {
            FlexTensor::from_data(TensorData::new(narrowed(&values, f16::from_f32), shape))
        }
        DType::BF16 => {
            FlexTensor::from_data(TensorData::new(narrowed(&values, bf16::from_f32), shape))
        }
        other => panic!("the kernels of the CPU backend make no {other:?}"),
    }
}

/// `tensor`, which is f32 and contiguous, in type `dtype`.
pub(crate) fn narrow(tensor: FlexTensor, dtype: DType) -> FlexTensor {
    if dtype == DType::F32 {
        return tensor;
    }
    let values = widen(&tensor).into_owned();
    from_values(values, tensor.shape().to_vec(), dtype)
}

fn widened<E: Copy + Sync>(values: &[E], widen: impl Fn(&E) -> f32 + Send + Sync) -> Vec<f32> {
    values.par_iter().with_min_len(BLOCK).map(widen).collect()
}

fn narrowed<E: Send>(values: &[f32], narrow: impl Fn(f32) -> E + Send + Sync) -> Vec<E> {
    values.par_iter().with_min_len(BLOCK).map(|value| narrow(*value)).collect()
}

/// The elements of a tensor that is f32 and contiguous, to be overwritten.
pub(crate) fn values_mut(tensor: &mut FlexTensor) -> &mut [f32] {
    let (start, end) = tensor.layout().contiguous_offsets().expect("the caller made it contiguous");
    &mut tensor.storage_mut::<f32>()[start..end]
}

/// Room for `len` numbers, which have to be written before they are read.
///
/// Clearing it first would cost as much as writing it once more.
#[allow(clippy::uninit_vec)]
pub(crate) fn unwritten(len: usize) -> Vec<f32> {
    let mut values = Vec::with_capacity(len);
    // SAFETY: the capacity is there, any bits are an f32, and every caller writes all elements
    // before it reads one or gives them away.
    unsafe { values.set_len(len) };
    values
}
