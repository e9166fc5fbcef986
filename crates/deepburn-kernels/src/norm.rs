//! Sums of squares and the overflow check.
//!
//! Squares are exact in `f64` and are added in a fixed order:
//!
//! ```text
//! block of 16,384   16 lanes; element i of the block is added to lane i % 16
//!                   the lanes are added by halves
//! blocks            their sums are added by halves, as a binary tree
//! ```
//!
//! The order depends only on the length, so the sum is bitwise identical for every number of
//! threads and every instruction set. Its error grows with the logarithm of the number of blocks.

use crate::blocks::{TILE, each_block, vectorized};
use crate::element::Element;
use crate::float_slice::{FloatSlice, with_elements};

/// The number of running sums in a block: enough for two of the widest vectors, so that an addition
/// does not wait for the previous one.
const LANES: usize = 16;

/// The sum of squares of a gradient and whether it is finite, from one pass.
///
/// The norm is the square root of the sum. Sums of several gradients, or of several ranks, are
/// added before the root is taken.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GradientStats {
    /// The sum of the squared elements; NaN or infinite if an element is not finite.
    pub sum_of_squares: f64,
    /// Whether every element is finite.
    pub finite: bool,
}

impl GradientStats {
    /// Returns the stats from the sums of the blocks, in block order.
    ///
    /// The gradient is finite exactly if the sum is finite. The square of a finite `f32` is below
    /// 1.2e77, so the `f64` sum would overflow only with more than 1e231 elements, and an element
    /// that is not finite makes the sum NaN or infinite.
    pub(crate) fn of_sums(sums: &[f64]) -> Self {
        let sum_of_squares = pairwise(sums);
        Self { sum_of_squares, finite: sum_of_squares.is_finite() }
    }
}

/// Returns the sum of squares of a gradient, and whether all elements are finite, in one pass. The
/// result is bitwise identical for every number of threads.
pub fn gradient_stats(grad: FloatSlice<'_>) -> GradientStats {
    GradientStats::of_sums(&with_elements!(grad, elements => {
        each_block(elements.len(), |block| vectorized!(block_sum_of_squares(&elements[block])))
    }))
}

/// Returns the sum of the squared elements. The result is bitwise identical for every number of
/// threads.
pub fn sum_of_squares(values: &[f32]) -> f64 {
    gradient_stats(FloatSlice::F32(values)).sum_of_squares
}

/// Returns the sum of squares of a block, tile by tile: a tile of 16-bit elements is widened to f32
/// first.
#[inline(always)]
pub(crate) fn block_sum_of_squares<G: Element>(block: &[G]) -> f64 {
    let mut sums = [0.0; LANES];
    let mut room = [0.0; TILE];
    for tile in block.chunks(TILE) {
        add_squares(&mut sums, G::widen_all(tile, &mut room[..tile.len()]));
    }
    pairwise(&sums)
}

/// Adds the squares of a tile to the lanes. The last elements, which do not fill all lanes, start
/// at lane 0 again.
#[inline(always)]
fn add_squares(sums: &mut [f64; LANES], tile: &[f32]) {
    let (lanes, tail) = tile.as_chunks::<LANES>();
    for lane in lanes {
        // An `f32` squared is exact: the product has at most 48 significant bits.
        let squares = lane.map(|x| f64::from(x) * f64::from(x));
        for i in 0..LANES {
            sums[i] += squares[i];
        }
    }
    for (sum, x) in sums.iter_mut().zip(tail) {
        *sum += f64::from(*x) * f64::from(*x);
    }
}

