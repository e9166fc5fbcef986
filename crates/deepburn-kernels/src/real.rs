//! The floating-point types of the generic reference implementations.
//!
//! A reference is run in `f64` to check the training kernel's rounding errors, and in `f32` if the
//! results must be bitwise identical.

use std::fmt::Debug;
use std::ops::{Add, Div, Mul, Neg, Sub};

/// A floating-point type of the reference implementations: `f32` to compare bits with the training
/// kernels, `f64` to compare with published numbers.
///
/// Rust rounds each operation of these types once, to nearest even, so references give the same
/// results on all machines.
pub trait Real:
    Copy
    + Debug
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
{
    /// The additive identity.
    const ZERO: Self;
    /// The multiplicative identity.
    const ONE: Self;
    /// Returns the nearest number of this type.
    fn from_f64(value: f64) -> Self;
    /// Returns the square root; NaN for numbers below 0.
    fn sqrt(self) -> Self;
}

/// The precision of training. Scalars are rounded from `f64` once.
impl Real for f32 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    fn from_f64(value: f64) -> Self {
        value as Self
    }
    fn sqrt(self) -> Self {
        self.sqrt()
    }
}

/// Precise enough that its rounding errors are negligible compared with the kernels'.
impl Real for f64 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    fn from_f64(value: f64) -> Self {
        value
    }
    fn sqrt(self) -> Self {
        self.sqrt()
    }
}
