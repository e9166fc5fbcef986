//! The number formats of gradients and working copies.
//!
//! Main type: [`Element`]. Conversions are branch-free integer code that the compiler vectorizes
//! for any instruction set, so a single version gives identical bits on every machine. Tests
//! compare them with the scalar conversions of `half`.
//!
//! ```text
//!          sign  exponent  fraction   largest      smallest normal
//! f32      1     8         23         3.4e38       1.2e-38
//! f16      1     5         10         65504        6.1e-5
//! bf16     1     8         7          3.4e38       1.2e-38
//! ```

use half::{bf16, f16};
use std::fmt::Debug;

/// A stored number that kernels read and write as `f32`.
pub trait Element: Copy + Debug + Send + Sync + 'static {
    /// Converts to `f32` exactly; NaN stays NaN.
    fn widen(self) -> f32;
    /// Rounds to the nearest number, ties to even. Values that round beyond the largest finite
    /// number become infinite. NaN stays NaN and becomes quiet.
    fn narrow(value: f32) -> Self;

    /// Returns the elements as `f32`. Unless they already are `f32`, they are converted into
    /// `room`, which must have the same length.
    #[inline(always)]
    fn widen_all<'a>(elements: &'a [Self], room: &'a mut [f32]) -> &'a [f32] {
        for (wide, x) in room.iter_mut().zip(elements) {
            *wide = x.widen();
        }
        room
    }

    /// Rounds each value of a slice. Further elements of the longer slice are ignored.
    #[inline(always)]
    fn narrow_all(values: &[f32], elements: &mut [Self]) {
        for (x, value) in elements.iter_mut().zip(values) {
            *x = Self::narrow(*value);
        }
    }
}

impl Element for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }

    #[inline(always)]
    fn narrow(value: f32) -> Self {
        value
    }

    #[inline(always)]
    fn widen_all<'a>(elements: &'a [Self], _: &'a mut [f32]) -> &'a [f32] {
        elements
    }
}

/// The element type of a missing working copy: nothing is stored.
impl Element for () {
    #[inline(always)]
    fn widen(self) -> f32 {
        0.0
    }

    #[inline(always)]
    fn narrow(_: f32) -> Self {}
}

/// A bf16 number is the upper half of an f32, so widening is a shift, and rounding is an addition
/// to the lower half.
///
/// ```text
/// f32    s eeeeeeee fffffff ffffffffffffffff
/// bf16   s eeeeeeee fffffff                      the upper half, rounded to nearest even
/// ```
impl Element for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline(always)]
    fn narrow(value: f32) -> Self {
        let bits = value.to_bits();
        // Adds just under half a unit, or exactly half a unit if the remaining bits are odd. The
        // carry into the remaining bits, and into the exponent, performs the rounding.
        let odd = (bits >> 16) & 1;
        let rounded = bits.wrapping_add(0x7FFF + odd) >> 16;
        // Sets the quiet bit. Otherwise a NaN whose payload is only in the dropped bits would
        // become infinite.
        let quiet = (bits >> 16) | 0x40;
        Self::from_bits(if value.is_nan() { quiet } else { rounded } as u16)
    }
}

/// The difference between the exponents of an `f32` and an `f16`, in place.
const REBIAS: u32 = (127 - 15) << 23;
/// 2^-14, the smallest normal `f16`.
const F16_NORMAL: u32 = (127 - 14) << 23;
/// 2^16, from which on every number becomes infinite. Smaller numbers that round to it become
/// infinite by the carry.
const F16_OVERFLOW: u32 = (127 + 16) << 23;
/// 2^-24, the unit of subnormal `f16` numbers.
const F16_UNIT: f32 = 1.0 / (1 << 24) as f32;