/// Returns the sum of `sums` by pairwise summation, whose error grows with the logarithm of the
/// length. Returns 0 for an empty slice.
pub(crate) fn pairwise(sums: &[f64]) -> f64 {
    match sums {
        [] => 0.0,
        [sum] => *sum,
        _ => {
            let (left, right) = sums.split_at(sums.len().div_ceil(2));
            pairwise(left) + pairwise(right)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blocks::{BLOCK, PARALLEL_FROM};
    use crate::tests::{Held, SIZES, in_pool, noise, with_values_anywhere};
    use half::{bf16, f16};
    use proptest::prelude::*;

    /// Computes the same stats as [`gradient_stats`], one element after the other. The sum may
    /// differ in the last bits.
    fn gradient_stats_reference(grad: FloatSlice<'_>) -> GradientStats {
        let elements = || (0..grad.len()).map(|i| grad.get(i));
        GradientStats {
            sum_of_squares: elements().map(|x| f64::from(x).powi(2)).sum(),
            finite: elements().all(f32::is_finite),
        }
    }

    #[test]
    fn small_sums_are_exact() {
        assert_eq!(sum_of_squares(&[]), 0.0);
        assert_eq!(sum_of_squares(&[3.0]), 9.0);
        assert_eq!(sum_of_squares(&[3.0, -4.0]), 25.0);
        // 1^2 + ... + n^2 = n (n + 1) (2n + 1) / 6, below 2^53 and so exact in any order.
        for n in [7_u64, 8, 9, 1000, 20_000, 150_001] {
            let values = (1..=n).map(|x| x as f32).collect::<Vec<_>>();
            assert_eq!(sum_of_squares(&values), (n * (n + 1) * (2 * n + 1) / 6) as f64);
        }
    }

    #[test]
    fn the_largest_numbers_do_not_overflow() {
        let stats = gradient_stats(FloatSlice::F32(&vec![f32::MAX; 100_000]));
        assert!(stats.finite);
        let expected = f64::from(f32::MAX).powi(2) * 1e5;
        assert!((stats.sum_of_squares / expected - 1.0).abs() < 1e-12);
        assert!(gradient_stats(FloatSlice::F32(&[f32::MIN_POSITIVE, -f32::MAX, 1e-45])).finite);
    }

    #[test]
    fn the_number_of_threads_changes_no_bit() {
        for len in [PARALLEL_FROM - 1, PARALLEL_FROM, 1_000_007] {
            let values = noise(len, 5);
            let sums = [1, 2, 3].map(|n| in_pool(n, || sum_of_squares(&values)).to_bits());
            assert!(sums[0] == sums[1] && sums[1] == sums[2]);
            let naive = values.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
            // A million roundings of 1e-16 in the naive sum.
            assert!((f64::from_bits(sums[0]) / naive - 1.0).abs() < 1e-11);
        }
    }

    #[test]
    fn every_size_and_format_follows_the_reference() {
        for len in SIZES {
            for held in Held::all(&noise(len, 7)) {
                let stats = gradient_stats(held.gradient());
                let reference = gradient_stats_reference(held.gradient());
                assert!(stats.finite && reference.finite);
                // A sum of n numbers of one sign, in any order, has a relative error of at most n
                // 2^-53. Two orders differ by at most twice this error.
                let difference = (stats.sum_of_squares - reference.sum_of_squares).abs();
                assert!(
                    difference <= len as f64 * f64::EPSILON * reference.sum_of_squares,
                    "{len}: {difference:e}"
                );
            }
        }
    }

    #[test]
    fn the_instruction_set_changes_no_bit() {
        for len in [1, LANES + 1, TILE + 3, BLOCK] {
            let values = noise(len, 2);
            assert_eq!(sum_of_squares(&values), block_sum_of_squares(&values));
        }
    }

    #[test]
    fn sixteen_bit_squares_are_not_rounded_in_16_bits() {
        let stats = gradient_stats(FloatSlice::F16(&[f16::MAX, f16::from_bits(1)]));
        assert_eq!(stats.sum_of_squares, 65504.0_f64.powi(2) + 2.0_f64.powi(-48));
        let stats = gradient_stats(FloatSlice::Bf16(&[bf16::MAX]));
        assert_eq!(stats.sum_of_squares, f64::from(bf16::MAX).powi(2));
        assert!(stats.finite);
    }

    #[test]
    fn one_bad_element_among_a_million_is_found() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for place in [0, 1, BLOCK - 1, BLOCK, 500_000, 1_000_006] {
                let mut values = noise(1_000_007, 1);
                values[place] = bad;
                for held in Held::all(&values) {
                    assert!(!gradient_stats(held.gradient()).finite);
                }
            }
        }
    }

    proptest! {
        #[test]
        fn stats_see_every_bad_element((values, bad) in with_values_anywhere(300)) {
            for held in Held::all(&values) {
                prop_assert_eq!(gradient_stats(held.gradient()).finite, bad.is_empty());
                prop_assert_eq!(gradient_stats_reference(held.gradient()).finite, bad.is_empty());
            }
        }

        #[test]
        fn zero_padding_leaves_a_short_sum_alone(len in 0_usize..200, padding in 0_usize..50) {
            let mut values = noise(len, 9);
            let sum = sum_of_squares(&values);
            values.resize(len + padding, 0.0);
            prop_assert_eq!(sum_of_squares(&values), sum);
        }
    }
}
