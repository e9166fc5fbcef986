//! q5_k: 256 times 5 bits, with the scales and minima of q4_k.
//!
//! ```text
//! | as in q4_k, 16 bytes | fifth bits, 32 bytes | low bits as in q4_k, 128 bytes |
//! bit j of fifth byte i: element i of sub-block j
//! ```

use super::q4_k::{HEAD_SIZE, LEN, SUB_LEN, encode_levels, steps};
use super::scale_search::Candidates;

const SIZE: usize = 176;

const CANDIDATES: Candidates = Candidates { max_level: 31.0, first: -0.5, step: 0.1, last: 15 };

/// Encodes a block (`quantize_row_q5_K_ref`).
pub(super) fn encode(values: &[f32; LEN], bytes: &mut [u8; SIZE]) {
    let (head, bits) = bytes.split_at_mut(HEAD_SIZE);
    let levels = encode_levels(values, &CANDIDATES, head);
    let (fifth, low) = bits.split_at_mut(SUB_LEN);
    // The loop adds bits with `|=`, so the bytes have to start at 0.
    fifth.fill(0);
    low.fill(0);
    for (j, levels) in levels.chunks_exact(SUB_LEN).enumerate() {
        let low = &mut low[j / 2 * SUB_LEN..][..SUB_LEN];
        for ((level, fifth), low) in levels.iter().zip(&mut *fifth).zip(low) {
            *fifth |= (level >> 4) << j;
            *low |= (level & 15) << (j % 2 * 4);
        }
    }
}

/// Decodes a block.
pub(super) fn decode(bytes: &[u8; SIZE], values: &mut [f32; LEN]) {
    let (head, bits) = bytes.split_at(HEAD_SIZE);
    let steps = steps(head);
    let (fifth, low) = bits.split_at(SUB_LEN);
    for (j, values) in values.as_chunks_mut::<SUB_LEN>().0.iter_mut().enumerate() {
        let (scale, minimum) = steps[j];
        let low = &low[j / 2 * SUB_LEN..][..SUB_LEN];
        for ((fifth, low), value) in fifth.iter().zip(low).zip(values) {
            let level = low >> (j % 2 * 4) & 15 | (fifth >> j & 1) << 4;
            *value = scale * f32::from(level) - minimum;
        }
    }
}
