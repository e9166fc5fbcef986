//! Compression of a tensor to one bit per element and one scale.
//!
//! Main function: [`compress`], which stores the compression error and adds it to the next tensor
//! (error feedback). Source: Tang et al. 2021, "1-bit Adam: Communication Efficient Large-Scale
//! Training with Adam's Convergence Speed", in the form of DeepSpeed's `runtime/comm/nccl.py`.
//!
//! ```text
//! c     = values + error              live elements
//! scale = sqrt(mean(c^2))             over the live elements
//! sent  = c >= 0 ? scale : -scale
//! error = c - sent                    added to the next tensor
//!
//! element   0 1 2 3 4 5 6 7 | 8 9 ...
//! byte 0    bit 0 .. bit 7  |           element i is bit i % 8 of byte i / 8
//! byte 1                    | bit 0 ..  padding of the last byte is 0
//! ```
//!
//! One bit cannot express 0. An element that never had a gradient ([`live_elements`]) would be sent
//! as a momentum of average size, and its error would grow without limit. Such a dead element is
//! omitted: it does not count for the scale, and its value and error are 0. DeepSpeed requires a
//! mask from the user for such elements, `exp_avg_mask`.
//!
//! A tensor of `n` elements is sent as `n / 8` bytes and one f32, 1/32 of its size in f32.
//!
//! Error feedback bounds the compression error over time: the part that one step does not send is
//! added to the next step. The sum of all sent tensors therefore differs from the sum of all values
//! only by the last error.

use crate::blocks::{check_lengths, each_block, map_blocks, vectorized};
use crate::norm::{block_sum_of_squares, pairwise};

/// The number of elements in a packed byte.
const BYTE: usize = 8;

/// A compressed tensor: each live element is `scale` or `-scale`.
#[derive(Debug, Clone, PartialEq)]
pub struct Signs {
    /// The magnitude of every live element: the root mean square of the live elements. NaN or
    /// infinite if a live element is not finite.
    pub scale: f32,
    /// Packed bits: 1 for `scale`, 0 for `-scale` and for dead elements.
    pub bits: Vec<u8>,
}

/// The number of live elements of a tensor and the sum of their squares. For tensors that share a
/// scale, both are added.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct LiveSquares {
    /// The sum of the squares; NaN or infinite if an element is not finite.
    pub sum: f64,
    /// The number of live elements.
    pub count: u64,
}

impl LiveSquares {
    /// Returns the root mean square of the live elements; 0 if there are none.
    pub fn root_mean_square(self) -> f64 {
        if self.count == 0 { 0.0 } else { (self.sum / self.count as f64).sqrt() }
    }
}

impl std::ops::Add for LiveSquares {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { sum: self.sum + other.sum, count: self.count + other.count }
    }
}

/// Returns packed bits that are 1 for elements whose second moment is not 0, which means that they
/// had a gradient in some step.
pub fn live_elements(second_moment: &[f32]) -> Vec<u8> {
    // A block is a multiple of eight elements, so blocks are whole bytes.
    each_block(second_moment.len(), |block| vectorized!(pack(&second_moment[block], |x| x != 0.0)))
        .concat()
}

//= deepspeed 0.19.6 runtime/comm/nccl.py NcclBackend.compressed_allreduce
/// Compresses `values + error` and replaces `error` by the compression error.
///
/// Let `c = values + error` for the live elements. The scale is
/// `norm(c) / sqrt(number of live elements)`, or 0 if there are none. An element is sent as `scale`
/// if `c >= 0` and otherwise as `-scale`, and its error is `c` minus the sent value. Dead elements
/// are not sent, and their error is 0. `live` is packed, with 0 as padding.
///
/// The result does not depend on the number of threads. A single element that is not finite makes
/// all errors invalid, so callers must check the gradient first.
///
/// # Panics
/// Panics if the lengths do not match or `live` marks padding.
pub fn compress(values: &[f32], error: &mut [f32], live: &[u8]) -> Signs {
    let scale = add_error(values, error, live).root_mean_square() as f32;
    Signs { scale, bits: take_signs(error, live, scale) }
}

