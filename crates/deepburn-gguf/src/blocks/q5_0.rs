//! q5_0: 32 times 5 bits and their scale. It replaces q4_k where rows are not a multiple of 256.
//!
//! ```text
//! | scale, f16 | fifth bits, 32 bits | 16 bytes |   byte i: element i in the low bits, element i + 16 in the high bits
//! value = scale · (bits - 16),   scale = x / -16 for the x of the largest magnitude
//! ```

use half::f16;

use super::f16_at;
use super::q4_0::extreme;
use super::rounding::to_i8;

const LEN: usize = 32;
const SIZE: usize = 22;

/// Encodes a block (`quantize_row_q5_0_ref`).
pub(super) fn encode(values: &[f32; LEN], bytes: &mut [u8; SIZE]) {
    let scale = extreme(values) / -16.0;
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    bytes[..2].copy_from_slice(&f16::from_f32(scale).to_le_bytes());
    // Rounded and limited as in q4_0.
    let bits = values.map(|value| to_i8(value * inverse + 16.5).min(31) as u8);
    let mut fifth = 0_u32;
    for (index, bits) in bits.iter().enumerate() {
        fifth |= u32::from(bits >> 4 & 1) << index;
    }
    bytes[2..6].copy_from_slice(&fifth.to_le_bytes());
    let (low, high) = bits.split_at(LEN / 2);
    for ((low, high), byte) in low.iter().zip(high).zip(&mut bytes[6..]) {
        *byte = low & 15 | (high & 15) << 4;
    }
}

/// Decodes a block.
pub(super) fn decode(bytes: &[u8; SIZE], values: &mut [f32; LEN]) {
    let scale = f16_at(bytes, 0).to_f32();
    let fifth = u32::from_le_bytes([bytes[2], bytes[3], bytes[4], bytes[5]]);
    let value = |index: usize, four_bits: u8| {
        let bits = four_bits | ((fifth >> index & 1) as u8) << 4;
        f32::from(bits as i8 - 16) * scale
    };
    let (low, high) = values.split_at_mut(LEN / 2);
    for (index, byte) in bytes[6..].iter().enumerate() {
        low[index] = value(index, byte & 15);
        high[index] = value(index + LEN / 2, byte >> 4);
    }
}
