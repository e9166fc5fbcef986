//! Float types, which have no blocks. Values are rounded to nearest, ties to even.

use half::{bf16, f16};

pub(super) fn encode_f32(values: &[f32], bytes: &mut [u8]) {
    for (value, bytes) in values.iter().zip(bytes.as_chunks_mut().0) {
        *bytes = value.to_le_bytes();
    }
}

pub(super) fn encode_f16(values: &[f32], bytes: &mut [u8]) {
    for (value, bytes) in values.iter().zip(bytes.as_chunks_mut().0) {
        *bytes = f16::from_f32(*value).to_le_bytes();
    }
}

pub(super) fn encode_bf16(values: &[f32], bytes: &mut [u8]) {
    for (value, bytes) in values.iter().zip(bytes.as_chunks_mut().0) {
        *bytes = bf16::from_f32(*value).to_le_bytes();
    }
}

pub(super) fn decode_f32(bytes: &[u8], values: &mut [f32]) {
    for (value, bytes) in values.iter_mut().zip(bytes.as_chunks().0) {
        *value = f32::from_le_bytes(*bytes);
    }
}

pub(super) fn decode_f16(bytes: &[u8], values: &mut [f32]) {
    for (value, bytes) in values.iter_mut().zip(bytes.as_chunks().0) {
        *value = f16::from_le_bytes(*bytes).to_f32();
    }
}

pub(super) fn decode_bf16(bytes: &[u8], values: &mut [f32]) {
    for (value, bytes) in values.iter_mut().zip(bytes.as_chunks().0) {
        *value = bf16::from_le_bytes(*bytes).to_f32();
    }
}

/// Returns whether an encoded bf16 is finite.
pub(super) fn bf16_is_finite(bytes: &[u8]) -> bool {
    bf16::from_le_bytes([bytes[0], bytes[1]]).is_finite()
}