/// Replaces `error` by `values + error`, or by 0 for dead elements, and returns the squares of the
/// sums.
///
/// This is the first half of [`compress`], for tensors that share one scale; [`take_signs`] is the
/// second half.
///
/// # Panics
/// Panics if the lengths do not match or `live` marks padding.
pub fn add_error(values: &[f32], error: &mut [f32], live: &[u8]) -> LiveSquares {
    let len = values.len();
    check_lengths("compress", ("values", len), &[("error", error.len())]);
    check_packed("compress", ("values", len), &[("live", live)]);
    // A marked padding bit would count as a live element and shift the scale.
    let padding =
        live.last().map_or(0, |last| (u32::from(*last) << (live.len() * BYTE - len)) >> BYTE);
    assert!(padding == 0, "compress: `live` marks elements beyond the {len} of `values`");
    let sums = map_blocks(error, |start, error| {
        let values = &values[start..][..error.len()];
        vectorized!(compensate(values, error, &live[start / BYTE..]))
    });
    let count = live.iter().map(|byte| u64::from(byte.count_ones())).sum();
    LiveSquares { sum: pairwise(&sums), count }
}

/// Returns the packed signs of the compensated values in `error`, and replaces each value by its
/// difference from `scale` or `-scale`.
///
/// # Panics
/// Panics if the lengths do not match.
pub fn take_signs(error: &mut [f32], live: &[u8], scale: f32) -> Vec<u8> {
    check_packed("compress", ("error", error.len()), &[("live", live)]);
    let bits = map_blocks(error, |start, error| {
        vectorized!(pack_signs(error, &live[start / BYTE..], scale))
    });
    bits.concat()
}

/// Adds `scale` or `-scale`, according to `signs`, to the live elements of `sum`.
///
/// The mean over ranks is the sum of each rank's signs times `scale / ranks`. `signs` and `live`
/// are packed.
///
/// The signs of a rank are added in place, so a mean over `W` ranks needs no array besides `sum`.
/// The order of the calls determines the order of the additions.
///
/// # Panics
/// Panics if the lengths do not match.
pub fn add_signs(sum: &mut [f32], signs: &[u8], live: &[u8], scale: f32) {
    check_packed("add_signs", ("sum", sum.len()), &[("signs", signs), ("live", live)]);
    let add = |sum: f32, signed: f32, live: bool| if live { sum + signed } else { sum };
    map_blocks(sum, |start, sum| {
        let packed = (&signs[start / BYTE..], &live[start / BYTE..]);
        vectorized!(update_all(sum, packed, scale, add));
    });
}

/// Writes `scale` or `-scale`, according to `signs`, to the live elements of `out`, and 0 to the
/// dead elements.
///
/// # Panics
/// Panics if the lengths do not match.
pub fn decompress(signs: &[u8], live: &[u8], scale: f32, out: &mut [f32]) {
    check_packed("decompress", ("out", out.len()), &[("signs", signs), ("live", live)]);
    let write = |_: f32, signed: f32, live: bool| if live { signed } else { 0.0 };
    map_blocks(out, |start, out| {
        let packed = (&signs[start / BYTE..], &live[start / BYTE..]);
        vectorized!(update_all(out, packed, scale, write));
    });
}

/// Adds the values to the errors of live elements, sets the errors of dead elements to 0 and
/// returns the sum of squares, while the block is in the first-level cache.
#[inline(always)]
fn compensate(values: &[f32], error: &mut [f32], live: &[u8]) -> f64 {
    let (values, values_tail) = values.as_chunks::<BYTE>();
    let (eights, tail) = error.as_chunks_mut::<BYTE>();
    for ((values, error), live) in values.iter().zip(eights).zip(live) {
        compensate_byte(values, error, *live);
    }
    if let Some(live) = live.get(values.len()) {
        compensate_byte(values_tail, tail, *live);
    }
    block_sum_of_squares(error)
}

/// Compensates up to eight elements, whose `live` bits are one byte.
#[inline(always)]
fn compensate_byte(values: &[f32], error: &mut [f32], live: u8) {
    for (i, (value, error)) in values.iter().zip(error).enumerate() {
        let sum = *value + *error;
        *error = if is_set(live, i) { sum } else { 0.0 };
    }
}

