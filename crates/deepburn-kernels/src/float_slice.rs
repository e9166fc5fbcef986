//! Slices of numbers in their stored precision.
//!
//! Main type: [`FloatSlice`]. Kernels read gradients and the operands of products in their own
//! type. A 16-bit array needs half the memory traffic and is never widened as a whole. Callers that
//! need a copy in single precision use [`widen`].
//!
//! A [`FloatSlice`] is two words and a tag, and is copied freely. The macro `with_elements` calls a
//! generic kernel with the inner slice, so each kernel is compiled once for each format and has no
//! branch per element.

use crate::blocks::{check_lengths, map_blocks, vectorized};
use crate::element::Element;
use half::{bf16, f16};
use std::ops::Range;

/// A slice of `f32`, `f16` or `bf16` elements, borrowed from its owner.
#[derive(Debug, Clone, Copy)]
pub enum FloatSlice<'a> {
    /// Single precision.
    F32(&'a [f32]),
    /// Half precision: up to 65504, in steps of 2^-24 near zero.
    F16(&'a [f16]),
    /// The upper half of an `f32`: its range with 8 significant bits.
    Bf16(&'a [bf16]),
}

/// Evaluates an expression on the inner slice, for each element type.
macro_rules! with_elements {
    ($slice:expr, $elements:ident => $call:expr) => {
        match $slice {
            crate::FloatSlice::F32($elements) => $call,
            crate::FloatSlice::F16($elements) => $call,
            crate::FloatSlice::Bf16($elements) => $call,
        }
    };
}
pub(crate) use with_elements;

impl FloatSlice<'_> {
    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        with_elements!(self, elements => elements.len())
    }

    /// Returns true if there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the elements in `range`.
    ///
    /// # Panics
    /// Panics if `range` extends beyond the end.
    #[must_use]
    pub fn slice(self, range: Range<usize>) -> Self {
        match self {
            Self::F32(elements) => Self::F32(&elements[range]),
            Self::F16(elements) => Self::F16(&elements[range]),
            Self::Bf16(elements) => Self::Bf16(&elements[range]),
        }
    }

    /// Returns the elements from `start` on.
    ///
    /// # Panics
    /// Panics if there are fewer than `start` elements.
    #[must_use]
    pub fn starting_at(self, start: usize) -> Self {
        let len = self.len();
        self.slice(start..len)
    }
}

impl<'a> From<&'a [f32]> for FloatSlice<'a> {
    fn from(elements: &'a [f32]) -> Self {
        Self::F32(elements)
    }
}

impl<'a> From<&'a [f16]> for FloatSlice<'a> {
    fn from(elements: &'a [f16]) -> Self {
        Self::F16(elements)
    }
}

impl<'a> From<&'a [bf16]> for FloatSlice<'a> {
    fn from(elements: &'a [bf16]) -> Self {
        Self::Bf16(elements)
    }
}

/// Converts `values` to single precision, which is exact; NaN stays NaN.
///
/// # Panics
/// Panics if the slices differ in length.
pub fn widen(values: FloatSlice<'_>, out: &mut [f32]) {
    check_lengths("widen", ("out", out.len()), &[("values", values.len())]);
    with_elements!(values, values => {
        map_blocks(out, |start, out| vectorized!(widen_block(&values[start..], out)));
    });
}

/// Widens a block; inlined, so that it is compiled for each instruction set.
#[inline(always)]
fn widen_block<E: Element>(values: &[E], out: &mut [f32]) {
    for (out, value) in out.iter_mut().zip(values) {
        *out = value.widen();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{Held, SIZES, noise};
    use proptest::prelude::*;

    #[test]
    fn widened_elements_are_those_held() {
        for len in SIZES {
            for held in Held::all(&noise(len, 1)) {
                let grad = held.gradient();
                let mut out = vec![f32::NAN; len];
                widen(grad, &mut out);
                assert!((0..len).all(|i| out[i].to_bits() == grad.get(i).to_bits()));
            }
        }
    }

    #[test]
    #[should_panic(expected = "widen: `values` has 2 elements and `out` has 3")]
    fn slices_of_different_lengths_are_refused() {
        widen(FloatSlice::F32(&[0.0; 2]), &mut [0.0; 3]);
    }

    proptest! {
        #[test]
        fn a_slice_holds_the_elements_of_its_range(len in 1_usize..200, cut in 0.0..1.0) {
            let cut = (len as f64 * cut) as usize;
            for held in Held::all(&noise(len, 2)) {
                let grad = held.gradient();
                let tail = grad.slice(cut..len);
                prop_assert_eq!(tail.len(), len - cut);
                prop_assert_eq!(tail.is_empty(), cut == len);
                prop_assert!((cut..len).all(|i| tail.get(i - cut) == grad.get(i)));
            }
        }
    }
}
