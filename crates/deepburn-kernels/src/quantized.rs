//! Frozen matrices in 8 or 4 bits: blocks of 64 elements with one scale each.
//!
//! Main types: [`BlockFormat`], which encodes, and [`QuantizedSlice`], which decodes any range of
//! elements. [`rows`] has the formats of GGUF files. [`Encoding`] is one of either kind.
//!
//! ```text
//! elements   | 64 elements | 64 elements | ...           in flat order
//! element    = code * scale of its block                 rounded once, to the type of the result
//! scale      = largest magnitude of the block            (for 8 bits, divided by 127)
//! words      | codes of all blocks | scales |            32-bit words, little-endian
//! ```
//!
//! The 4-bit format is NF4 of QLoRA (Dettmers et al. 2023, appendix E), as bitsandbytes stores it:
//! the same values, the same blocks, and the same order of codes in a byte. Scales are f32, or in 8
//! bits (`double`, [`scales`]). The 8-bit format has 255 evenly spaced levels. It is not
//! LLM.int8(): activations are not quantized.
//!
//! The last block may be shorter; its missing elements have the code of 0. A block with an element
//! that is not finite has a scale of NaN, so that all of its elements become NaN: quantization
//! never hides such an element.
//!
//! Elements that were decoded in f32 and encoded again decode to the same elements, up to the
//! rounding of scales.

mod nf4;
mod rows;
mod scales;

use rayon::prelude::*;

use crate::blocks::vectorized;
use crate::element::Element;
use scales::BlockScales;

pub use rows::{EncodedRows, RowEncoding};

/// The number of elements that share a scale.
pub const QUANTIZED_BLOCK: usize = 64;

/// The number of blocks that a thread encodes or decodes at a time.
const BLOCKS_AT_A_TIME: usize = 256;

/// A format of quantized elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BlockFormat {
    /// 4-bit NormalFloat. With `double`, scales take 8 bits instead of 32.
    Nf4 {
        /// Whether the scales are quantized too.
        double: bool,
    },
    /// 8-bit integers from -127 to 127.
    Int8,
}

impl BlockFormat {
    /// Returns the number of 32-bit words that store `numel` elements.
    pub fn words(self, numel: usize) -> usize {
        self.code_words(numel) + BlockScales::words(self.has_quantized_scales(), blocks(numel))
    }

    /// Returns the number of words of the codes, which come first.
    fn code_words(self, numel: usize) -> usize {
        blocks(numel) * self.words_per_block()
    }

    /// Returns the number of words of the codes of a block.
    fn words_per_block(self) -> usize {
        match self {
            Self::Nf4 { .. } => QUANTIZED_BLOCK / 8,
            Self::Int8 => QUANTIZED_BLOCK / 4,
        }
    }

    fn has_quantized_scales(self) -> bool {
        self == Self::Nf4 { double: true }
    }

    /// Encodes values. Uses all threads of the current rayon pool; the result does not depend on
    /// their number.
    pub fn encode(self, values: &[f32]) -> Vec<u32> {
        let mut words = vec![0; self.words(values.len())];
        let (codes, scale_words) = words.split_at_mut(self.code_words(values.len()));
        let mut scales = vec![0.0; blocks(values.len())];
        let parts = codes.par_chunks_mut(BLOCKS_AT_A_TIME * self.words_per_block());
        let values = values.par_chunks(BLOCKS_AT_A_TIME * QUANTIZED_BLOCK);
        parts.zip(values).zip(scales.par_chunks_mut(BLOCKS_AT_A_TIME)).for_each(
            |((codes, values), scales)| vectorized!(self.encode_blocks(values, codes, scales)),
        );
        BlockScales::store(self.has_quantized_scales(), &scales, scale_words);
        words
    }

    /// Encodes adjacent blocks; inlined, so that it is compiled for each instruction set.
    #[inline(always)]
    fn encode_blocks(self, values: &[f32], codes: &mut [u32], scales: &mut [f32]) {
        let codes = codes.chunks_exact_mut(self.words_per_block());
        for ((values, words), scale) in values.chunks(QUANTIZED_BLOCK).zip(codes).zip(scales) {
            let mut block = [0.0; QUANTIZED_BLOCK];
            block[..values.len()].copy_from_slice(values);
            *scale = match self {
                Self::Nf4 { .. } => nf4::encode(&block, words),
                Self::Int8 => encode_int8(&block, words),
            };
        }
    }
}

/// How the elements of a matrix are encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Encoding {
    /// In flat order.
    Flat(BlockFormat),
    /// Row by row.
    ByRow(RowEncoding),
}

impl Encoding {
    /// Returns the number of 32-bit words that hold `numel` elements.
    pub fn words(self, numel: usize) -> usize {
        match self {
            Self::Flat(format) => format.words(numel),
            Self::ByRow(format) => format.words(numel),
        }
    }
}

impl From<BlockFormat> for Encoding {
    fn from(format: BlockFormat) -> Self {
        Self::Flat(format)
    }
}

impl From<RowEncoding> for Encoding {
    fn from(format: RowEncoding) -> Self {
        Self::ByRow(format)
    }
}

