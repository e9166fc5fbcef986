//! Random zeros and ones from a ChaCha8 stream, and dropout, drawn on the device.
//!
//! The numbers are those that the crates `rand_chacha` and `rand` draw on the host from the same
//! stream, to the bit, so a model drops the same elements on every device:
//!
//! ```text
//! words of the stream   | block 0: 16 words | block 1 | ...        64 bytes a block
//! element e             words 2e and 2e + 1 after the position of the stream, as a u64
//!                       1 if the u64 is below probability * 2^64, else 0
//! unit u                computes block u, and writes the elements whose first word is in it
//! ```
//!
//! The generator is ChaCha with 8 rounds (Bernstein 2008, "ChaCha, a variant of Salsa20"), with a
//! 64-bit counter and a 64-bit stream number.

use cubecl::prelude::*;

use super::device_buffer::{DeviceBuffer, DeviceDType, cubes, with_element};
use crate::ChaChaPosition;

/// The number of words of a block.
const BLOCK: usize = 16;

/// The largest number of elements that are drawn at once. Kernels count words in 32 bits, and an
/// element has two. The last block may begin before the first word.
pub const MAX_DRAWN: usize = (u32::MAX as usize - 2 * BLOCK) / 2;

/// Returns the words of a block's input that are the same for all units: the key, and then, each
/// with its low word first, the number of the first block and of the stream.
fn input_words(position: &ChaChaPosition) -> Vec<u32> {
    let key = position.key.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word));
    // The counter has 64 bits and wraps.
    let first = (position.word / BLOCK as u128) as u64;
    let halves = |word: u64| [word as u32, (word >> 32) as u32];
    key.chain(halves(first)).chain(halves(position.stream)).collect()
}

/// Returns `len` elements, each 1 with the given probability and otherwise 0. They advance a stream
/// at this position by two words each.
///
/// Queues one kernel; an empty result needs no launch.
///
/// # Panics
/// Panics if `probability` is not in `0.0..1.0`, or if there are more than [`MAX_DRAWN`] elements.
pub fn bernoulli<R: Runtime>(
    client: &ComputeClient<R>,
    position: &ChaChaPosition,
    probability: f64,
    len: usize,
    dtype: DeviceDType,
) -> DeviceBuffer {
    let drawn = DeviceBuffer::empty(client, len, dtype);
    draw(client, position, probability, None, drawn)
}

/// Returns the elements of `x` for which [`bernoulli`] draws 1, divided by the probability `keep`,
/// and 0 for the others.
///
/// Queues one kernel; an empty array needs no launch.
///
/// # Panics
/// Panics if `keep` is not in `0.0..1.0`, or if there are more than [`MAX_DRAWN`] elements.
pub fn dropout<R: Runtime>(
    client: &ComputeClient<R>,
    position: &ChaChaPosition,
    keep: f64,
    x: &DeviceBuffer,
) -> DeviceBuffer {
    let kept = DeviceBuffer::empty(client, x.len(), x.dtype());
    draw(client, position, keep, Some(x), kept)
}

/// Draws for each element of `result`, writes what [`bernoulli`] or [`dropout`] returns and returns
/// the buffer.
fn draw<R: Runtime>(
    client: &ComputeClient<R>,
    position: &ChaChaPosition,
    probability: f64,
    x: Option<&DeviceBuffer>,
    result: DeviceBuffer,
) -> DeviceBuffer {
    assert!(
        (0.0..1.0).contains(&probability),
        "a probability of {probability}; the kernel draws with one in 0.0..1.0"
    );
    let len = result.len();
    if len == 0 {
        return result;
    }
    let skipped = (position.word % BLOCK as u128) as usize;
    assert!(len <= MAX_DRAWN, "{len} random elements; a kernel draws at most {MAX_DRAWN}");
    let (count, dim) = cubes(client, (skipped + 2 * len).div_ceil(BLOCK));
    // As in `rand`. It is exact: the product is an f64 below 2^64.
    let threshold = (probability * 2_f64.powi(64)) as u64;
    // SAFETY: every unit checks that its elements exist.
    unsafe {
        with_element!(result.dtype(), T => {
            bernoulli_kernel::launch_unchecked::<T, R>(
                client,
                count,
                dim,
                input_words(position).into_iter().collect(),
                skipped,
                threshold as u32,
                (threshold >> 32) as u32,
                len,
                x.iter().map(|x| x.arg()).collect(),
                (1.0 / probability) as f32,
                result.arg(),
                skipped % 2 == 1,
                x.is_some(),
            );
        });
    }
    result
}

