//! Conversion between f32 values and the bytes of tensors.
//!
//! Main functions: [`TensorType::encode`] and [`TensorType::decode`]. Each quantized type has a
//! file. The bytes equal the output of llama.cpp's reference quantizers without an importance
//! matrix (`quantize_row_*_ref` in
//! <https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-quants.c>), as compiled for
//! x86-64: each float operation rounds to f32, in the same order, and no multiply-add is fused.

mod packed_scales;
mod q4_0;
mod q4_k;
mod q5_0;
mod q5_k;
mod q6_k;
mod q8_0;
mod rounding;
mod scale_search;
mod sub_blocks;

use half::{bf16, f16};
use rayon::prelude::*;

use crate::TensorType;

/// The number of elements that a task converts at once: a multiple of all block lengths, and enough
/// that starting a task costs little.
const TASK_LEN: usize = 1 << 14;

/// A value that a tensor type cannot store.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum EncodeError {
    /// The number of values is not a multiple of the block length.
    #[error("{len} values; {tensor_type} needs a multiple of {}", tensor_type.block_len())]
    Len {
        /// The number of values.
        len: usize,
        /// The type.
        tensor_type: TensorType,
    },
    /// A value is NaN or infinite.
    #[error("element {index} is {value}; weights must be finite")]
    NotFinite {
        /// The index of the value.
        index: usize,
        /// The value.
        value: f32,
    },
    /// The value, or the f16 scale of its block, would become infinite.
    #[error(
        "an element from {index} to {} is too large for {tensor_type}, up to {largest:e} in magnitude; use {}",
        index + tensor_type.block_len() - 1,
        // bf16 has the range of f32, except for its largest values.
        if *tensor_type == TensorType::Bf16 { "f32" } else { "bf16" }
    )]
    Overflow {
        /// The index of the first value of the block.
        index: usize,
        /// The largest magnitude in the block.
        largest: f32,
        /// The type.
        tensor_type: TensorType,
    },
}

impl EncodeError {
    /// Returns the error with an index that counts from `start` values earlier.
    pub(crate) fn shifted(mut self, start: usize) -> Self {
        if let Self::NotFinite { index, .. } | Self::Overflow { index, .. } = &mut self {
            *index += start;
        }
        self
    }
}

impl TensorType {
    /// Encodes `values`, which are whole blocks, and appends the bytes to `into`. Runs on the
    /// threads of rayon's pool; the bytes do not depend on their number.
    ///
    /// # Errors
    /// Returns an error if the number of values is not a multiple of the block length, if a value
    /// is NaN or infinite, or if a value or a scale is too large for its 16 bits. `into` then keeps
    /// its length.
    pub fn encode(self, values: &[f32], into: &mut Vec<u8>) -> Result<(), EncodeError> {
        if !values.len().is_multiple_of(self.block_len()) {
            return Err(EncodeError::Len { len: values.len(), tensor_type: self });
        }
        let start = into.len();
        // Resized once, so that each task writes to its part of the final buffer.
        into.resize(start + values.len() / self.block_len() * self.block_size(), 0);
        let task_bytes = TASK_LEN / self.block_len() * self.block_size();
        let tasks = values.par_chunks(TASK_LEN).zip(into[start..].par_chunks_mut(task_bytes));
        // The first error, so that the message does not depend on the threads.
        let error = tasks.enumerate().find_map_first(|(task, (values, bytes))| {
            let result = self.encode_task(values, bytes);
            result.err().map(|error| error.shifted(task * TASK_LEN))
        });
        match error {
            None => Ok(()),
            Some(error) => {
                into.truncate(start);
                Err(error)
            }
        }
    }