/// The exponent of an f16 is 5 bits with bias 15. Normal numbers are converted by moving the
/// fraction and changing the bias, subnormal numbers by an f32 operation that is exact or rounds at
/// the right bit.
impl Element for f16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        let bits = u32::from(self.to_bits());
        let magnitude = bits & 0x7FFF;
        // The fraction is shifted to its position, and the exponent gets the larger bias.
        let normal = (magnitude << 13) + REBIAS;
        // Infinity and NaN have the largest exponent in both formats.
        let special = normal + REBIAS;
        // A subnormal f16 is an integer times 2^-24, which f32 represents exactly.
        let subnormal = (magnitude as i32 as f32 * F16_UNIT).to_bits();
        let finite = if magnitude < 0x0400 { subnormal } else { normal };
        let widened = if magnitude < 0x7C00 { finite } else { special };
        f32::from_bits(widened | (bits & 0x8000) << 16)
    }

    #[inline(always)]
    fn narrow(value: f32) -> Self {
        let bits = value.to_bits();
        let magnitude = bits & 0x7FFF_FFFF;
        // The addition rounds as for bf16, and the subtraction changes the bias of the exponent.
        let odd = (magnitude >> 13) & 1;
        let normal = magnitude.wrapping_sub(REBIAS).wrapping_add(0xFFF + odd) >> 13;
        // 0.5 has the same unit in the last place as a subnormal f16, so the sum is rounded to this
        // unit.
        let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5_f32.to_bits());
        let quiet = (magnitude >> 13) & 0x3FF | 0x7E00;
        let finite = if magnitude < F16_NORMAL { subnormal } else { normal };
        let number = if magnitude < F16_OVERFLOW { finite } else { 0x7C00 };
        let narrowed = if value.is_nan() { quiet } else { number };
        Self::from_bits((narrowed | (bits >> 16) & 0x8000) as u16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// For every 16-bit pattern: its `f32` value and the midpoint to the next larger value, each
    /// with its neighbors, for both signs.
    fn neighborhoods(widen: impl Fn(u16) -> f32) -> impl Iterator<Item = f32> {
        (0..=u16::MAX).flat_map(move |bits| {
            let here = widen(bits).to_bits();
            // As bit patterns, f32 numbers of one sign have the order of integers. The distance to
            // the next pattern is halved exactly, also between subnormal numbers.
            let next = widen(bits.wrapping_add(1)).to_bits();
            let middle = here.wrapping_add(next.wrapping_sub(here) / 2);
            let halfway =
                ((f64::from(f32::from_bits(here)) + f64::from(f32::from_bits(next))) / 2.0) as f32;
            [here, middle, halfway.to_bits()]
                .into_iter()
                .flat_map(|bits| [bits.wrapping_sub(1), bits, bits.wrapping_add(1)])
                .map(f32::from_bits)
        })
    }

    /// The limits of the formats: the largest numbers, numbers that round to infinity, the smallest
    /// numbers and their halves, and NaNs with payloads in the kept and in the dropped bits.
    fn edges() -> Vec<f32> {
        let bits = [0x7F80_0001, 0x7F80_1FFF, 0x7FC0_0000, 0x7FFF_FFFF, 0x7F81_0000, 0x0000_0001];
        let mut edges = bits.map(f32::from_bits).to_vec();
        for x in [65504.0, 65519.996, 65520.0, 65536.0, 1e30, f32::MAX, f32::INFINITY] {
            edges.push(x);
        }
        for power in [-149, -133, -134, -126, -25, -24, -15, -14] {
            let x = 2.0_f64.powi(power);
            edges.extend([x as f32, (x * 1.5) as f32, (x * (1.0 - 1e-7)) as f32]);
        }
        edges.iter().flat_map(|x| [*x, -*x]).collect()
    }

    #[test]
    fn f16_is_narrowed_as_half_does() {
        let all = neighborhoods(|bits| f16::from_bits(bits).to_f32()).chain(edges());
        for x in all {
            let expected = f16::from_f32_const(x).to_bits();
            assert_eq!(f16::narrow(x).to_bits(), expected, "{x:e} {:#x}", x.to_bits());
        }
    }

    #[test]
    fn bf16_is_narrowed_as_half_does() {
        let all = neighborhoods(|bits| bf16::from_bits(bits).to_f32()).chain(edges());
        for x in all {
            let expected = bf16::from_f32_const(x).to_bits();
            assert_eq!(bf16::narrow(x).to_bits(), expected, "{x:e} {:#x}", x.to_bits());
        }
    }

    #[test]
    fn every_16_bit_number_is_widened_and_comes_back() {
        for bits in 0..=u16::MAX {
            let (half, brain) = (f16::from_bits(bits), bf16::from_bits(bits));
            if half.is_nan() {
                assert!(half.widen().is_nan() && f16::narrow(half.widen()).is_nan());
            } else {
                assert_eq!(half.widen().to_bits(), half.to_f32_const().to_bits());
                assert_eq!(f16::narrow(half.widen()).to_bits(), bits);
            }
            if brain.is_nan() {
                assert!(brain.widen().is_nan() && bf16::narrow(brain.widen()).is_nan());
            } else {
                assert_eq!(brain.widen().to_bits(), brain.to_f32_const().to_bits());
                assert_eq!(bf16::narrow(brain.widen()).to_bits(), bits);
            }
        }
    }

    #[test]
    fn ties_go_to_the_even_number_and_overflow_to_infinity() {
        assert_eq!(f16::narrow(2049.0), f16::from_f32(2048.0));
        assert_eq!(f16::narrow(2051.0), f16::from_f32(2052.0));
        assert_eq!(f16::narrow(65519.996), f16::MAX);
        assert_eq!(f16::narrow(65520.0), f16::INFINITY);
        assert_eq!(f16::narrow(-65520.0), f16::NEG_INFINITY);
        assert_eq!(f16::narrow(F16_UNIT / 2.0).to_bits(), 0);
        assert_eq!(f16::narrow(F16_UNIT * 1.5).to_bits(), 2);
        assert_eq!(bf16::narrow(257.0), bf16::from_f32(256.0));
        assert_eq!(bf16::narrow(259.0), bf16::from_f32(260.0));
        assert_eq!(bf16::narrow(f32::MAX), bf16::INFINITY);
    }

    proptest! {
        #[test]
        fn every_f32_is_narrowed_as_half_does(bits in any::<u32>()) {
            let x = f32::from_bits(bits);
            prop_assert_eq!(f16::narrow(x).to_bits(), f16::from_f32_const(x).to_bits());
            prop_assert_eq!(bf16::narrow(x).to_bits(), bf16::from_f32_const(x).to_bits());
        }
    }
}
