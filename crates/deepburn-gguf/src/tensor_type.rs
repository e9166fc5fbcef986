//! The element types of tensors.

use std::fmt;

/// The element type of a tensor: a float type, or a type that stores blocks of quantized values.
///
/// Numbers, block lengths and block sizes are `ggml_type` and the `block_*` structures in
/// <https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-common.h>.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TensorType {
    /// Single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// 4 bits and one f16 scale per 32 elements.
    Q4_0,
    /// 5 bits and one f16 scale per 32 elements.
    Q5_0,
    /// 8 bits and one f16 scale per 32 elements.
    Q8_0,
    /// 4 bits; 256 elements share two f16 scales, 32 elements a 6-bit scale and a 6-bit minimum.
    Q4K,
    /// 5 bits with the scales of [`Q4K`](Self::Q4K).
    Q5K,
    /// 6 bits; 256 elements share an f16 scale, 16 elements an 8-bit scale.
    Q6K,
}

impl TensorType {
    /// All types that this crate reads and writes.
    pub const ALL: [Self; 9] = [
        Self::F32,
        Self::F16,
        Self::Bf16,
        Self::Q4_0,
        Self::Q5_0,
        Self::Q8_0,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
    ];

    /// Returns the name, the number in files, and the elements and bytes of a block.
    const fn row(self) -> (&'static str, u32, usize, usize) {
        match self {
            Self::F32 => ("f32", 0, 1, 4),
            Self::F16 => ("f16", 1, 1, 2),
            Self::Bf16 => ("bf16", 30, 1, 2),
            Self::Q4_0 => ("q4_0", 2, 32, 18),
            Self::Q5_0 => ("q5_0", 6, 32, 22),
            Self::Q8_0 => ("q8_0", 8, 32, 34),
            Self::Q4K => ("q4_k", 12, 256, 144),
            Self::Q5K => ("q5_k", 13, 256, 176),
            Self::Q6K => ("q6_k", 14, 256, 210),
        }
    }

    /// Returns the number of the type in files.
    #[must_use]
    pub const fn id(self) -> u32 {
        self.row().1
    }

    /// Returns the type with a number, or `None` for a type that this crate does not support.
    #[must_use]
    pub fn from_id(id: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|it| it.id() == id)
    }

    /// Returns the number of elements of a block. The length of a row must be a multiple of it.
    #[must_use]
    pub const fn block_len(self) -> usize {
        self.row().2
    }

    /// Returns the size of a block in bytes.
    #[must_use]
    pub const fn block_size(self) -> usize {
        self.row().3
    }

    /// Returns whether the type stores blocks of quantized values.
    #[must_use]
    pub const fn is_quantized(self) -> bool {
        self.block_len() > 1
    }

    /// Returns the size of `numel` elements in bytes. Returns `None` if `numel` is not a multiple
    /// of the block length, or if the size exceeds a `u64`.
    #[must_use]
    pub fn size_of(self, numel: u64) -> Option<u64> {
        let len = self.block_len() as u64;
        if !numel.is_multiple_of(len) {
            return None;
        }
        (numel / len).checked_mul(self.block_size() as u64)
    }

    /// Returns the name in lower case, as llama.cpp prints it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        self.row().0
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_unique_and_found() {
        for tensor_type in TensorType::ALL {
            assert_eq!(TensorType::from_id(tensor_type.id()), Some(tensor_type));
        }
        // Q4_1, and a number that no type has.
        assert_eq!(TensorType::from_id(3), None);
        assert_eq!(TensorType::from_id(u32::MAX), None);
    }

    #[test]
    fn sizes_are_whole_blocks() {
        assert_eq!(TensorType::Q8_0.size_of(64), Some(68));
        assert_eq!(TensorType::Q8_0.size_of(63), None);
        assert_eq!(TensorType::F32.size_of(u64::MAX), None);
    }
}
