//! q8_0: 32 signed bytes and their scale.
//!
//! ```text
//! | scale, f16 | 32 × i8 |      value = scale · byte,   scale = max |x| / 127
//! ```

use half::f16;

use super::f16_at;
use super::rounding::to_i8;

const LEN: usize = 32;
const SIZE: usize = 34;

/// Encodes a block. The bytes are computed with the scale before it is rounded to f16
/// (`quantize_row_q8_0_ref`).
pub(super) fn encode(values: &[f32; LEN], bytes: &mut [u8; SIZE]) {
    let largest = values.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
    let scale = largest / 127.0;
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    bytes[..2].copy_from_slice(&f16::from_f32(scale).to_le_bytes());
    for (value, byte) in values.iter().zip(&mut bytes[2..]) {
        // Ties are rounded away from zero, as by C's `roundf`, and not to even as by
        // `nearest_int`.
        *byte = to_i8((value * inverse).round()) as u8;
    }
}

/// Decodes a block.
pub(super) fn decode(bytes: &[u8; SIZE], values: &mut [f32; LEN]) {
    let scale = f16_at(bytes, 0).to_f32();
    for (byte, value) in bytes[2..].iter().zip(values) {
        *value = scale * f32::from(*byte as i8);
    }
}
