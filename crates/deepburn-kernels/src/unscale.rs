//! The loss scale taken out of a gradient, with what has to be known of the result.
//!
//! For gradients that are kept unscaled, in single precision. Where the optimizer is the next to
//! read them, its `grad_scale` does the same without this pass.

use crate::blocks::{check_lengths, map_blocks};
use crate::element::Element;
use crate::float_slice::{FloatSlice, with_elements};
use crate::norm::{GradientStats, block_sum_of_squares, gradient_stats_reference};

/// What [`unscale`] does, one thing after the other.
///
/// # Panics
/// When the slices differ in length.
pub fn unscale_reference(grad: FloatSlice<'_>, scale: f32, out: &mut [f32]) -> GradientStats {
    check_lengths("unscale", ("grad", grad.len()), &[("out", out.len())]);
    for (i, out) in out.iter_mut().enumerate() {
        *out = grad.get(i) * scale;
    }
    gradient_stats_reference(FloatSlice::F32(out))
}

/// `out = grad * scale` in single precision and the stats of `out`, in one pass.
///
/// The stats are those that [`gradient_stats`](crate::gradient_stats) finds in `out`, to the bit: a
/// product that overflows is not finite, whatever it is made of.
///
/// # Panics
/// When the slices differ in length.
pub fn unscale(grad: FloatSlice<'_>, scale: f32, out: &mut [f32]) -> GradientStats {
    check_lengths("unscale", ("grad", grad.len()), &[("out", out.len())]);
    let sums = with_elements!(grad, grad => {
        map_blocks(out, grad, #[inline(always)] |out, grad| unscale_block(out, grad, scale))
    });
    GradientStats::of_sums(&sums)
}

/// The squares are summed while the block is in the nearest cache.
#[inline(always)]
fn unscale_block<G: Element>(out: &mut [f32], grad: &[G], scale: f32) -> f64 {
    for (out, g) in out.iter_mut().zip(grad) {
        *out = g.widen() * scale;
    }
    block_sum_of_squares(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blocks::PARALLEL_FROM;
    use crate::norm::gradient_stats;
    use crate::testing::{Held, SIZES, in_pool, noise, with_values_anywhere};
    use proptest::prelude::*;

    #[test]
    fn every_size_and_format_follows_the_reference() {
        for len in SIZES {
            for held in Held::all(&noise(len, 1)) {
                let (mut out, mut expected) = (vec![f32::NAN; len], vec![f32::NAN; len]);
                let stats = unscale(held.gradient(), 1.0 / 3.0, &mut out);
                let reference = unscale_reference(held.gradient(), 1.0 / 3.0, &mut expected);
                assert!(out == expected && stats.finite);
                assert_eq!(stats, gradient_stats(FloatSlice::F32(&out)));
                // A sum of n numbers of one sign, in any order, is wrong by n 2^-53 of itself at most:
                // twice that between two orders.
                let difference = stats.sum_of_squares - reference.sum_of_squares;
                assert!(difference.abs() <= len as f64 * f64::EPSILON * reference.sum_of_squares);
            }
        }
    }

    #[test]
    fn the_number_of_threads_changes_no_bit() {
        for held in Held::all(&noise(3 * PARALLEL_FROM + 1, 5)) {
            let run = |threads| {
                let mut out = vec![0.0; held.gradient().len()];
                let stats = in_pool(threads, || unscale(held.gradient(), 0.1, &mut out));
                (out, stats.sum_of_squares.to_bits())
            };
            let one = run(1);
            assert!(one == run(2) && one == run(3));
        }
    }

    #[test]
    fn a_product_that_overflows_is_not_finite() {
        let mut out = [0.0];
        assert!(!unscale(FloatSlice::F32(&[1e30]), 1e30, &mut out).finite);
        assert_eq!(out, [f32::INFINITY]);
        // 65504 overflows in half precision at the least growth; here it is a number like any.
        assert!(unscale(FloatSlice::F16(&[half::f16::MAX]), 1e30, &mut out).finite);
        assert!(!unscale(FloatSlice::F32(&[1.0]), f32::NAN, &mut out).finite);
    }

    #[test]
    #[should_panic(expected = "unscale: `out` has 2 elements and `grad` has 3")]
    fn slices_of_different_lengths_are_refused() {
        unscale(FloatSlice::F32(&[0.0; 3]), 1.0, &mut [0.0; 2]);
    }

    proptest! {
        #[test]
        fn a_bad_element_is_seen_and_stays_alone((grad, bad) in with_values_anywhere(300)) {
            for held in Held::all(&grad) {
                let mut out = vec![0.0; grad.len()];
                let stats = unscale(held.gradient(), 0.5, &mut out);
                prop_assert_eq!(stats.finite, bad.is_empty());
                for (i, x) in out.iter().enumerate() {
                    prop_assert_eq!(x.is_finite(), !bad.contains(&i));
                }
            }
        }
    }
}
