//! Values of one element type.
//!
//! Main types: [`StoredElement`], for slices whose type is known at compile time, and [`Values`],
//! for arrays whose type is stored in a file. Both are views of the little-endian bytes that a file
//! contains, so nothing is converted when values are written or read.

use bytemuck::{Pod, Zeroable};
pub use deepburn_files::safetensors::ElementType;
use half::{bf16, f16};

// Files hold little-endian values, and slices are written and read without conversion.
#[cfg(target_endian = "big")]
compile_error!("checkpoints are read and written on little-endian machines only");

/// A Rust type that tensors are stored in: floats of 16 ([`half::f16`], [`half::bf16`]) to 64 bits
/// and integers. Bools are written as bytes, by [`RankWriter::write_bytes`](crate::RankWriter).
pub trait StoredElement: Pod + Zeroable + Send + Sync + sealed::Sealed {
    /// The element type.
    const TYPE: ElementType;
}

/// Keeps [`StoredElement`] from being implemented for types that files cannot store.
mod sealed {
    pub trait Sealed {}
}

/// Values in their stored type.
#[derive(Debug, Clone, PartialEq)]
pub enum Values {
    /// Double precision.
    F64(Vec<f64>),
    /// Single precision.
    F32(Vec<f32>),
    /// IEEE half precision.
    F16(Vec<f16>),
    /// bfloat16.
    Bf16(Vec<bf16>),
    /// Signed, 64 bits.
    I64(Vec<i64>),
    /// Signed, 32 bits.
    I32(Vec<i32>),
    /// Signed, 16 bits.
    I16(Vec<i16>),
    /// Signed, 8 bits.
    I8(Vec<i8>),
    /// Unsigned, 64 bits.
    U64(Vec<u64>),
    /// Unsigned, 32 bits.
    U32(Vec<u32>),
    /// Unsigned, 16 bits.
    U16(Vec<u16>),
    /// Unsigned, 8 bits.
    U8(Vec<u8>),
    /// Bools, a byte each, 0 or 1.
    Bool(Vec<u8>),
}

/// Implements [`StoredElement`] for each type, and the methods of [`Values`] that have an arm for
/// each of them. Bools are stored as bytes and have separate arms.
macro_rules! elements {
    ($($variant:ident: $type:ty),*) => {
        $(
            impl sealed::Sealed for $type {}

            impl StoredElement for $type {
                const TYPE: ElementType = ElementType::$variant;
            }
        )*

        impl Values {
            /// Returns `len` zeros of this type.
            pub(crate) fn zeros(element: ElementType, len: usize) -> Self {
                match element {
                    $(ElementType::$variant => Self::$variant(vec![<$type>::zeroed(); len]),)*
                    ElementType::Bool => Self::Bool(vec![0; len]),
                }
            }

            /// Returns the values as bytes to be filled from a file. For bools, the caller has to
            /// check [`is_sound`](Self::is_sound) afterwards.
            pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
                match self {
                    $(Self::$variant(values) => bytemuck::cast_slice_mut(values),)*
                    Self::Bool(values) => values,
                }
            }

            /// Returns the values as in a file: little-endian and contiguous.
            pub fn bytes(&self) -> &[u8] {
                match self {
                    $(Self::$variant(values) => bytemuck::cast_slice(values),)*
                    Self::Bool(values) => values,
                }
            }

            /// Returns the type of the elements.
            pub fn element_type(&self) -> ElementType {
                match self {
                    $(Self::$variant(_) => ElementType::$variant,)*
                    Self::Bool(_) => ElementType::Bool,
                }
            }
        }
    };
}

elements!(
    F64: f64, F32: f32, F16: f16, Bf16: bf16, I64: i64, I32: i32, I16: i16, I8: i8, U64: u64,
    U32: u32, U16: u16, U8: u8
);

impl Values {
    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.bytes().len() / self.element_type().size()
    }

    /// Returns true if there are no elements.
    pub fn is_empty(&self) -> bool {
        self.bytes().is_empty()
    }

    /// Converts the values to f32. Floats of 16 and 32 bits are converted exactly, other types are
    /// rounded.
    pub fn into_f32(self) -> Vec<f32> {
        match self {
            Self::F32(values) => values,
            Self::F64(values) => values.into_iter().map(|value| value as f32).collect(),
            Self::F16(values) => values.into_iter().map(f16::to_f32).collect(),
            Self::Bf16(values) => values.into_iter().map(bf16::to_f32).collect(),
            Self::I64(values) => values.into_iter().map(|value| value as f32).collect(),
            Self::I32(values) => values.into_iter().map(|value| value as f32).collect(),
            Self::I16(values) => values.into_iter().map(f32::from).collect(),
            Self::I8(values) => values.into_iter().map(f32::from).collect(),
            Self::U64(values) => values.into_iter().map(|value| value as f32).collect(),
            Self::U32(values) => values.into_iter().map(|value| value as f32).collect(),
            Self::U16(values) => values.into_iter().map(f32::from).collect(),
            Self::U8(values) | Self::Bool(values) => values.into_iter().map(f32::from).collect(),
        }
    }

    /// Returns true if every bool is 0 or 1.
    pub(crate) fn is_sound(&self) -> bool {
        match self {
            Self::Bool(values) => values.iter().all(|value| *value <= 1),
            _ => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_in_files_match_safetensors() {
        for element in ElementType::ALL {
            let dtype: safetensors::Dtype = serde_json::from_value(element.name().into()).unwrap();
            assert_eq!(dtype.bitsize(), 8 * element.size());
            let name = serde_json::to_value(element).unwrap();
            assert_eq!(name, element.to_string());
            let values = Values::zeros(element, 3);
            assert_eq!((values.element_type(), values.len()), (element, 3));
            assert_eq!(values.into_f32(), [0.0; 3]);
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
        let mut bools = Values::zeros(ElementType::Bool, 2);
        assert!(bools.is_sound());
        bools.bytes_mut()[1] = 2;
        assert!(!bools.is_sound());
    }
}
