//! A vector in 16 bits, with a scale for each block.

use super::BLOCK;
use crate::blocks::vectorized;

/// The largest magnitude of a code.
const LARGEST: f32 = i16::MAX as f32;
/// The number of lanes in which a block of 4-bit codes is corrected.
pub(super) const CORRECTIONS: usize = 8;

/// A vector in 16 bits. Element `i` is `codes[i] * scales[i / 32]`.
#[derive(Debug)]
pub(super) struct BlockVector {
    codes: Vec<[i16; BLOCK]>,
    scales: Vec<f32>,
    /// Minus 8 times the sum of the codes of each block, in parts. Codes of 4 bits are multiplied as they are stored, which is 8 too much.
    corrections: Vec<[i32; CORRECTIONS]>,
}

impl BlockVector {
    /// Encodes a vector of whole blocks. A block with an element that is not finite has a scale of NaN.
    pub(super) fn new(x: &[f32]) -> Self {
        let (blocks, _) = x.as_chunks::<BLOCK>();
        let mut vector = Self {
            codes: Vec::with_capacity(blocks.len()),
            scales: Vec::with_capacity(blocks.len()),
            corrections: Vec::with_capacity(blocks.len()),
        };
        // Not inlined, it would be compiled for the baseline, which rounds with a function call.
        vectorized(
            #[inline(always)]
            || blocks.iter().for_each(|block| vector.push(block)),
        );
        vector
    }

    /// Encodes a block; inlined, so that it is compiled for each instruction set.
    #[inline(always)]
    fn push(&mut self, block: &[f32; BLOCK]) {
        let (mut largest, mut poison) = (0.0_f32, 0.0_f32);
        for x in block {
            largest = if x.abs() > largest { x.abs() } else { largest };
            // The sum of x * 0 is NaN if any value is infinite or NaN, and 0 otherwise.
            poison += x * 0.0;
        }
        // A quotient of a subnormal number would be infinite.
        let inverse = if largest >= f32::MIN_POSITIVE { LARGEST / largest } else { 0.0 };
        let (mut codes, mut corrections) = ([0; BLOCK], [0; CORRECTIONS]);
        for (code, x) in codes.iter_mut().zip(block) {
            *code = (x * inverse).round_ties_even() as i32 as i16;
        }
        for eight in codes.as_chunks::<CORRECTIONS>().0 {
            for (correction, code) in corrections.iter_mut().zip(eight) {
                *correction -= 8 * i32::from(*code);
            }
        }
        self.codes.push(codes);
        self.scales.push(largest / LARGEST + poison);
        self.corrections.push(corrections);
    }

    /// Returns the codes of each block.
    pub(super) fn codes(&self) -> &[[i16; BLOCK]] {
        &self.codes
    }

    /// Returns the scale of each block.
    pub(super) fn scales(&self) -> &[f32] {
        &self.scales
    }

    /// Returns the corrections of each block.
    pub(super) fn corrections(&self) -> &[[i32; CORRECTIONS]] {
        &self.corrections
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn elements_are_within_half_a_unit(x in prop::collection::vec(-3e38_f32..3e38, BLOCK)) {
            let vector = BlockVector::new(&x);
            let unit = f64::from(vector.scales[0]);
            for (code, x) in vector.codes[0].iter().zip(&x) {
                let error = (f64::from(*code) * unit - f64::from(*x)).abs();
                // The scale itself is rounded.
                prop_assert!(error <= unit * 0.51, "{error} {unit}");
            }
            let sum: i32 = vector.codes[0].iter().map(|code| i32::from(*code)).sum();
            prop_assert_eq!(vector.corrections[0].iter().sum::<i32>(), -8 * sum);
        }
    }

    #[test]
    fn zeros_subnormal_numbers_and_nan() {
        let vector = BlockVector::new(&[0.0; BLOCK]);
        assert_eq!((vector.codes[0], vector.scales[0]), ([0; BLOCK], 0.0));
        assert_eq!(BlockVector::new(&[1e-40; BLOCK]).codes[0], [0; BLOCK]);
        for x in [f32::NAN, f32::INFINITY] {
            assert!(BlockVector::new(&[x; BLOCK]).scales[0].is_nan());
        }
        assert_eq!(BlockVector::new(&[0.0; BLOCK - 1]).codes.len(), 0);
    }
}
