//! The ranges of numbers that keys take.

use std::fmt;

/// Integers from `min` to `max`, both included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Integers {
    /// Minimum.
    pub min: i64,
    /// Maximum.
    pub max: i64,
}

impl Integers {
    /// At least 0.
    pub const COUNT: Self = Self { min: 0, max: i64::MAX };
    /// At least 1.
    pub const POSITIVE: Self = Self { min: 1, max: i64::MAX };
    /// Every integer.
    pub const ANY: Self = Self { min: i64::MIN, max: i64::MAX };
}

impl fmt::Display for Integers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.min, self.max) {
            (i64::MIN, i64::MAX) => f.write_str("an integer"),
            (min, i64::MAX) => write!(f, "an integer of at least {min}"),
            (min, max) => write!(f, "an integer from {min} to {max}"),
        }
    }
}

/// Finite numbers in an interval.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Reals {
    /// Every finite number.
    Any,
    /// At least 0.
    NotNegative,
    /// Above 0.
    Positive,
    /// 0 to 1, 1 excluded: decay factors of moments.
    Decay,
    /// 0 to 1, both included.
    Fraction,
}

impl Reals {
    /// Returns whether `number` is in the interval. NaN and infinities never are.
    pub(crate) fn contain(self, number: f64) -> bool {
        number.is_finite()
            && match self {
                Self::Any => true,
                Self::NotNegative => number >= 0.0,
                Self::Positive => number > 0.0,
                Self::Decay => (0.0..1.0).contains(&number),
                Self::Fraction => (0.0..=1.0).contains(&number),
            }
    }
}

impl fmt::Display for Reals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Any => "a finite number",
            Self::NotNegative => "a finite number of at least 0",
            Self::Positive => "a finite number above 0",
            Self::Decay => "a number from 0 to below 1",
            Self::Fraction => "a number from 0 to 1",
        })
    }
}
