//! Matrices whose rows are stored in the formats of GGUF files, and their products with one vector.
//!
//! Main types: [`RowEncoding`] and [`EncodedRows`]. Such a product generates a token, so it reads
//! every code once and should be as fast as memory. The blocks of a file have a scale before their
//! codes. In memory, codes and scales are apart, so that codes are aligned and several scales are
//! converted at once:
//!
//! ```text
//! file       | scale, 32 codes | scale, 32 codes | ...
//! memory     | 32 codes | 32 codes | ...                            | scales |        words of 32 bits
//! vector     | x 0..32 | x 32..64 | ...                             in 16 bits, with a scale for each block
//! sum        + (codes . x) * (scale of codes * scale of x) + ...    integers inside a block, f32 between blocks
//! ```
//!
//! The vector keeps 16 bits, where llama.cpp rounds it to 8: its error is at most 2^-16 of the
//! largest element of 32. Formats without blocks are multiplied in f32. Each element has the same
//! bits for every number of threads. Results of instruction sets may differ, because they add in
//! lanes of different numbers.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod block_vector;
mod dot_blocks;
mod dot_floats;
mod lanes;
#[cfg(target_arch = "x86_64")]
mod nibbles;

use std::borrow::Cow;

use half::{bf16, f16};
use rayon::prelude::*;

use super::decode_blocks;
use crate::Instructions;
use crate::blocks::vectorized;
use crate::element::Element;
use block_vector::BlockVector;
use dot_blocks::dot_blocks;
use dot_floats::dot_floats;

/// The number of elements of a block.
const BLOCK: usize = 32;
/// The bytes of a scale, which is an f16.
const SCALE: usize = 2;

/// The number of multiplications below which distributing the rows over threads costs more than it
/// saves.
const WORTH_THREADS: usize = 1 << 17;
/// The number of rows that a thread takes at a time, at least.
const ROWS_AT_A_TIME: usize = 64;

/// The format of the elements of a row. Blocks and their values are defined by llama.cpp
/// (`ggml-common.h` and `dequantize_row_*` in `ggml-quants.c`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RowEncoding {
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// Blocks of 32 elements: a scale in f16 and 32 signed bytes.
    Q8_0,
    /// Blocks of 32 elements: a scale in f16 and 4 bits for each element. The low bits of byte `i`
    /// belong to element `i`, the high ones to element `16 + i`, and 8 stands for zero.
    Q4_0,
}

impl RowEncoding {
    /// Returns the number of elements of which the length of a row must be a multiple.
    pub const fn block_len(self) -> usize {
        match self {
            Self::F16 | Self::Bf16 => 1,
            Self::Q8_0 | Self::Q4_0 => BLOCK,
        }
    }

    /// Returns the number of bytes of `numel` elements, which are whole blocks.
    pub const fn num_bytes(self, numel: usize) -> usize {
        self.code_bytes(numel) + self.scales(numel) * SCALE
    }

    /// Returns the number of scales.
    const fn scales(self, numel: usize) -> usize {
        match self {
            Self::F16 | Self::Bf16 => 0,
            Self::Q8_0 | Self::Q4_0 => numel / BLOCK,
        }
    }

    /// Returns the number of bytes of the codes, without scales.
    const fn code_bytes(self, numel: usize) -> usize {
        match self {
            Self::F16 | Self::Bf16 => 2 * numel,
            Self::Q8_0 => numel,
            Self::Q4_0 => numel / 2,
        }
    }

    /// Returns the number of 32-bit words that hold `numel` elements.
    pub const fn words(self, numel: usize) -> usize {
        self.num_bytes(numel).div_ceil(size_of::<u32>())
    }

    /// Returns the words of the elements that a file has in `blocks`. An incomplete block at the
    /// end is ignored.
    pub fn words_of(self, blocks: &[u8]) -> Vec<u32> {
        let codes = self.code_bytes(BLOCK);
        let bytes = match self {
            Self::F16 | Self::Bf16 => Cow::Borrowed(blocks),
            Self::Q8_0 | Self::Q4_0 => {
                let each = || blocks.chunks_exact(SCALE + codes);
                let mut bytes = Vec::with_capacity(blocks.len());
                each().for_each(|block| bytes.extend_from_slice(&block[SCALE..]));
                each().for_each(|block| bytes.extend_from_slice(&block[..SCALE]));
                Cow::Owned(bytes)
            }
        };
        let (whole, rest) = bytes.as_chunks::<4>();
        let last = (!rest.is_empty())
            .then(|| std::array::from_fn::<u8, 4, _>(|i| rest.get(i).copied().unwrap_or_default()));
        whole.iter().chain(&last).map(|word| u32::from_le_bytes(*word)).collect()
    }
}

