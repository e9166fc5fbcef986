//! Conversion of element types and values between checkpoints and Burn.
//!
//! Both sides have the same types, with two exceptions in Burn: `Flex32` is f32 in memory and is
//! stored as f32, and bools, whose size depends on the backend, are stored as one byte each.

use burn::tensor::{BoolStore, DType, TensorData};
use deepburn_checkpoint::{CheckpointError, ElementType, Values};

/// Implements the conversions for the types that both sides have. Bools and `Flex32` have separate
/// arms.
macro_rules! conversions {
    ($($element:ident: $dtype:ident),*) => {
        /// Returns the type in which tensors of `dtype` are stored.
        ///
        /// # Errors
        /// Returns an error for quantized types, which checkpoints do not store.
        pub(crate) fn element_type(dtype: DType) -> Result<ElementType, CheckpointError> {
            match dtype {
                $(DType::$dtype => Ok(ElementType::$element),)*
                DType::Flex32 => Ok(ElementType::F32),
                DType::Bool(_) => Ok(ElementType::Bool),
                other => {
                    let reason = format!("{} is not stored", other.name());
                    Err(CheckpointError::Layout { reason })
                }
            }
        }

        /// Returns the Burn type of a tensor that is stored as `element`.
        pub(super) fn dtype_of(element: ElementType) -> DType {
            match element {
                $(ElementType::$element => DType::$dtype,)*
                ElementType::Bool => DType::Bool(BoolStore::Native),
            }
        }

        /// Converts values to flat tensor data of shape `[len]`.
        pub(super) fn data_of(values: Values) -> TensorData {
            let len = [values.len()];
            match values {
                $(Values::$element(values) => TensorData::new(values, len),)*
                Values::Bool(bytes) => {
                    TensorData::from_bytes_vec(bytes, len, DType::Bool(BoolStore::Native))
                }
            }
        }
    };
}

conversions!(
    F64: F64, F32: F32, F16: F16, Bf16: BF16, I64: I64, I32: I32, I16: I16, I8: I8, U64: U64,
    U32: U32, U16: U16, U8: U8
);
