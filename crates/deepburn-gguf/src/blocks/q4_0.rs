//! q4_0: 32 times 4 bits and their scale.
//!
//! ```text
//! | scale, f16 | 16 bytes |      byte i: element i in the low bits, element i + 16 in the high bits
//! value = scale · (bits - 8),   scale = x / -8 for the x of the largest magnitude
//! ```
//!
//! The value of the largest magnitude becomes -8 · scale exactly, whatever its sign.

use half::f16;

use super::f16_at;
use super::rounding::to_i8;

const LEN: usize = 32;
const SIZE: usize = 18;

/// Encodes a block (`quantize_row_q4_0_ref`).
pub(super) fn encode(values: &[f32; LEN], bytes: &mut [u8; SIZE]) {
    let scale = extreme(values) / -8.0;
    // A block of zeros has no inverse. Its levels become 8, which stands for zero.
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    bytes[..2].copy_from_slice(&f16::from_f32(scale).to_le_bytes());
    // Adding 8.5 and cutting the fraction rounds to the nearest level. The largest magnitude
    // with the other sign would give level 16, which does not exist.
    let bits = |value: f32| to_i8(value * inverse + 8.5).min(15) as u8;
    let (low, high) = values.split_at(LEN / 2);
    for ((low, high), byte) in low.iter().zip(high).zip(&mut bytes[2..]) {
        *byte = bits(*low) | bits(*high) << 4;
    }
}

/// Returns the value of the largest magnitude; the first one, if there are several.
pub(super) fn extreme(values: &[f32]) -> f32 {
    values.iter().fold(
        0.0_f32,
        |extreme, value| {
            if extreme.abs() < value.abs() { *value } else { extreme }
        },
    )
}

/// Decodes a block.
pub(super) fn decode(bytes: &[u8; SIZE], values: &mut [f32; LEN]) {
    let scale = f16_at(bytes, 0).to_f32();
    let (low, high) = values.split_at_mut(LEN / 2);
    for ((byte, low), high) in bytes[2..].iter().zip(low).zip(high) {
        *low = f32::from((byte & 15) as i8 - 8) * scale;
        *high = f32::from((byte >> 4) as i8 - 8) * scale;
    }
}
