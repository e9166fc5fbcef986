//! q4_k: 256 times 4 bits, with a scale and a minimum per 32 elements.
//!
//! ```text
//! | scale, f16 | minimum, f16 | 6-bit scales and minima, 12 bytes | 128 bytes |
//! value = scale · s · bits - minimum · m,   with s and m of the sub-block of 32 elements
//! bytes 32 i to 32 i + 31: sub-block 2 i in the low bits, sub-block 2 i + 1 in the high bits
//! ```

use half::f16;

use super::f16_at;
use super::packed_scales::{self, pack, unpack};
use super::rounding::nearest_int;
use super::scale_search::{Candidates, affine};
use super::sub_blocks::{LANES, Lanes, transposed, untransposed};

/// The number of elements of a block.
pub(super) const LEN: usize = 256;
/// The number of elements of a sub-block.
pub(super) const SUB_LEN: usize = LEN / LANES;
/// The size of the scales and minima at the start of a block in bytes.
pub(super) const HEAD_SIZE: usize = 4 + packed_scales::SIZE;
const SIZE: usize = 144;

const CANDIDATES: Candidates = Candidates { max_level: 15.0, first: -1.0, step: 0.1, last: 20 };

/// Encodes a block (`quantize_row_q4_K_ref`).
pub(super) fn encode(values: &[f32; LEN], bytes: &mut [u8; SIZE]) {
    let (head, bits) = bytes.split_at_mut(HEAD_SIZE);
    let levels = encode_levels(values, &CANDIDATES, head);
    for (pair, bytes) in levels.chunks_exact(2 * SUB_LEN).zip(bits.chunks_exact_mut(SUB_LEN)) {
        let (low, high) = pair.split_at(SUB_LEN);
        for ((low, high), byte) in low.iter().zip(high).zip(bytes) {
            *byte = low | high << 4;
        }
    }
}

/// Writes the scales of a block to `head` and returns the levels, up to `candidates.max_level`.
/// This is the common part of q4_k and q5_k.
pub(super) fn encode_levels(
    values: &[f32; LEN],
    candidates: &Candidates,
    head: &mut [u8],
) -> [u8; LEN] {
    let columns = transposed::<SUB_LEN>(values);
    let mut squares = [0.0; LANES];
    for x in &columns {
        (0..LANES).for_each(|j| squares[j] += x[j] * x[j]);
    }
    // Large values get more weight, relative to the root mean square.
    let mean = squares.map(|squares| (squares / SUB_LEN as f32).sqrt());
    let weights = columns.map(|x| std::array::from_fn(|j| mean[j] + x[j].abs()));
    let fit = affine(&columns, &weights, candidates);
    let (scale, scales) = six_bits(fit.scales);
    let (minimum, minima) = six_bits(fit.minima);
    head[..2].copy_from_slice(&scale.to_le_bytes());
    head[2..4].copy_from_slice(&minimum.to_le_bytes());
    head[4..].copy_from_slice(&pack(scales, minima));
    let mut levels = [0; LEN];
    untransposed(&fit.levels, &mut levels);
    let subs = values.as_chunks::<SUB_LEN>().0.iter().zip(levels.as_chunks_mut::<SUB_LEN>().0);
    for (j, (values, levels)) in subs.enumerate() {
        // The levels are computed again with the scales as they are stored.
        let scale = scale.to_f32() * f32::from(scales[j]);
        // The levels of the search stay, as in the source. They do not matter to the values.
        if scale == 0.0 {
            continue;
        }
        let minimum = minimum.to_f32() * f32::from(minima[j]);
        for (value, level) in values.iter().zip(levels) {
            let nearest = nearest_int((value + minimum) / scale);
            *level = nearest.clamp(0, candidates.max_level as i32) as u8;
        }
    }
    levels
}

/// Returns the common f16 factor of positive numbers, and each number as a multiple of it, in six
/// bits.
fn six_bits(numbers: Lanes<f32>) -> (f16, Lanes<u8>) {
    let largest = numbers.into_iter().fold(0.0_f32, |max, it| if it > max { it } else { max });
    let inverse = if largest > 0.0 { 63.0 / largest } else { 0.0 };
    let multiples = numbers.map(|number| (nearest_int(inverse * number) as u8).min(63));
    (f16::from_f32(largest / 63.0), multiples)
}

/// Decodes a block.
pub(super) fn decode(bytes: &[u8; SIZE], values: &mut [f32; LEN]) {
    let (head, bits) = bytes.split_at(HEAD_SIZE);
    let steps = steps(head);
    for (j, values) in values.as_chunks_mut::<SUB_LEN>().0.iter_mut().enumerate() {
        let (scale, minimum) = steps[j];
        let bits = &bits[j / 2 * SUB_LEN..][..SUB_LEN];
        let shift = j % 2 * 4;
        for (byte, value) in bits.iter().zip(values) {
            *value = scale * f32::from(byte >> shift & 15) - minimum;
        }
    }
}

/// Returns the scale and the minimum of each sub-block.
pub(super) fn steps(head: &[u8]) -> Lanes<(f32, f32)> {
    let (scale, minimum) = (f16_at(head, 0).to_f32(), f16_at(head, 2).to_f32());
    let (scales, minima) = unpack(&head[4..]);
    std::array::from_fn(|j| (scale * f32::from(scales[j]), minimum * f32::from(minima[j])))
}