/// Packs the signs of the compensated values in `error`, and replaces these values by the
/// compression error.
#[inline(always)]
fn pack_signs(error: &mut [f32], live: &[u8], scale: f32) -> Vec<u8> {
    // Dead elements are 0 here, which would count as positive, so the mask clears their bits.
    let mut bits = pack(error, |c| c >= 0.0);
    for (bits, live) in bits.iter_mut().zip(live) {
        *bits &= live;
    }
    update_all(error, (&bits, live), scale, |c, signed, live| if live { c - signed } else { 0.0 });
    bits
}

/// Replaces each element by the result of `update`, whose arguments are the element, `scale` with
/// the element's sign, and whether the element is live.
#[inline(always)]
fn update_all(
    values: &mut [f32],
    (signs, live): (&[u8], &[u8]),
    scale: f32,
    update: impl Fn(f32, f32, bool) -> f32,
) {
    let (eights, tail) = values.as_chunks_mut::<BYTE>();
    let tail_bits = (signs.get(eights.len()), live.get(eights.len()));
    for ((values, signs), live) in eights.iter_mut().zip(signs).zip(live) {
        update_byte(values, (*signs, *live), scale, &update);
    }
    if let (Some(signs), Some(live)) = tail_bits {
        update_byte(tail, (*signs, *live), scale, &update);
    }
}

/// Updates up to eight elements, whose signs and `live` bits are one byte each.
#[inline(always)]
fn update_byte(
    values: &mut [f32],
    (signs, live): (u8, u8),
    scale: f32,
    update: impl Fn(f32, f32, bool) -> f32,
) {
    for (i, value) in values.iter_mut().enumerate() {
        let signed = if is_set(signs, i) { scale } else { -scale };
        *value = update(*value, signed, is_set(live, i));
    }
}

/// Packs the results of a predicate, one bit per value. The padding of the last byte is 0.
#[inline(always)]
fn pack(values: &[f32], holds: impl Fn(f32) -> bool) -> Vec<u8> {
    let (eights, tail) = values.as_chunks::<BYTE>();
    let mut bytes = Vec::with_capacity(values.len().div_ceil(BYTE));
    for eight in eights {
        bytes.push(pack_byte(eight, &holds));
    }
    if !tail.is_empty() {
        bytes.push(pack_byte(tail, &holds));
    }
    bytes
}

/// Packs the results of a predicate for up to eight values.
#[inline(always)]
fn pack_byte(values: &[f32], holds: impl Fn(f32) -> bool) -> u8 {
    values.iter().enumerate().fold(0, |byte, (i, x)| byte | (u8::from(holds(*x)) << i))
}

/// Returns bit `bit` of a byte, counted from the lowest bit.
#[inline(always)]
fn is_set(byte: u8, bit: usize) -> bool {
    (byte >> bit) & 1 == 1
}

