//! The float types of saved weights.

use half::{bf16, f16};

use super::element_type::ElementType;

/// The float type of the tensors in a saved checkpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FloatType {
    /// Single precision; values are stored exactly.
    #[default]
    F32,
    /// IEEE half precision; the largest finite value is 65504.
    F16,
    /// bfloat16; the largest finite value is about 3.39e38, slightly less than in f32.
    Bf16,
}

impl FloatType {
    /// All types.
    pub const ALL: [Self; 3] = [Self::F32, Self::F16, Self::Bf16];

    /// Returns the name of the type in PyTorch, which `config.json` files of `transformers` also
    /// use.
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

    /// Returns the largest finite value of the type.
    #[must_use]
    pub fn largest(self) -> f32 {
        match self {
            Self::F32 => f32::MAX,
            Self::F16 => f16::MAX.to_f32(),
            Self::Bf16 => bf16::MAX.to_f32(),
        }
    }

    /// Returns the largest magnitude of the finite `values` if [`encode`](Self::encode) would
    /// convert it to infinity. Returns `None` if all finite values stay finite.
    #[must_use]
    pub fn overflow(self, values: &[f32]) -> Option<f32> {
        // Values that are not finite before the conversion are not an overflow, and are stored as
        // they are.
        let finite = values.iter().map(|v| v.abs()).filter(|v| v.is_finite());
        let largest = finite.fold(0.0, f32::max);
        let is_infinite = match self {
            Self::F32 => false,
            // Rounding is monotonic, so no smaller value overflows either. The value is rounded and
            // not compared with `largest`, because numbers up to half a step above it round down to
            // it.
            Self::F16 => f16::from_f32(largest).is_infinite(),
            Self::Bf16 => bf16::from_f32(largest).is_infinite(),
        };
        is_infinite.then_some(largest)
    }

    /// Encodes `values` in this type and appends the little-endian bytes to `into`. Values are
    /// rounded to nearest.
    pub fn encode(self, values: &[f32], into: &mut Vec<u8>) {
        match self {
            Self::F32 => values.iter().for_each(|v| into.extend(v.to_le_bytes())),
            Self::F16 => values.iter().for_each(|v| into.extend(f16::from_f32(*v).to_le_bytes())),
            Self::Bf16 => values.iter().for_each(|v| into.extend(bf16::from_f32(*v).to_le_bytes())),
        }
    }

    /// Decodes little-endian `bytes` of this type and appends the values to `into`. An incomplete
    /// element at the end is ignored.
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
    fn finite_values_that_would_become_infinite_are_found() {
        for float in FloatType::ALL {
            let is_f16 = float == FloatType::F16;
            assert_eq!(float.overflow(&[1.0, -65520.0, 2.0]), is_f16.then_some(65520.0));
            assert_eq!(float.overflow(&[65519.0, f32::INFINITY, f32::NAN]), None);
            assert_eq!(float.overflow(&[float.largest(), -float.largest()]), None);
            let is_narrow = float != FloatType::F32;
            assert_eq!(float.overflow(&[f32::MAX, f32::NAN]), is_narrow.then_some(f32::MAX));
        }
        assert_eq!(FloatType::F16.largest(), 65504.0);
        // The last value that rounds down is half a step of 2^120 above the largest finite value.
        let step = 2_f32.powi(120);
        assert_eq!(FloatType::Bf16.overflow(&[FloatType::Bf16.largest() + 0.499 * step]), None);
        assert!(FloatType::Bf16.overflow(&[FloatType::Bf16.largest() + 0.5 * step]).is_some());
    }

    #[test]
    fn only_float_types_of_weights_convert() {
        for element in ElementType::ALL {
            match FloatType::try_from(element) {
                Ok(float) => assert!(element.is_trainable() && float.element() == element),
                Err(other) => assert!(!element.is_trainable() && other == element),
            }
        }
    }

    #[test]
    fn an_incomplete_element_at_the_end_is_ignored() {
        for float in FloatType::ALL {
            let (mut bytes, mut back) = (Vec::new(), vec![7.0]);
            float.encode(&[1.0, 2.0], &mut bytes);
            float.decode(&bytes[..bytes.len() - 1], &mut back);
            assert_eq!(back, [7.0, 1.0], "{float:?}");
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