/// Writes the elements whose first word is in the unit's block. The first `skipped` words of block
/// 0 are before the position. If that number is odd, the second word of a block's last element is
/// the first word of the next block. `x` is empty, or has the array whose elements are kept and
/// multiplied by `scale`.
#[cube(launch_unchecked)]
fn bernoulli_kernel<T: Float>(
    input: &Sequence<u32>,
    skipped: usize,
    threshold_low: u32,
    threshold_high: u32,
    len: usize,
    x: &Sequence<Array<T>>,
    scale: f32,
    drawn: &mut Array<T>,
    #[comptime] is_odd: bool,
    #[comptime] has_x: bool,
) {
    let start = ABSOLUTE_POS * 16;
    if start >= skipped + 2 * len {
        terminate!();
    }
    let mut words = Array::<u32>::new(17usize);
    block(input, ABSOLUTE_POS as u32, &mut words);
    let first = comptime![if is_odd { 1usize } else { 0usize }];
    if comptime![is_odd] {
        let mut next = Array::<u32>::new(17usize);
        block(input, ABSOLUTE_POS as u32 + 1u32, &mut next);
        words[16] = next[0];
    }
    #[unroll]
    for pair in 0..8usize {
        let low = pair * 2 + first;
        let at = start + low;
        if at >= skipped {
            let element = (at - skipped) / 2;
            if element < len {
                let high = words[low + 1];
                let is_below =
                    high < threshold_high || (high == threshold_high && words[low] < threshold_low);
                if comptime![has_x] {
                    let mut value = f32::new(0.0);
                    if is_below {
                        value = f32::cast_from(x[0][element]) * scale;
                    }
                    drawn[element] = T::cast_from(value);
                } else {
                    drawn[element] = T::cast_from(u32::cast_from(is_below));
                }
            }
        }
    }
}

/// Computes block `index` after the first block.
#[cube]
fn block(input: &Sequence<u32>, index: u32, words: &mut Array<u32>) {
    let low = *input.index(8usize) + index;
    let mut high = *input.index(9usize);
    if low < index {
        high += 1u32;
    }
    let mut start = Array::<u32>::new(16usize);
    // The bytes of "expand 32-byte k".
    start[0] = 0x6170_7865u32;
    start[1] = 0x3320_646eu32;
    start[2] = 0x7962_2d32u32;
    start[3] = 0x6b20_6574u32;
    #[unroll]
    for word in 0..8usize {
        start[4 + word] = *input.index(word);
    }
    start[12] = low;
    start[13] = high;
    start[14] = *input.index(10usize);
    start[15] = *input.index(11usize);
    #[unroll]
    for word in 0..16usize {
        words[word] = start[word];
    }
    // Each iteration is a round of the columns and a round of the diagonals.
    for _ in 0..4usize {
        quarter_round(words, 0usize, 4usize, 8usize, 12usize);
        quarter_round(words, 1usize, 5usize, 9usize, 13usize);
        quarter_round(words, 2usize, 6usize, 10usize, 14usize);
        quarter_round(words, 3usize, 7usize, 11usize, 15usize);
        quarter_round(words, 0usize, 5usize, 10usize, 15usize);
        quarter_round(words, 1usize, 6usize, 11usize, 12usize);
        quarter_round(words, 2usize, 7usize, 8usize, 13usize);
        quarter_round(words, 3usize, 4usize, 9usize, 14usize);
    }
    #[unroll]
    for word in 0..16usize {
        words[word] = words[word] + start[word];
    }
}

#[cube]
fn quarter_round(
    words: &mut Array<u32>,
    #[comptime] a: usize,
    #[comptime] b: usize,
    #[comptime] c: usize,
    #[comptime] d: usize,
) {
    words[a] = words[a] + words[b];
    words[d] = rotated(words[d] ^ words[a], 16u32);
    words[c] = words[c] + words[d];
    words[b] = rotated(words[b] ^ words[c], 12u32);
    words[a] = words[a] + words[b];
    words[d] = rotated(words[d] ^ words[a], 8u32);
    words[c] = words[c] + words[d];
    words[b] = rotated(words[b] ^ words[c], 7u32);
}

/// Rotates the bits of a word to the left.
#[cube]
fn rotated(word: u32, #[comptime] bits: u32) -> u32 {
    let rest = comptime![32u32 - bits];
    (word << bits) | (word >> rest)
}