/// Checks that each of `packed` has a bit for every element, and panics otherwise.
fn check_packed(kernel: &str, (name, len): (&str, usize), packed: &[(&str, &[u8])]) {
    for (bits, bytes) in packed {
        assert!(
            bytes.len() == len.div_ceil(BYTE),
            "{kernel}: `{bits}` has {} bytes and `{name}` has {len} elements, whose packed bits are {} bytes",
            bytes.len(),
            len.div_ceil(BYTE)
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blocks::PARALLEL_FROM;
    use crate::tests::{SIZES, in_pool, noise};
    use proptest::prelude::*;

    /// Computes the same compression as [`compress`], one element after the other. Returns the
    /// scale and, for each element, whether it is sent as `scale`.
    fn compress_reference(values: &[f64], error: &mut [f64], live: &[bool]) -> (f64, Vec<bool>) {
        let (mut squares, mut count) = (0.0, 0.0);
        for i in 0..values.len() {
            error[i] = if live[i] { values[i] + error[i] } else { 0.0 };
            squares += error[i] * error[i];
            count += if live[i] { 1.0 } else { 0.0 };
        }
        let scale = if count == 0.0 { 0.0 } else { (squares / count).sqrt() };
        let positive: Vec<bool> = (0..values.len()).map(|i| live[i] && error[i] >= 0.0).collect();
        for i in (0..values.len()).filter(|i| live[*i]) {
            error[i] -= if positive[i] { scale } else { -scale };
        }
        (scale, positive)
    }

    /// Returns packed bits, of which about `share` of 8 are set.
    fn marks(len: usize, share: u8) -> Vec<u8> {
        let marked: Vec<f32> = noise(len, 77)
            .iter()
            .map(|x| if (*x + 1.0) * 4.0 < f32::from(share) { 1.0 } else { 0.0 })
            .collect();
        live_elements(&marked)
    }

    fn unpacked(bits: &[u8], len: usize) -> Vec<bool> {
        (0..len).map(|i| is_set(bits[i / BYTE], i % BYTE)).collect()
    }

    //= deepspeed 0.19.6 runtime/comm/nccl.py NcclBackend.compressed_allreduce
    #[test]
    fn by_hand() {
        // c = 3, -4, (dead), -0, 0: norm 5 over 4 elements.
        let live = live_elements(&[1.0, 1e-45, 0.0, 2.0, 3.0]);
        assert_eq!(live, [0b11011]);
        let mut error = [1.0, 0.0, 5.0, -0.0, 0.0];
        let signs = compress(&[2.0, -4.0, 9.0, -0.0, 0.0], &mut error, &live);
        assert_eq!(signs, Signs { scale: 2.5, bits: vec![0b11001] });
        assert_eq!(error, [0.5, -1.5, 0.0, -2.5, -2.5]);
        let mut out = [7.0; 5];
        decompress(&signs.bits, &live, 2.5, &mut out);
        assert_eq!(out, [2.5, -2.5, 0.0, 2.5, 2.5]);
        add_signs(&mut out, &[0b00110], &live, 0.5);
        assert_eq!(out, [2.0, -2.0, 0.0, 2.0, 2.0]);
    }

    /// The scale of two tensors that share it is the root mean square of the live elements of both.
    #[test]
    fn two_tensors_share_a_scale() {
        let (mut first, mut second) = ([1.0, 0.5], [0.0, 9.0]);
        let squares = add_error(&[2.0, 4.5], &mut first, &[0b11]);
        assert_eq!(squares, LiveSquares { sum: 34.0, count: 2 });
        let squares = squares + add_error(&[-4.0, 1.0], &mut second, &[0b01]);
        let scale = squares.root_mean_square() as f32;
        assert_eq!(scale, (50.0_f32 / 3.0).sqrt());
        assert_eq!(take_signs(&mut first, &[0b11], scale), [0b11]);
        assert_eq!(take_signs(&mut second, &[0b01], scale), [0]);
        assert_eq!((first, second), ([3.0 - scale, 5.0 - scale], [scale - 4.0, 0.0]));
    }

    #[test]
    fn nothing_live_is_scale_0() {
        for len in [0_usize, 3, 8] {
            let (live, mut error) = (vec![0; len.div_ceil(BYTE)], vec![1.0; len]);
            let signs = compress(&noise(len, 1), &mut error, &live);
            assert_eq!(signs, Signs { scale: 0.0, bits: live });
            assert!(error == vec![0.0; len]);
        }
    }

    //= deepspeed 0.19.6 runtime/comm/nccl.py NcclBackend.compressed_allreduce
    #[test]
    fn every_size_follows_the_f64_reference() {
        for (case, len) in SIZES.into_iter().enumerate() {
            let (values, mut error) = (noise(len, 1), noise(len, 2));
            let live = marks(len, [8, 5, 1][case % 3]);
            // The sums are computed in f32, as in the kernel, so the signs are identical.
            let sums: Vec<f64> = values.iter().zip(&error).map(|(v, e)| f64::from(v + e)).collect();
            let mut error64 = vec![0.0; len];
            let (scale, positive) = compress_reference(&sums, &mut error64, &unpacked(&live, len));
            let signs = compress(&values, &mut error, &live);
            assert!(unpacked(&signs.bits, len) == positive);
            // The scale and the errors, which are below 4, have a relative rounding error of 2^-24.
            // The error of the sum is much smaller.
            assert!((f64::from(signs.scale) - scale).abs() <= 6e-8 * scale, "{len}");
            for (found, expected) in error.iter().zip(&error64) {
                assert!((f64::from(*found) - expected).abs() <= 3e-7, "{found} {expected}");
            }
            let mut out = vec![f32::NAN; len];
            decompress(&signs.bits, &live, signs.scale, &mut out);
            let mut sum = vec![0.0; len];
            add_signs(&mut sum, &signs.bits, &live, signs.scale);
            assert!(out == sum, "a sum of one");
            for i in 0..len {
                let sign = if positive[i] { signs.scale } else { -signs.scale };
                let expected = if is_set(live[i / BYTE], i % BYTE) { sign } else { 0.0 };
                assert!(out[i] == expected, "{i} of {len}");
            }
        }
    }

    #[test]
    fn the_number_of_threads_changes_no_bit() {
        for len in [PARALLEL_FROM, 3 * PARALLEL_FROM + 5] {
            let live = marks(len, 6);
            let run = |threads| {
                in_pool(threads, || {
                    let mut error = noise(len, 2);
                    let signs = compress(&noise(len, 1), &mut error, &live);
                    let (mut out, mut sum) = (vec![0.0; len], noise(len, 3));
                    decompress(&signs.bits, &live, signs.scale, &mut out);
                    add_signs(&mut sum, &signs.bits, &live, signs.scale / 3.0);
                    (signs, error, out, sum, live_elements(&noise(len, 4)))
                })
            };
            let one = run(1);
            assert!(one == run(2) && one == run(3));
        }
    }

    #[test]
    fn an_element_that_is_not_finite_is_seen_in_the_scale() {
        for bad in [f32::NAN, f32::INFINITY] {
            let mut values = noise(20, 1);
            values[3] = bad;
            let signs = compress(&values, &mut [0.0; 20], &[255, 255, 15]);
            assert!(!signs.scale.is_finite());
            // A dead element does not affect the scale.
            assert!(compress(&values, &mut [0.0; 20], &[247, 255, 15]).scale.is_finite());
        }
    }

    #[test]
    #[should_panic(expected = "compress: `error` has 2 elements and `values` has 3")]
    fn an_error_of_another_length_is_refused() {
        compress(&[0.0; 3], &mut [0.0; 2], &[0]);
    }

    #[test]
    #[should_panic(expected = "add_signs: `live` has 1 bytes and `sum` has 9 elements")]
    fn missing_bits_are_refused() {
        add_signs(&mut [0.0; 9], &[0; 2], &[0], 1.0);
    }

    #[test]
    #[should_panic(expected = "compress: `live` marks elements beyond the 3 of `values`")]
    fn marked_padding_is_refused() {
        compress(&[0.0; 3], &mut [0.0; 3], &[0b1000]);
    }

    proptest! {
        #[test]
        fn what_was_sent_and_the_last_error_are_what_was_given(
            len in 1_usize..100, steps in 1_u64..20, share in 0_u8..=8,
        ) {
            let live = marks(len, share);
            let (mut error, mut given, mut sent) =
                (vec![0.0; len], vec![0.0_f64; len], vec![0.0_f64; len]);
            for step in 0..steps {
                let values = noise(len, step);
                let signs = compress(&values, &mut error, &live);
                let mut out = vec![0.0; len];
                decompress(&signs.bits, &live, signs.scale, &mut out);
                for i in 0..len {
                    given[i] += f64::from(values[i]);
                    sent[i] += f64::from(out[i]);
                }
            }
            for i in 0..len {
                if is_set(live[i / BYTE], i % BYTE) {
                    // Each step rounds a sum and a difference. The errors stay below 16 here, where
                    // a rounding is below 5e-7.
                    let difference = (sent[i] + f64::from(error[i]) - given[i]).abs();
                    prop_assert!(difference <= 1e-6 * steps as f64, "{i}: {difference:e}");
                } else {
                    prop_assert_eq!((sent[i], error[i]), (0.0, 0.0));
                }
            }
        }

        #[test]
        fn signs_come_back_as_they_were(
            signs in prop::collection::vec(any::<u8>(), 1..20),
            live in prop::collection::vec(any::<u8>(), 20),
        ) {
            let live = &live[..signs.len()];
            let mut values = vec![0.0; signs.len() * BYTE];
            decompress(&signs, live, 0.75, &mut values);
            let mut error = vec![0.0; values.len()];
            let again = compress(&values, &mut error, live);
            let masked: Vec<u8> = signs.iter().zip(live).map(|(sign, live)| sign & live).collect();
            prop_assert_eq!(again.bits, masked);
            let expected = if live.iter().all(|byte| *byte == 0) { 0.0 } else { 0.75 };
            prop_assert_eq!(again.scale, expected);
            prop_assert!(error == vec![0.0; values.len()]);
        }
    }
}
