//! A vector in 16 bits, with a scale for each block, in the order in which instructions find the
//! codes of a matrix.
//!
//! Codes of 8 bits are multiplied in the order of the elements. Codes of 4 bits are read as numbers
//! of 16 bits, each of which has four of them. Plane `p` of the vector has those elements that are
//! multiplied by code `p` of each number, for all blocks:
//!
//! ```text
//! number i of a block     | code 2i | code 16 + 2i | code 2i + 1 | code 17 + 2i |
//! planes                    0         1              2             3
//! ```

use super::{BLOCK, RowEncoding};
use crate::blocks::vectorized;
use crate::quantized::largest;

/// The largest magnitude of a code.
const LARGEST: f32 = i16::MAX as f32;
/// The number of lanes in which a block of 4-bit codes is corrected.
pub(super) const CORRECTIONS: usize = 4;
/// The number of blocks of which a vector has a multiple, so that every instruction set loads whole
/// registers.
const PADDED: usize = 16;

/// A vector in 16 bits.
#[derive(Debug)]
pub(super) struct BlockVector {
    /// The number of blocks, without those that are added as padding.
    blocks: usize,
    /// The number of planes.
    planes: usize,
    /// The codes, plane after plane. Padding is 0.
    codes: Vec<i16>,
    /// The scale of each block. Padding is 0.
    scales: Vec<f32>,
    /// Minus 8 times the sum of the codes of each block, in parts. Codes of 4 bits are multiplied
    /// as they are stored, which is 8 too much.
    corrections: Vec<[i32; CORRECTIONS]>,
}

impl BlockVector {
    /// Encodes a vector of whole blocks for products with `format`. A block with an element that is
    /// not finite has a scale of NaN.
    pub(super) fn new(format: RowEncoding, x: &[f32]) -> Self {
        let (blocks, _) = x.as_chunks::<BLOCK>();
        let padded = blocks.len().next_multiple_of(PADDED);
        let mut vector = Self {
            blocks: blocks.len(),
            planes: if format == RowEncoding::Q4_0 { 4 } else { 1 },
            codes: vec![0; padded * BLOCK],
            scales: vec![0.0; padded],
            corrections: vec![[0; CORRECTIONS]; padded],
        };
        vectorized!(vector.fill(blocks));
        vector
    }

    /// Encodes all blocks; inlined, so that it is compiled for each instruction set. Loops, because
    /// closures of iterators may not be inlined, and the baseline rounds with a function call.
    #[inline(always)]
    fn fill(&mut self, blocks: &[[f32; BLOCK]]) {
        for (index, block) in blocks.iter().enumerate() {
            let (codes, scale) = encode(block);
            self.scales[index] = scale;
            for (lane, correction) in self.corrections[index].iter_mut().enumerate() {
                let own =
                    codes.as_chunks::<CORRECTIONS>().0.iter().map(|four| i32::from(four[lane]));
                *correction = -8 * own.sum::<i32>();
            }
            if self.planes == 4 {
                self.store_in_planes(index, &codes);
            } else {
                self.codes[index * BLOCK..][..BLOCK].copy_from_slice(&codes);
            }
        }
    }

    /// Stores the codes of a block in four planes.
    #[inline(always)]
    fn store_in_planes(&mut self, index: usize, codes: &[i16; BLOCK]) {
        let size = BLOCK / 4;
        for (plane, all) in self.codes.chunks_exact_mut(self.scales.len() * size).enumerate() {
            for (number, code) in all[index * size..][..size].iter_mut().enumerate() {
                *code = codes[2 * number + plane / 2 + 16 * (plane % 2)];
            }
        }
    }

    /// Returns the number of blocks.
    pub(super) fn blocks(&self) -> usize {
        self.blocks
    }

    /// Returns all codes, plane after plane.
    pub(super) fn codes(&self) -> &[i16] {
        &self.codes
    }

    /// Returns the codes of a plane, and zeros after them.
    pub(super) fn plane(&self, plane: usize) -> &[i16] {
        let len = self.codes.len() / self.planes;
        &self.codes[plane * len..][..len]
    }

    /// Returns the scale of each block, and zeros after them.
    pub(super) fn scales(&self) -> &[f32] {
        &self.scales
    }

    /// Returns the corrections of each block, and zeros after them.
    pub(super) fn corrections(&self) -> &[[i32; CORRECTIONS]] {
        &self.corrections
    }

    /// Returns the codes of a block in the order of its elements.
    pub(super) fn block(&self, block: usize) -> [i16; BLOCK] {
        let size = BLOCK / self.planes;
        std::array::from_fn(|element| {
            let (plane, number) = match self.planes {
                4 => (element / 16 + 2 * (element % 2), element % 16 / 2),
                _ => (0, element),
            };
            self.plane(plane)[block * size + number]
        })
    }
}

/// Returns the codes and the scale of a block.
#[inline(always)]
fn encode(block: &[f32; BLOCK]) -> ([i16; BLOCK], f32) {
    let largest = largest(block);
    // A quotient of a subnormal number would be infinite.
    let inverse = if largest >= f32::MIN_POSITIVE { LARGEST / largest } else { 0.0 };
    let mut codes = [0; BLOCK];
    for (code, x) in codes.iter_mut().zip(block) {
        *code = (x * inverse).round_ties_even() as i32 as i16;
    }
    (codes, largest / LARGEST)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const FORMATS: [RowEncoding; 2] = [RowEncoding::Q8_0, RowEncoding::Q4_0];

    proptest! {
        #[test]
        fn elements_are_within_half_a_unit(x in prop::collection::vec(-3e38_f32..3e38, 2 * BLOCK)) {
            for format in FORMATS {
                let vector = BlockVector::new(format, &x);
                for (block, x) in x.chunks(BLOCK).enumerate() {
                    let (codes, unit) = (vector.block(block), f64::from(vector.scales[block]));
                    for (code, x) in codes.iter().zip(x) {
                        let error = (f64::from(*code) * unit - f64::from(*x)).abs();
                        // The scale itself is rounded.
                        prop_assert!(error <= unit * 0.51, "{error} {unit}");
                    }
                    let sum: i32 = codes.iter().map(|code| i32::from(*code)).sum();
                    prop_assert_eq!(vector.corrections[block].iter().sum::<i32>(), -8 * sum);
                }
            }
        }
    }

    #[test]
    fn zeros_subnormal_numbers_and_nan() {
        for format in FORMATS {
            let of = |x: f32| BlockVector::new(format, &[x; BLOCK]);
            assert_eq!((of(0.0).block(0), of(0.0).scales[0]), ([0; BLOCK], 0.0));
            assert_eq!(of(1e-40).block(0), [0; BLOCK]);
            for x in [f32::NAN, f32::INFINITY] {
                assert!(of(x).scales[0].is_nan());
            }
            assert_eq!(BlockVector::new(format, &[0.0; BLOCK - 1]).blocks(), 0);
        }
    }
}
