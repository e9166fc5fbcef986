//! The element types of tensors.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The element type of a stored tensor, named as in safetensors. The variants are in the order in
/// which a file stores its tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum ElementType {
    /// Unsigned, 64 bits.
    U64,
    /// Signed, 64 bits.
    I64,
    /// Double precision.
    F64,
    /// Single precision.
    F32,
    /// Unsigned, 32 bits.
    U32,
    /// Signed, 32 bits.
    I32,
    /// bfloat16.
    Bf16,
    /// IEEE half precision.
    F16,
    /// Unsigned, 16 bits.
    U16,
    /// Signed, 16 bits.
    I16,
    /// Signed, 8 bits.
    I8,
    /// Unsigned, 8 bits.
    U8,
    /// A byte that is 0 or 1.
    Bool,
}

impl ElementType {
    /// All types, in this order.
    pub const ALL: [Self; 13] = [
        Self::U64,
        Self::I64,
        Self::F64,
        Self::F32,
        Self::U32,
        Self::I32,
        Self::Bf16,
        Self::F16,
        Self::U16,
        Self::I16,
        Self::I8,
        Self::U8,
        Self::Bool,
    ];

    /// Returns the position of this type in a file with several types, from 0. Wide types come
    /// first, in the same order as in the `safetensors` crate.
    #[must_use]
    pub const fn file_order(self) -> usize {
        self as usize
    }

    /// Returns the size of an element in bytes.
    pub const fn size(self) -> usize {
        match self {
            Self::F64 | Self::I64 | Self::U64 => 8,
            Self::F32 | Self::I32 | Self::U32 => 4,
            Self::F16 | Self::Bf16 | Self::I16 | Self::U16 => 2,
            Self::I8 | Self::U8 | Self::Bool => 1,
        }
    }

    /// Returns whether parameters and their states can have this type. Buffers can have any type.
    pub const fn is_trainable(self) -> bool {
        matches!(self, Self::F32 | Self::F16 | Self::Bf16)
    }

    /// Returns the name in a safetensors header.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F64 => "F64",
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::I64 => "I64",
            Self::I32 => "I32",
            Self::I16 => "I16",
            Self::I8 => "I8",
            Self::U64 => "U64",
            Self::U32 => "U32",
            Self::U16 => "U16",
            Self::U8 => "U8",
            Self::Bool => "BOOL",
        }
    }
}

impl fmt::Display for ElementType {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_matches_the_safetensors_crate() {
        let mut types = ElementType::ALL;
        types.sort_by_key(|element| element.file_order());
        let dtype = |element: &ElementType| -> safetensors::Dtype {
            serde_json::from_value(element.name().into()).unwrap()
        };
        assert!(types.is_sorted_by(|left, right| dtype(left) > dtype(right)));
        assert!(types.is_sorted_by(|left, right| left.size() >= right.size()));
    }

    #[test]
    fn a_type_is_written_and_read_by_its_name() {
        for element in ElementType::ALL {
            let name = serde_json::to_value(element).unwrap();
            assert_eq!(name, element.name());
            assert_eq!(serde_json::from_value::<ElementType>(name).unwrap(), element);
        }
        assert!(serde_json::from_str::<ElementType>("\"F8_E4M3\"").is_err());
    }
}
