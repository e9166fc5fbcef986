//! A gradient in the precision that it arrived in.
//!
//! Main type: [`Gradient`]. Kernels read it as it is, so that a 16-bit gradient costs half the
//! traffic and is never widened into a buffer of its own. [`widen`] is for those that need one.

use crate::blocks::{check_lengths, map_blocks};
use crate::element::Element;
use half::{bf16, f16};
use std::ops::Range;

/// The elements of a gradient, in the format that they are held in.
#[derive(Debug, Clone, Copy)]
pub enum Gradient<'a> {
    /// Single precision.
    F32(&'a [f32]),
    /// Half precision: up to 65504, in steps of 2^-24 near zero.
    F16(&'a [f16]),
    /// The upper half of an `f32`: its range with 8 significant bits.
    Bf16(&'a [bf16]),
}

/// Evaluates an expression on a gradient's slice, whatever its elements are.
macro_rules! with_elements {
    ($gradient:expr, $elements:ident => $call:expr) => {
        match $gradient {
            crate::Gradient::F32($elements) => $call,
            crate::Gradient::F16($elements) => $call,
            crate::Gradient::Bf16($elements) => $call,
        }
    };
}
pub(crate) use with_elements;

impl Gradient<'_> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        with_elements!(self, elements => elements.len())
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Some of the elements.
    ///
    /// # Panics
    /// When `range` reaches beyond the end.
    #[must_use]
    pub fn slice(self, range: Range<usize>) -> Self {
        match self {
            Self::F32(elements) => Self::F32(&elements[range]),
            Self::F16(elements) => Self::F16(&elements[range]),
            Self::Bf16(elements) => Self::Bf16(&elements[range]),
        }
    }

    /// One element, by `half`'s scalar conversion: what the references read.
    pub(crate) fn get(&self, index: usize) -> f32 {
        match self {
            Self::F32(elements) => elements[index],
            Self::F16(elements) => elements[index].to_f32_const(),
            Self::Bf16(elements) => elements[index].to_f32_const(),
        }
    }
}

impl<'a> From<&'a [f32]> for Gradient<'a> {
    fn from(elements: &'a [f32]) -> Self {
        Self::F32(elements)
    }
}

impl<'a> From<&'a [f16]> for Gradient<'a> {
    fn from(elements: &'a [f16]) -> Self {
        Self::F16(elements)
    }
}

impl<'a> From<&'a [bf16]> for Gradient<'a> {
    fn from(elements: &'a [bf16]) -> Self {
        Self::Bf16(elements)
    }
}

/// The gradient's numbers in single precision, which is exact.
///
/// # Panics
/// When the slices differ in length.
pub fn widen(grad: Gradient<'_>, out: &mut [f32]) {
    check_lengths("widen", ("out", out.len()), &[("grad", grad.len())]);
    with_elements!(grad, grad => {
        map_blocks(out, grad, widen_block);
    });
}

#[inline(always)]
fn widen_block<G: Element>(out: &mut [f32], grad: &[G]) {
    for (out, g) in out.iter_mut().zip(grad) {
        *out = g.widen();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Held, SIZES, noise};
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
    #[should_panic(expected = "widen: `grad` has 2 elements and `out` has 3")]
    fn slices_of_different_lengths_are_refused() {
        widen(Gradient::F32(&[0.0; 2]), &mut [0.0; 3]);
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
