//! Conversion of element types and values between checkpoints and Burn.
//!
//! Both sides have the same types, with two exceptions in Burn: `Flex32` is f32 in memory and is
//! stored as f32, and bools, whose size depends on the backend, are stored as one byte each.

use burn::tensor::{BoolStore, DType, TensorData};
use deepburn_checkpoint::{CheckpointError, ElementType, Values};

/// Returns the type in which tensors of `dtype` are stored.
///
/// # Errors
/// Returns an error for quantized types, which checkpoints do not store.
pub(crate) fn element_type(dtype: DType) -> Result<ElementType, CheckpointError> {
    match dtype {
        DType::F64 => Ok(ElementType::F64),
        DType::F32 | DType::Flex32 => Ok(ElementType::F32),
        DType::F16 => Ok(ElementType::F16),
        DType::BF16 => Ok(ElementType::Bf16),
        DType::I64 => Ok(ElementType::I64),
        DType::I32 => Ok(ElementType::I32),
        DType::I16 => Ok(ElementType::I16),
        DType::I8 => Ok(ElementType::I8),
        DType::U64 => Ok(ElementType::U64),
        DType::U32 => Ok(ElementType::U32),
        DType::U16 => Ok(ElementType::U16),
        DType::U8 => Ok(ElementType::U8),
        DType::Bool(_) => Ok(ElementType::Bool),
        other => Err(CheckpointError::Layout { reason: format!("{} is not stored", other.name()) }),
    }
}

/// Returns the Burn type of a tensor that is stored as `element`.
pub(super) fn dtype_of(element: ElementType) -> DType {
    match element {
        ElementType::F64 => DType::F64,
        ElementType::F32 => DType::F32,
        ElementType::F16 => DType::F16,
        ElementType::Bf16 => DType::BF16,
        ElementType::I64 => DType::I64,
        ElementType::I32 => DType::I32,
        ElementType::I16 => DType::I16,
        ElementType::I8 => DType::I8,
        ElementType::U64 => DType::U64,
        ElementType::U32 => DType::U32,
        ElementType::U16 => DType::U16,
        ElementType::U8 => DType::U8,
        ElementType::Bool => DType::Bool(BoolStore::Native),
    }
}

/// Converts values to flat tensor data of shape `[len]`.
pub(super) fn data_of(values: Values) -> TensorData {
    let len = [values.len()];
    match values {
        Values::F64(values) => TensorData::new(values, len),
        Values::F32(values) => TensorData::new(values, len),
        Values::F16(values) => TensorData::new(values, len),
        Values::Bf16(values) => TensorData::new(values, len),
        Values::I64(values) => TensorData::new(values, len),
        Values::I32(values) => TensorData::new(values, len),
        Values::I16(values) => TensorData::new(values, len),
        Values::I8(values) => TensorData::new(values, len),
        Values::U64(values) => TensorData::new(values, len),
        Values::U32(values) => TensorData::new(values, len),
        Values::U16(values) => TensorData::new(values, len),
        Values::U8(values) => TensorData::new(values, len),
        Values::Bool(bytes) => {
            TensorData::from_bytes_vec(bytes, len, DType::Bool(BoolStore::Native))
        }
    }
}
