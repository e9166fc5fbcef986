//! The 16-bit working copy of the master weights, which forward and backward passes use (mixed
//! precision, Micikevicius et al. 2018).
//!
//! Main type: [`WorkingCopy`]. [`cast`] fills a copy from the master weights. An optimizer step
//! with a working copy writes it in the same pass, so the master weights are read only once.
//!
//! A working copy takes two bytes per element. The master weights are never computed from it, so
//! its rounding errors do not accumulate over steps.

use crate::blocks::{check_lengths, map_blocks, vectorized};
use crate::element::Element;
use half::{bf16, f16};

/// The memory of the 16-bit copy of an owned slice, with its format.
#[derive(Debug)]
pub enum WorkingCopy<'a> {
    /// Half precision.
    F16(&'a mut [f16]),
    /// The upper half of an `f32`.
    Bf16(&'a mut [bf16]),
}

impl WorkingCopy<'_> {
    /// Returns the number of elements.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::F16(elements) => elements.len(),
            Self::Bf16(elements) => elements.len(),
        }
    }
}

impl<'a> From<&'a mut [f16]> for WorkingCopy<'a> {
    fn from(elements: &'a mut [f16]) -> Self {
        Self::F16(elements)
    }
}

impl<'a> From<&'a mut [bf16]> for WorkingCopy<'a> {
    fn from(elements: &'a mut [bf16]) -> Self {
        Self::Bf16(elements)
    }
}

/// Rounds values to nearest, ties to even. Values that round beyond the largest finite number
/// become infinite, and NaN stays NaN.
///
/// # Panics
/// Panics if the slices differ in length.
pub fn cast(values: &[f32], to: WorkingCopy<'_>) {
    check_lengths("cast", ("values", values.len()), &[("to", to.len())]);
    match to {
        WorkingCopy::F16(to) => cast_all(values, to),
        WorkingCopy::Bf16(to) => cast_all(values, to),
    }
}

/// Rounds values to one format.
fn cast_all<E: Element>(values: &[f32], to: &mut [E]) {
    map_blocks(to, |start, to| vectorized!(E::narrow_all(&values[start..], to)));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{SIZES, in_pool, noise, with_values_anywhere};
    use proptest::prelude::*;

    /// Computes the same result as [`cast`], one number at a time with the conversion of `half`.
    fn cast_reference(values: &[f32], to: WorkingCopy<'_>) {
        match to {
            WorkingCopy::F16(to) => {
                for (to, x) in to.iter_mut().zip(values) {
                    *to = f16::from_f32_const(*x);
                }
            }
            WorkingCopy::Bf16(to) => {
                for (to, x) in to.iter_mut().zip(values) {
                    *to = bf16::from_f32_const(*x);
                }
            }
        }
    }

    /// Returns both copies of `values`, as bits.
    fn copies(values: &[f32], cast: impl Fn(&[f32], WorkingCopy<'_>)) -> (Vec<u16>, Vec<u16>) {
        let (mut half, mut brain) = (vec![f16::ONE; values.len()], vec![bf16::ONE; values.len()]);
        cast(values, WorkingCopy::F16(&mut half));
        cast(values, WorkingCopy::Bf16(&mut brain));
        (half.iter().map(|x| x.to_bits()).collect(), brain.iter().map(|x| x.to_bits()).collect())
    }

    #[test]
    fn every_size_is_cast_as_the_reference_does() {
        for len in SIZES {
            // Magnitudes up to 70 thousand, some of which overflow an f16.
            let values = noise(len, 1).iter().map(|x| x * 7e4).collect::<Vec<_>>();
            assert!(copies(&values, cast) == copies(&values, cast_reference), "{len}");
        }
    }

    #[test]
    fn the_number_of_threads_changes_no_bit() {
        let values = noise(1_000_007, 3);
        let [one, two, three] = [1, 2, 3].map(|n| in_pool(n, || copies(&values, cast)));
        assert!(one == two && one == three);
    }

    #[test]
    #[should_panic(expected = "cast: `to` has 2 elements and `values` has 3")]
    fn slices_of_different_lengths_are_refused() {
        cast(&[0.0; 3], WorkingCopy::F16(&mut [f16::ZERO; 2]));
    }

    proptest! {
        #[test]
        fn a_bad_number_stays_alone((values, bad) in with_values_anywhere(300)) {
            prop_assert_eq!(copies(&values, cast), copies(&values, cast_reference));
            let (half, brain) = copies(&values, cast);
            for (i, x) in values.iter().enumerate() {
                let (half, brain) = (f16::from_bits(half[i]), bf16::from_bits(brain[i]));
                prop_assert_eq!(half.is_finite() && brain.is_finite(), !bad.contains(&i));
                prop_assert!(half.is_nan() == x.is_nan() && brain.is_nan() == x.is_nan());
            }
        }
    }
}
