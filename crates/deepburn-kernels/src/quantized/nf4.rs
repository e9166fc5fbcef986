//! 4-bit NormalFloat: the quantiles of a normal distribution, scaled to -1 to 1, with an exact 0.

use super::{QUANTIZED_BLOCK, largest};
use crate::element::Element;

/// The 16 values in ascending order (Dettmers et al. 2023, appendix E).
pub(super) const VALUES: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// The middle between each value and the next one.
const MIDDLES: [f32; 15] = {
    let mut middles = [0.0; 15];
    let mut index = 0;
    while index < 15 {
        middles[index] = ((VALUES[index] as f64 + VALUES[index + 1] as f64) / 2.0) as f32;
        index += 1;
    }
    middles
};

/// Encodes a block and returns its scale. The first element of a byte has the upper four bits.
#[inline(always)]
pub(super) fn encode(block: &[f32; QUANTIZED_BLOCK], words: &mut [u32]) -> f32 {
    let scale = largest(block);
    let divisor = if scale > 0.0 { scale } else { 1.0 };
    let mut codes = [0_u32; QUANTIZED_BLOCK];
    for (code, value) in codes.iter_mut().zip(block) {
        let x = value / divisor;
        // The number of middles below a value is its code. The comparisons have no branches.
        for middle in MIDDLES {
            *code += u32::from(x > middle);
        }
    }
    for (word, codes) in words.iter_mut().zip(codes.chunks_exact(8)) {
        *word = 0;
        for (place, code) in codes.iter().enumerate() {
            *word |= code << (4 * (place ^ 1));
        }
    }
    scale
}

/// Decodes a block. The 16 products with the scale are computed and rounded once for the whole
/// block.
#[inline(always)]
pub(super) fn decode<E: Element>(words: &[u32], scale: f32, out: &mut [E; QUANTIZED_BLOCK]) {
    let table = VALUES.map(|value| E::narrow(value * scale));
    for (word, out) in words.iter().zip(out.chunks_exact_mut(8)) {
        for (place, out) in out.iter_mut().enumerate() {
            *out = table[(word >> (4 * (place ^ 1)) & 15) as usize];
        }
    }
}