/// A matrix in host memory whose rows are encoded.
#[derive(Debug, Clone, Copy)]
pub struct EncodedRows<'a> {
    format: RowEncoding,
    rows: usize,
    depth: usize,
    codes: &'a [u8],
    scales: &'a [[u8; SCALE]],
}

impl<'a> EncodedRows<'a> {
    /// Returns a matrix of `[rows, depth]` elements. [`RowEncoding::words_of`] returns the `bytes`.
    ///
    /// # Panics
    /// Panics if a row is not a number of whole blocks, or if there are not enough bytes.
    pub fn new(format: RowEncoding, [rows, depth]: [usize; 2], bytes: &'a [u8]) -> Self {
        assert!(depth.is_multiple_of(format.block_len()), "{depth} elements of a row in blocks");
        let numel = rows * depth;
        let (codes, scales) = bytes[..format.num_bytes(numel)].split_at(format.code_bytes(numel));
        Self { format, rows, depth, codes, scales: scales.as_chunks().0 }
    }

    /// Returns the number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Writes the product with the vector `x`, plus `bias`, to `out`: one element for each row.
    /// Uses the threads of the current rayon pool.
    ///
    /// # Panics
    /// Panics if a length is not the one of a row or of a column.
    pub fn multiply(&self, x: &[f32], bias: Option<&[f32]>, out: &mut [f32]) {
        self.multiply_with(Instructions::in_use(), x, bias, out);
    }

    fn multiply_with(
        &self,
        instructions: Instructions,
        x: &[f32],
        bias: Option<&[f32]>,
        out: &mut [f32],
    ) {
        assert_eq!([x.len(), out.len()], [self.depth, self.rows], "elements of rows and columns");
        assert!(bias.is_none_or(|bias| bias.len() == self.rows), "elements of the bias");
        let vector = match self.format {
            RowEncoding::F16 | RowEncoding::Bf16 => Vector::Floats(x),
            RowEncoding::Q8_0 | RowEncoding::Q4_0 => {
                Vector::Blocks(BlockVector::new(self.format, x))
            }
        };
        let is_large = self.rows * self.depth >= WORTH_THREADS;
        // Several tasks for each thread, so that none waits long for another.
        let tasks = if is_large { 4 * rayon::current_num_threads() } else { 1 };
        let size = self.rows.div_ceil(tasks).max(ROWS_AT_A_TIME);
        let task = |(index, out): (usize, &mut [f32])| {
            let rows = self.part(index * size, out.len());
            match &vector {
                Vector::Floats(x) => dot_floats(instructions, rows, x, out),
                Vector::Blocks(x) => dot_blocks(instructions, rows, x, out),
            }
            if let Some(bias) = bias {
                out.iter_mut().zip(&bias[index * size..]).for_each(|(sum, bias)| *sum += bias);
            }
        };
        match is_large {
            true => out.par_chunks_mut(size).enumerate().for_each(task),
            false => out.chunks_mut(size).enumerate().for_each(task),
        }
    }

    /// Returns `rows` rows from `first` on.
    fn part(&self, first: usize, rows: usize) -> Self {
        let bytes = self.format.code_bytes(self.depth);
        let codes = &self.codes[first * bytes..][..rows * bytes];
        let scales = self.format.scales(self.depth);
        let scales = &self.scales[first * scales..][..rows * scales];
        Self { rows, codes, scales, ..*self }
    }

    /// Decodes the elements from `start` on, in row-major order, to `out`. Each element is rounded
    /// once.
    ///
    /// # Panics
    /// Panics if the range reaches beyond the end.
    pub fn decode<E: Element>(&self, start: usize, out: &mut [E]) {
        assert!(start + out.len() <= self.rows * self.depth, "elements of the matrix");
        vectorized!(match self.format {
            RowEncoding::F16 => {
                decode_16(self.codes, start, out, |bytes| f16::from_le_bytes(bytes).widen());
            }
            RowEncoding::Bf16 => {
                decode_16(self.codes, start, out, |bytes| bf16::from_le_bytes(bytes).widen());
            }
            RowEncoding::Q8_0 | RowEncoding::Q4_0 => decode_blocks(
                start,
                out,
                #[inline(always)]
                |block, out: &mut [E; BLOCK]| E::narrow_all(&self.block(block), out),
            ),
        });
    }

    /// Returns the elements of a block.
    #[inline(always)]
    fn block(&self, block: usize) -> [f32; BLOCK] {
        let scale = f16::from_le_bytes(self.scales[block]).widen();
        self.numbers(block).map(|number| scale * f32::from(number))
    }

