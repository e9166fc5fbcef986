//! The element types of tensors, and values of one of them.

use std::fmt;

use bytemuck::{Pod, Zeroable};
use half::{bf16, f16};
use serde::{Deserialize, Serialize};

// Files hold little-endian values, and slices are written and read as they lie in memory.
#[cfg(target_endian = "big")]
compile_error!("checkpoints are read and written on little-endian machines only");

/// A type that tensors are stored in. Its names are those of safetensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum ElementType {
    /// Single precision.
    #[serde(rename = "F32")]
    F32,
    /// IEEE half precision.
    #[serde(rename = "F16")]
    F16,
    /// bfloat16.
    #[serde(rename = "BF16")]
    Bf16,
}

impl ElementType {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// The name in a safetensors header.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
        }
    }
}

impl fmt::Display for ElementType {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

/// A Rust type that tensors are stored in: `f32`, [`half::f16`] and [`half::bf16`].
pub trait Element: Pod + Zeroable + Send + Sync + sealed::Sealed {
    /// The type's name.
    const TYPE: ElementType;
}

impl Element for f32 {
    const TYPE: ElementType = ElementType::F32;
}

impl Element for f16 {
    const TYPE: ElementType = ElementType::F16;
}

impl Element for bf16 {
    const TYPE: ElementType = ElementType::Bf16;
}

mod sealed {
    pub trait Sealed {}

    impl Sealed for f32 {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
}

/// Values as they are stored.
#[derive(Debug, Clone, PartialEq)]
pub enum Values {
    /// Single precision.
    F32(Vec<f32>),
    /// IEEE half precision.
    F16(Vec<f16>),
    /// bfloat16.
    Bf16(Vec<bf16>),
}

impl Values {
    pub(crate) fn zeros(element: ElementType, len: usize) -> Self {
        match element {
            ElementType::F32 => Self::F32(vec![0.0; len]),
            ElementType::F16 => Self::F16(vec![f16::ZERO; len]),
            ElementType::Bf16 => Self::Bf16(vec![bf16::ZERO; len]),
        }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Self::F32(values) => bytemuck::cast_slice_mut(values),
            Self::F16(values) => bytemuck::cast_slice_mut(values),
            Self::Bf16(values) => bytemuck::cast_slice_mut(values),
        }
    }

    /// The type of the elements.
    pub fn element_type(&self) -> ElementType {
        match self {
            Self::F32(_) => ElementType::F32,
            Self::F16(_) => ElementType::F16,
            Self::Bf16(_) => ElementType::Bf16,
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::F16(values) => values.len(),
            Self::Bf16(values) => values.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The values in single precision, which holds each of them exactly.
    pub fn into_f32(self) -> Vec<f32> {
        match self {
            Self::F32(values) => values,
            Self::F16(values) => values.into_iter().map(f16::to_f32).collect(),
            Self::Bf16(values) => values.into_iter().map(bf16::to_f32).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_files_are_those_of_safetensors() {
        for element in [ElementType::F32, ElementType::F16, ElementType::Bf16] {
            let dtype: safetensors::Dtype = serde_json::from_value(element.name().into()).unwrap();
            assert_eq!(dtype.bitsize(), 8 * element.size());
            let name = serde_json::to_value(element).unwrap();
            assert_eq!(name, element.to_string());
        }
    }

    #[test]
    fn values_know_their_type_and_widen_exactly() {
        let mut halves = Values::zeros(ElementType::F16, 2);
        halves.bytes_mut().copy_from_slice(&[0x00, 0x3c, 0x01, 0x00]);
        assert_eq!((halves.element_type(), halves.len()), (ElementType::F16, 2));
        assert_eq!(halves.into_f32(), [1.0, 2_f32.powi(-24)]);
        let mut brain = Values::zeros(ElementType::Bf16, 1);
        brain.bytes_mut().copy_from_slice(&[0x80, 0xbf]);
        assert_eq!(brain.into_f32(), [-1.0]);
        assert!(Values::zeros(ElementType::F32, 0).is_empty());
    }
}
