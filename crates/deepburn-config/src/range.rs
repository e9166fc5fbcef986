//! The ranges of numbers that keys take.

use std::fmt;

/// Integers from `min` to `max`, both included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Integers {
    /// Smallest.
    pub min: i64,
    /// Largest.
    pub max: i64,
}

impl Integers {
    /// 0 and more.
    pub const COUNT: Self = Self { min: 0, max: i64::MAX };
    /// 1 and more.
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
    /// 0 and more.
    NotNegative,
    /// More than 0.
    Positive,
    /// 0 to 1, 1 excluded: decay factors of moments.
    Decay,
    /// 0 to 1, both included.
    Share,
}

impl Reals {
    /// Whether `number` is in the interval. NaN and infinities are in none.
    pub(crate) fn contain(self, number: f64) -> bool {
        number.is_finite()
            && match self {
                Self::Any => true,
                Self::NotNegative => number >= 0.0,
                Self::Positive => number > 0.0,
                Self::Decay => (0.0..1.0).contains(&number),
                Self::Share => (0.0..=1.0).contains(&number),
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
            Self::Share => "a number from 0 to 1",
        })
    }
}
