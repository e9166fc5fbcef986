//! What float type a checkpoint is saved in.
//!
//! Main type: [`SavedPrecision`].

use burn::tensor::{bf16, f16};
use safetensors::Dtype;

/// The float type of the tensors in a saved checkpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SavedPrecision {
    /// 32 bits: nothing is lost.
    #[default]
    F32,
    /// IEEE half precision; magnitudes above 65504 become infinite.
    F16,
    /// bfloat16.
    Bf16,
}

impl SavedPrecision {
    /// The name `transformers` gives the type in `config.json`.
    pub(crate) fn torch_name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::F16 => "float16",
            Self::Bf16 => "bfloat16",
        }
    }

    pub(crate) fn safetensors(self) -> Dtype {
        match self {
            Self::F32 => Dtype::F32,
            Self::F16 => Dtype::F16,
            Self::Bf16 => Dtype::BF16,
        }
    }

    /// Bytes an element takes.
    pub(crate) fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// Appends `values` in this type, little-endian, rounded to nearest.
    pub(crate) fn encode(self, values: &[f32], into: &mut Vec<u8>) {
        match self {
            Self::F32 => values.iter().for_each(|v| into.extend(v.to_le_bytes())),
            Self::F16 => values.iter().for_each(|v| into.extend(f16::from_f32(*v).to_le_bytes())),
            Self::Bf16 => values.iter().for_each(|v| into.extend(bf16::from_f32(*v).to_le_bytes())),
        }
    }

    /// Appends the values of little-endian `bytes` in this type to `into`; a ragged tail is left out.
    pub(crate) fn decode(self, bytes: &[u8], into: &mut Vec<f32>) {
        match self {
            Self::F32 => {
                into.extend(bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)));
            }
            Self::F16 => {
                into.extend(
                    bytes.as_chunks::<2>().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()),
                );
            }
            Self::Bf16 => {
                into.extend(
                    bytes.as_chunks::<2>().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()),
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encoding_reads_back() {
        // Exact in all three types.
        let values = [0.0, -0.0, 1.0, -2.5, 0.15625, 256.0];
        for precision in [SavedPrecision::F32, SavedPrecision::F16, SavedPrecision::Bf16] {
            let (mut bytes, mut back) = (Vec::new(), Vec::new());
            precision.encode(&values, &mut bytes);
            assert_eq!(bytes.len(), values.len() * precision.size());
            precision.decode(&bytes, &mut back);
            assert_eq!(back.map_bits(), values.to_vec().map_bits(), "{precision:?}");
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