    /// Returns the numbers of a block without its scale. Rows are whole blocks, so blocks are
    /// numbered over the whole matrix.
    #[inline(always)]
    fn numbers(&self, block: usize) -> [i8; BLOCK] {
        let size = self.format.code_bytes(BLOCK);
        let codes = &self.codes[block * size..][..size];
        let mut numbers = [0; BLOCK];
        if self.format == RowEncoding::Q4_0 {
            let (low, high) = numbers.split_at_mut(BLOCK / 2);
            for ((low, high), code) in low.iter_mut().zip(high).zip(codes) {
                *low = (code & 15) as i8 - 8;
                *high = (code >> 4) as i8 - 8;
            }
        } else {
            for (number, code) in numbers.iter_mut().zip(codes) {
                *number = *code as i8;
            }
        }
        numbers
    }
}

/// The vector of a product.
enum Vector<'a> {
    /// For formats without blocks.
    Floats(&'a [f32]),
    /// For formats with blocks.
    Blocks(BlockVector),
}

/// Decodes 16-bit numbers from `start` on.
#[inline(always)]
fn decode_16<E: Element>(
    bytes: &[u8],
    start: usize,
    out: &mut [E],
    number: impl Fn([u8; 2]) -> f32,
) {
    let pairs = &bytes.as_chunks::<2>().0[start..];
    for (out, pair) in out.iter_mut().zip(pairs) {
        *out = E::narrow(number(*pair));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::noise;
    use proptest::prelude::*;

    const FORMATS: [RowEncoding; 4] =
        [RowEncoding::F16, RowEncoding::Bf16, RowEncoding::Q8_0, RowEncoding::Q4_0];

    /// Returns the levels whose kernels differ, up to the one in use.
    fn available() -> impl Iterator<Item = Instructions> {
        let levels = [Instructions::Portable, Instructions::Avx2, Instructions::Avx512Vnni];
        levels.into_iter().filter(|level| *level <= Instructions::in_use())
    }

    /// Returns the words of blocks as bytes.
    fn in_memory(format: RowEncoding, blocks: &[u8]) -> Vec<u8> {
        format.words_of(blocks).into_iter().flat_map(u32::to_le_bytes).collect()
    }

    /// Returns blocks of a matrix with random codes and scales between 1/4096 and 1.
    fn random(format: RowEncoding, numel: usize, seed: u64) -> Vec<u8> {
        let bits = |value: f32| f16::from_f32(value.abs().clamp(1.0 / 4096.0, 1.0)).to_bits();
        let values = noise(numel, seed);
        let mut bytes = Vec::new();
        match format {
            RowEncoding::F16 => values.iter().for_each(|it| {
                bytes.extend(f16::from_f32(*it).to_bits().to_le_bytes());
            }),
            RowEncoding::Bf16 => values.iter().for_each(|it| {
                bytes.extend(bf16::from_f32(*it).to_bits().to_le_bytes());
            }),
            RowEncoding::Q8_0 | RowEncoding::Q4_0 => {
                for block in values.chunks_exact(BLOCK) {
                    bytes.extend(bits(block[0]).to_le_bytes());
                    let codes = block.iter().map(|value| value.to_bits().to_le_bytes()[0]);
                    bytes.extend(codes.take(format.code_bytes(BLOCK)));
                }
            }
        }
        bytes
    }

    /// Returns an element by the definition of its format.
    fn element(format: RowEncoding, bytes: &[u8], index: usize) -> f64 {
        let half = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let (block, place) = (index / BLOCK, index % BLOCK);
        match format {
            RowEncoding::F16 => f16::from_bits(half(2 * index)).to_f64(),
            RowEncoding::Bf16 => bf16::from_bits(half(2 * index)).to_f64(),
            RowEncoding::Q8_0 => {
                let at = block * 34;
                f16::from_bits(half(at)).to_f64() * f64::from(bytes[at + 2 + place] as i8)
            }
            RowEncoding::Q4_0 => {
                let at = block * 18;
                let code = bytes[at + 2 + place % 16] >> (4 * (place / 16)) & 15;
                f16::from_bits(half(at)).to_f64() * (f64::from(code) - 8.0)
            }
        }
    }

    fn check(format: RowEncoding, rows: usize, blocks: usize, seed: u64) {
        let depth = blocks * format.block_len().max(5);
        let bytes = random(format, rows * depth, seed);
        let own = in_memory(format, &bytes);
        let matrix = EncodedRows::new(format, [rows, depth], &own);
        let (x, bias) = (noise(depth, seed + 1), noise(rows, seed + 2));
        let mut out = vec![0.0; rows];
        matrix.multiply(&x, Some(&bias), &mut out);
        let largest = x.iter().fold(0.0_f64, |largest, x| largest.max(f64::from(x.abs())));
        let mut results = vec![out];
        for instructions in available() {
            let mut out = vec![0.0; rows];
            matrix.multiply_with(instructions, &x, Some(&bias), &mut out);
            results.push(out);
        }
        for (out, row) in results.iter().flat_map(|out| (0..rows).map(move |row| (out, row))) {
            let of_row = || (0..depth).map(|i| element(format, &bytes, row * depth + i));
            let terms = of_row().zip(&x).map(|(element, x)| element * f64::from(*x));
            let (sum, size) = terms.fold((0.0, 0.0), |(sum, size), it| (sum + it, size + it.abs()));
            let expected = sum + f64::from(bias[row]);
            // Four roundings of each term, and at most depth / 16 + 8 additions of it and of the
            // rest.
            let rounding = (size + 1.0) * (depth / 16 + 28) as f64 * f64::from(f32::EPSILON);
            // Half a unit of each element of the vector.
            let unit = if format.block_len() > 1 { largest / 32767.0 } else { 0.0 };
            let bound = rounding + unit / 2.0 * of_row().map(f64::abs).sum::<f64>();
            let error = (f64::from(out[row]) - expected).abs();
            assert!(error <= bound, "{format:?} [{rows}, {depth}] row {row}: {error} of {bound}");
        }
        let start = seed as usize % (rows * depth + 1);
        let mut decoded = vec![9.0_f32; rows * depth - start];
        matrix.decode(start, &mut decoded);
        for (i, value) in decoded.iter().enumerate() {
            assert_eq!(f64::from(*value), element(format, &bytes, start + i), "{format:?} {i}");
        }
    }

    #[test]
    fn large_products_are_divided_over_threads() {
        FORMATS.into_iter().for_each(|format| check(format, 700, 30, 3));
    }

    #[test]
    fn a_scale_that_is_not_finite_spreads_to_its_row_alone() {
        let mut bytes = random(RowEncoding::Q8_0, 3 * 64, 1);
        bytes[2 * 34..][..2].copy_from_slice(&f16::NAN.to_bits().to_le_bytes());
        let mut out = [0.0; 3];
        let own = in_memory(RowEncoding::Q8_0, &bytes);
        let matrix = EncodedRows::new(RowEncoding::Q8_0, [3, 64], &own);
        matrix.multiply(&[0.5; 64], None, &mut out);
        assert_eq!(out.map(f32::is_nan), [false, true, false]);
    }

    #[test]
    fn a_vector_that_is_not_finite_makes_all_sums_nan() {
        for format in FORMATS {
            let own = in_memory(format, &random(format, 3 * 64, 1));
            let matrix = EncodedRows::new(format, [3, 64], &own);
            let mut x = [0.5; 64];
            x[40] = f32::NAN;
            for instructions in available() {
                let mut out = [0.0; 3];
                matrix.multiply_with(instructions, &x, None, &mut out);
                assert_eq!(out.map(f32::is_nan), [true; 3], "{format:?} {instructions:?}");
            }
        }
    }

    /// Prints how fast the products of a token read the matrices of a model of GPT-2's sizes.
    #[test]
    #[ignore = "measures times, for an idle machine"]
    fn times_of_products() {
        let layer = [[2304, 768], [768, 768], [3072, 768], [768, 3072]];
        let sizes = [[[50257, 768]].as_slice(), &layer.repeat(12)].concat();
        for format in [RowEncoding::Bf16, RowEncoding::Q8_0, RowEncoding::Q4_0] {
            let encoded: Vec<Vec<u8>> =
                sizes.iter().map(|size| vec![17; format.num_bytes(size[0] * size[1])]).collect();
            let bytes: usize = encoded.iter().map(Vec::len).sum();
            let times: Vec<_> = (0..20)
                .map(|_| {
                    let start = std::time::Instant::now();
                    for (size, encoded) in sizes.iter().zip(&encoded) {
                        let rows = EncodedRows::new(format, *size, encoded);
                        rows.multiply(&vec![0.5; size[1]], None, &mut vec![0.0; size[0]]);
                    }
                    start.elapsed().as_secs_f64()
                })
                .collect();
            let best = times.into_iter().fold(f64::INFINITY, f64::min);
            let rate = bytes as f64 / best / 1e9;
            println!("{format:?}: {:.2} ms for a token, {rate:.1} GB/s", best * 1e3);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn products_of_any_shape(rows in 0_usize..40, blocks in 0_usize..9, seed: u32) {
            FORMATS.into_iter().for_each(|format| check(format, rows, blocks, seed.into()));
        }
    }
}
