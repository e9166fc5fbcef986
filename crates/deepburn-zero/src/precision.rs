//! Conversion from the float types of a plan to the element types of tensors.

use burn_backend::FloatDType;
use deepburn_config::Precision;

/// Returns the element type of tensors in this precision.
pub(crate) fn element_type(precision: Precision) -> FloatDType {
    match precision {
        Precision::Fp32 => FloatDType::F32,
        Precision::Fp16 => FloatDType::F16,
        Precision::Bf16 => FloatDType::BF16,
    }
}
