//! Sets of pipeline stages.
//!
//! Main type: [`Holders`], the stages that hold a parameter or a tensor.

use std::fmt;

/// The largest number of stages: one bit each.
pub const MAX_STAGES: usize = 63;

/// A set of pipeline stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Holders(u64);

impl Holders {
    /// All stages, however many there are.
    pub const ALL: Self = Self(u64::MAX);

    /// Returns one stage.
    pub fn one(stage: usize) -> Self {
        Self(1 << stage)
    }

    /// Returns the set of these stages.
    pub fn of(stages: impl IntoIterator<Item = usize>) -> Self {
        Self(stages.into_iter().fold(0, |bits, stage| bits | 1 << stage))
    }

    pub(crate) fn of_bits(bits: u64) -> Self {
        Self(bits)
    }

    pub(crate) fn bits(self) -> u64 {
        self.0
    }

    /// Returns true if the stage is in the set.
    pub fn contains(self, stage: usize) -> bool {
        self.0 & 1 << stage != 0
    }

    /// Returns the stages in both sets.
    pub(crate) fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Returns true if there is no stage.
    pub(crate) fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Returns the first stage. The set is not empty.
    pub fn first(self) -> usize {
        self.0.trailing_zeros() as usize
    }

    /// Returns the last stage. The set is not empty.
    pub fn last(self) -> usize {
        63 - self.0.leading_zeros() as usize
    }

    /// Returns the last stage up to `stage`, or the first one after it.
    pub(crate) fn nearest_up_to(self, stage: usize) -> usize {
        // The subtraction would overflow for a stage above 63, so the stage is clamped.
        let up_to = Self(self.0 & (u64::MAX >> (63 - stage.min(63))));
        if up_to.is_empty() { self.first() } else { up_to.last() }
    }

    /// Returns the stages from `stage` on.
    pub(crate) fn from(self, stage: usize) -> Self {
        Self(self.0 & (u64::MAX << stage.min(63)))
    }

    /// Returns the first stage from `stage` on, or the last one before it.
    pub(crate) fn nearest_from(self, stage: usize) -> usize {
        let from = self.from(stage);
        if from.is_empty() { self.last() } else { from.first() }
    }

    /// Returns the stages in order.
    pub fn iter(self) -> impl Iterator<Item = usize> {
        (0..=MAX_STAGES).filter(move |stage| self.contains(*stage))
    }
}

impl fmt::Display for Holders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stages: Vec<_> = self.iter().map(|stage| stage.to_string()).collect();
        f.write_str(&stages.join(", "))
    }
}