/// An encoded matrix in host memory.
#[derive(Debug, Clone, Copy)]
pub enum EncodedSlice<'a> {
    /// In flat order.
    Flat(QuantizedSlice<'a>),
    /// Row by row.
    ByRow(EncodedRows<'a>),
}

impl EncodedSlice<'_> {
    /// Decodes the elements from `start` on, in row-major order, to `out`. Each element is rounded
    /// once.
    ///
    /// # Panics
    /// Panics if the range reaches beyond the end.
    pub fn decode<E: Element>(&self, start: usize, out: &mut [E]) {
        match self {
            Self::Flat(slice) => slice.decode(start, out),
            Self::ByRow(rows) => rows.decode(start, out),
        }
    }
}

/// Encoded elements.
#[derive(Debug, Clone, Copy)]
pub struct QuantizedSlice<'a> {
    format: BlockFormat,
    numel: usize,
    codes: &'a [u32],
    scales: BlockScales<'a>,
}

impl<'a> QuantizedSlice<'a> {
    /// Returns the elements that [`BlockFormat::encode`] has encoded.
    ///
    /// # Panics
    /// Panics if the number of words is not the one of `numel` elements.
    pub fn new(format: BlockFormat, numel: usize, words: &'a [u32]) -> Self {
        assert_eq!(words.len(), format.words(numel), "words of {numel} elements");
        let (codes, scales) = words.split_at(format.code_words(numel));
        let scales = BlockScales::new(format.has_quantized_scales(), blocks(numel), scales);
        Self { format, numel, codes, scales }
    }

    /// Decodes the elements from `start` on to `out`, on the calling thread. Each element is
    /// rounded once.
    ///
    /// # Panics
    /// Panics if the range reaches beyond the end.
    pub fn decode<E: Element>(&self, start: usize, out: &mut [E]) {
        let range = start..start + out.len();
        assert!(range.end <= self.numel, "elements {range:?} of {}", self.numel);
        vectorized!(decode_blocks(
            start,
            out,
            #[inline(always)]
            |block, out| self.decode_block(block, out),
        ));
    }

    /// Decodes all elements of a block.
    #[inline(always)]
    fn decode_block<E: Element>(&self, block: usize, out: &mut [E; QUANTIZED_BLOCK]) {
        let per_block = self.format.words_per_block();
        let words = &self.codes[block * per_block..(block + 1) * per_block];
        let scale = self.scales.at(block);
        match self.format {
            BlockFormat::Nf4 { .. } => nf4::decode(words, scale, out),
            BlockFormat::Int8 => {
                for (word, out) in words.iter().zip(out.chunks_exact_mut(4)) {
                    for (out, code) in out.iter_mut().zip(word.to_le_bytes()) {
                        *out = E::narrow(f32::from(code as i8) * scale);
                    }
                }
            }
        }
    }
}

/// Returns the number of blocks of `numel` elements.
fn blocks(numel: usize) -> usize {
    numel.div_ceil(QUANTIZED_BLOCK)
}

/// Decodes the elements from `start` on to `out`, block by block. The first and the last block may
/// be cut. Inlined, so that it is compiled for each instruction set.
#[inline(always)]
fn decode_blocks<E: Element, const BLOCK: usize>(
    mut start: usize,
    mut out: &mut [E],
    decode: impl Fn(usize, &mut [E; BLOCK]),
) {
    while !out.is_empty() {
        let (block, first) = (start / BLOCK, start % BLOCK);
        let len = (BLOCK - first).min(out.len());
        let (part, rest) = out.split_at_mut(len);
        match <&mut [E; BLOCK]>::try_from(&mut *part) {
            Ok(whole) => decode(block, whole),
            Err(_) => {
                let mut whole = [E::narrow(0.0); BLOCK];
                decode(block, &mut whole);
                part.copy_from_slice(&whole[first..first + len]);
            }
        }
        (out, start) = (rest, start + len);
    }
}

/// Returns the largest magnitude; NaN if a value is not finite.
#[inline(always)]
fn largest(values: &[f32]) -> f32 {
    // The sum of x * 0 is NaN if any value is infinite or NaN, and 0 otherwise.
    let (mut largest, mut poison) = (0.0_f32, 0.0_f32);
    for value in values {
        largest = if value.abs() > largest { value.abs() } else { largest };
        poison += value * 0.0;
    }
    largest + poison
}

/// Encodes a block in 8 bits and returns its scale.
#[inline(always)]
fn encode_int8(block: &[f32; QUANTIZED_BLOCK], words: &mut [u32]) -> f32 {
    let largest = largest(block);
    let factor = if largest > 0.0 { 127.0 / f64::from(largest) } else { 0.0 };
    for (values, word) in block.chunks_exact(4).zip(words) {
        let mut bytes = [0; 4];
        for (byte, value) in bytes.iter_mut().zip(values) {
            *byte = (f64::from(*value) * factor).round_ties_even() as i8 as u8;
        }
        *word = u32::from_le_bytes(bytes);
    }
    largest / 127.0
}

#[cfg(test)]
mod tests;
