//! q6_k: 256 times 6 bits, with an 8-bit scale per 16 elements.
//!
//! ```text
//! | low 4 bits, 128 bytes | high 2 bits, 64 bytes | 16 scales, i8 | scale, f16 |
//! value = scale · s · (bits - 32),   with s of the sub-block of 16 elements
//! ```
//!
//! Each half of 128 elements is four groups of 32. Low bits: group 0 and, in the high bits of the
//! same bytes, group 2; then groups 1 and 3. High bits: the four groups in one byte, group 0 in the
//! lowest bits.

use half::f16;

use super::f16_at;
use super::rounding::nearest_int;
use super::scale_search::{ALL_ZERO, symmetric};
use super::sub_blocks::{LANES, transposed, untransposed};

const LEN: usize = 256;
const SIZE: usize = 210;
const SUB_LEN: usize = 16;
const NUM_SUBS: usize = LEN / SUB_LEN;
const HIGH_AT: usize = 128;
const SCALES_AT: usize = 192;
/// The position of the f16 scale in a block.
pub(super) const SCALE_AT: usize = 208;
/// Levels are stored with this offset.
const ZERO_LEVEL: i32 = 32;

/// Encodes a block (`quantize_row_q6_K_ref`).
pub(super) fn encode(values: &[f32; LEN], bytes: &mut [u8; SIZE]) {
    let (mut scales, mut levels) = ([0.0; NUM_SUBS], [0; LEN]);
    // A search has eight lanes, so the sixteen sub-blocks take two.
    for half in 0..2 {
        let from = half * LANES * SUB_LEN;
        let fit = symmetric(&transposed::<SUB_LEN>(&values[from..]), ZERO_LEVEL);
        scales[half * LANES..][..LANES].copy_from_slice(&fit.scales);
        untransposed(&fit.levels, &mut levels[from..][..LANES * SUB_LEN]);
    }
    if scales.iter().any(|scale| !scale.is_finite()) {
        // The sums of the search have overflowed. llama.cpp stores arbitrary values in some of
        // these blocks. A scale that is not finite makes them an error here.
        return bytes[SCALE_AT..].copy_from_slice(&f16::INFINITY.to_le_bytes());
    }
    let extreme = super::q4_0::extreme(&scales);
    if extreme.abs() < ALL_ZERO {
        // All levels decode to zero with a scale of 0, whatever they are.
        return bytes.fill(0);
    }
    // The largest scale becomes -128 times the common factor.
    let inverse = -128.0 / extreme;
    let scale = f16::from_f32(1.0 / inverse);
    // A scale of the same size with the other sign would become 128.
    let scales = scales.map(|scale| nearest_int(inverse * scale).min(127) as i8);
    let subs = values.as_chunks::<SUB_LEN>().0.iter().zip(levels.as_chunks_mut::<SUB_LEN>().0);
    for (j, (values, levels)) in subs.enumerate() {
        // The levels are computed again with the scales as they are stored.
        let scale = scale.to_f32() * f32::from(scales[j]);
        if scale == 0.0 {
            continue;
        }
        for (value, level) in values.iter().zip(levels) {
            let nearest = nearest_int(value / scale).clamp(-ZERO_LEVEL, ZERO_LEVEL - 1);
            *level = (nearest + ZERO_LEVEL) as u8;
        }
    }
    pack(&levels, bytes);
    for (byte, scale) in bytes[SCALES_AT..SCALE_AT].iter_mut().zip(scales) {
        *byte = scale as u8;
    }
    bytes[SCALE_AT..].copy_from_slice(&scale.to_le_bytes());
}

/// Writes the low and the high bits.
fn pack(levels: &[u8; LEN], bytes: &mut [u8; SIZE]) {
    for (half, levels) in levels.as_chunks::<128>().0.iter().enumerate() {
        for i in 0..32 {
            let [l0, l1, l2, l3] = [0, 32, 64, 96].map(|group| levels[group + i]);
            bytes[half * 64 + i] = l0 & 15 | (l2 & 15) << 4;
            bytes[half * 64 + 32 + i] = l1 & 15 | (l3 & 15) << 4;
            bytes[HIGH_AT + half * 32 + i] =
                l0 >> 4 | (l1 >> 4) << 2 | (l2 >> 4) << 4 | (l3 >> 4) << 6;
        }
    }
}

/// Decodes a block.
pub(super) fn decode(bytes: &[u8; SIZE], values: &mut [f32; LEN]) {
    let scale = f16_at(bytes, SCALE_AT).to_f32();
    for (j, values) in values.as_chunks_mut::<SUB_LEN>().0.iter_mut().enumerate() {
        let scale = scale * f32::from(bytes[SCALES_AT + j] as i8);
        // A group of 32 elements is two sub-blocks.
        let (half, group, from) = (j / 8, j / 2 % 4, j % 2 * SUB_LEN);
        let low = &bytes[half * 64 + group % 2 * 32 + from..][..SUB_LEN];
        let high = &bytes[HIGH_AT + half * 32 + from..][..SUB_LEN];
        for ((low, high), value) in low.iter().zip(high).zip(values) {
            let level = low >> (group / 2 * 4) & 15 | (high >> (group * 2) & 3) << 4;
            *value = scale * f32::from(level as i8 - ZERO_LEVEL as i8);
        }
    }
}
