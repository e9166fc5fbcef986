//! The float types of saved weights.

use half::{bf16, f16};

use crate::ElementType;

/// The float type of the tensors in a saved checkpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FloatType {
    /// Single precision; values are stored exactly.
    #[default]
    F32,
    /// IEEE half precision; magnitudes above 65504 become infinite.
    F16,
    /// bfloat16.
    Bf16,
}

impl FloatType {
    /// All types.
    pub const ALL: [Self; 3] = [Self::F32, Self::F16, Self::Bf16];

    /// Returns the name of the type in PyTorch, which `config.json` files of `transformers` also use.
    #[must_use]
    pub const fn torch_name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::F16 => "float16",
            Self::Bf16 => "bfloat16",
        }
    }

    /// Returns the corresponding element type.
    #[must_use]
    pub const fn element(self) -> ElementType {
        match self {
            Self::F32 => ElementType::F32,
            Self::F16 => ElementType::F16,
            Self::Bf16 => ElementType::Bf16,
        }
    }

    /// Returns the size of an element in bytes.
    #[must_use]
    pub const fn size(self) -> usize {
        self.element().size()
    }

    /// Returns whether [`encode`](Self::encode) would convert a finite value in `values` to infinity.
    #[must_use]
    pub fn overflows(self, values: &[f32]) -> bool {
        let overflows = |v: &f32| v.is_finite() && f16::from_f32(*v).is_infinite();
        self == Self::F16 && values.iter().any(overflows)
    }

    /// Encodes `values` in this type and appends the little-endian bytes to `into`. Values are rounded to nearest.
    pub fn encode(self, values: &[f32], into: &mut Vec<u8>) {
        match self {
            Self::F32 => values.iter().for_each(|v| into.extend(v.to_le_bytes())),
            Self::F16 => values.iter().for_each(|v| into.extend(f16::from_f32(*v).to_le_bytes())),
            Self::Bf16 => values.iter().for_each(|v| into.extend(bf16::from_f32(*v).to_le_bytes())),
        }
    }

    /// Decodes little-endian `bytes` of this type and appends the values to `into`. An incomplete element at the end is
    /// ignored.
    pub fn decode(self, bytes: &[u8], into: &mut Vec<f32>) {
        let (wide, narrow) = (bytes.as_chunks::<4>().0, bytes.as_chunks::<2>().0);
        match self {
            Self::F32 => into.extend(wide.iter().map(|b| f32::from_le_bytes(*b))),
            Self::F16 => into.extend(narrow.iter().map(|b| f16::from_le_bytes(*b).to_f32())),
            Self::Bf16 => into.extend(narrow.iter().map(|b| bf16::from_le_bytes(*b).to_f32())),
        }
    }
}

/// Converts an element type. The conversion fails for types that are not float types of weights.
impl TryFrom<ElementType> for FloatType {
    type Error = ElementType;

    fn try_from(element: ElementType) -> Result<Self, ElementType> {
        Self::ALL.into_iter().find(|float| float.element() == element).ok_or(element)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encoding_reads_back() {
        // These values are exact in all three types.
        let values = [0.0, -0.0, 1.0, -2.5, 0.15625, 256.0];
        for precision in FloatType::ALL {
            let (mut bytes, mut back) = (Vec::new(), Vec::new());
            precision.encode(&values, &mut bytes);
            assert_eq!(bytes.len(), values.len() * precision.size());
            precision.decode(&bytes, &mut back);
            assert_eq!(back.map_bits(), values.to_vec().map_bits(), "{precision:?}");
        }
    }

    #[test]
    fn only_f16_overflows() {
        for float in FloatType::ALL {
            assert_eq!(float.overflows(&[1.0, 65520.0]), float == FloatType::F16);
            assert!(!float.overflows(&[65519.0, f32::INFINITY, f32::NAN]));
        }
    }

    trait Bits {
        fn map_bits(&self) -> Vec<u32>;
    }

    impl Bits for Vec<f32> {
        fn map_bits(&self) -> Vec<u32> {
            self.iter().map(|v| v.to_bits()).collect()
        }
    }
}