    /// Decodes `bytes` and appends the values to `into`. An incomplete block at the end is ignored.
    /// Runs on the threads of rayon's pool.
    ///
    /// The values equal llama.cpp's `dequantize_row_*`. Malformed bytes may decode to NaN or
    /// infinity.
    pub fn decode(self, bytes: &[u8], into: &mut Vec<f32>) {
        let num_blocks = bytes.len() / self.block_size();
        let start = into.len();
        into.resize(start + num_blocks * self.block_len(), 0.0);
        // Tasks begin at whole blocks on both sides, because their length is a multiple of all
        // block lengths.
        let task_bytes = TASK_LEN / self.block_len() * self.block_size();
        // The incomplete block is cut off here, so that no decoder sees it.
        let bytes = &bytes[..num_blocks * self.block_size()];
        let tasks = bytes.par_chunks(task_bytes).zip(into[start..].par_chunks_mut(TASK_LEN));
        tasks.for_each(|(bytes, values)| match self {
            Self::F32 => decode_blocks(bytes, values, |it, [value]: &mut [f32; 1]| {
                *value = f32::from_le_bytes(*it)
            }),
            Self::F16 => decode_blocks(bytes, values, |it, [value]: &mut [f32; 1]| {
                *value = f16::from_le_bytes(*it).to_f32();
            }),
            Self::Bf16 => decode_blocks(bytes, values, |it, [value]: &mut [f32; 1]| {
                *value = bf16::from_le_bytes(*it).to_f32();
            }),
            Self::Q4_0 => decode_blocks(bytes, values, q4_0::decode),
            Self::Q5_0 => decode_blocks(bytes, values, q5_0::decode),
            Self::Q8_0 => decode_blocks(bytes, values, q8_0::decode),
            Self::Q4K => decode_blocks(bytes, values, q4_k::decode),
            Self::Q5K => decode_blocks(bytes, values, q5_k::decode),
            Self::Q6K => decode_blocks(bytes, values, q6_k::decode),
        });
    }

    /// Encodes the blocks of a task and checks the result.
    fn encode_task(self, values: &[f32], bytes: &mut [u8]) -> Result<(), EncodeError> {
        // Checked first, because the quantizers would turn NaN into arbitrary levels.
        if let Some(index) = values.iter().position(|value| !value.is_finite()) {
            return Err(EncodeError::NotFinite { index, value: values[index] });
        }
        match self {
            Self::F32 => {
                encode_blocks(values, bytes, |[it]: &[f32; 1], bytes| *bytes = it.to_le_bytes())
            }
            Self::F16 => encode_blocks(values, bytes, |[it]: &[f32; 1], bytes| {
                *bytes = f16::from_f32(*it).to_le_bytes();
            }),
            Self::Bf16 => encode_blocks(values, bytes, |[it]: &[f32; 1], bytes| {
                *bytes = bf16::from_f32(*it).to_le_bytes();
            }),
            Self::Q4_0 => encode_blocks(values, bytes, q4_0::encode),
            Self::Q5_0 => encode_blocks(values, bytes, q5_0::encode),
            Self::Q8_0 => encode_blocks(values, bytes, q8_0::encode),
            Self::Q4K => encode_blocks(values, bytes, q4_k::encode),
            Self::Q5K => encode_blocks(values, bytes, q5_k::encode),
            Self::Q6K => encode_blocks(values, bytes, q6_k::encode),
        }
        let mut blocks = bytes.chunks_exact(self.block_size());
        // Finite values may still overflow when they or their scale are rounded to 16 bits.
        let Some(block) = blocks.position(|block| !self.is_finite(block)) else { return Ok(()) };
        let index = block * self.block_len();
        let largest = values[index..index + self.block_len()].iter().map(|value| value.abs());
        Err(EncodeError::Overflow {
            index,
            largest: largest.fold(0.0, f32::max),
            tensor_type: self,
        })
    }

    /// Returns whether the float or the scales of an encoded block are finite.
    fn is_finite(self, block: &[u8]) -> bool {
        let half = |at: usize| f16_at(block, at).is_finite();
        match self {
            // The values themselves were checked before.
            Self::F32 => true,
            Self::F16 | Self::Q4_0 | Self::Q5_0 | Self::Q8_0 => half(0),
            Self::Bf16 => bf16::from_le_bytes([block[0], block[1]]).is_finite(),
            Self::Q4K | Self::Q5K => half(0) && half(2),
            Self::Q6K => half(q6_k::SCALE_AT),
        }
    }
}

/// Encodes blocks with `encode`. Floats have blocks of one value, and are rounded to nearest, ties
/// to even.
fn encode_blocks<const LEN: usize, const SIZE: usize>(
    values: &[f32],
    bytes: &mut [u8],
    encode: impl Fn(&[f32; LEN], &mut [u8; SIZE]),
) {
    let blocks = values.as_chunks().0.iter().zip(bytes.as_chunks_mut().0);
    blocks.for_each(|(values, bytes)| encode(values, bytes));
}

/// Decodes blocks with `decode`.
fn decode_blocks<const LEN: usize, const SIZE: usize>(
    bytes: &[u8],
    values: &mut [f32],
    decode: impl Fn(&[u8; SIZE], &mut [f32; LEN]),
) {
    let blocks = bytes.as_chunks().0.iter().zip(values.as_chunks_mut().0);
    blocks.for_each(|(bytes, values)| decode(bytes, values));
}

/// Returns the f16 at `at`, which must be in `bytes`.
fn f16_at(bytes: &[u8], at: usize) -> f16 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]])
}

#[cfg(test)]
mod tests;
