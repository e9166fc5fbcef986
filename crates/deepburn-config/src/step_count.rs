//! A number of optimizer steps that may depend on the length of the run.

use serde::Serialize;

/// A number of optimizer steps, absolute or as a fraction of all steps of the run.
///
/// ```
/// use deepburn_config::StepCount;
///
/// assert_eq!(StepCount::Steps(10).of(95), 10);
/// // Rounded up, as in transformers.
/// assert_eq!(StepCount::Ratio(0.1).of(95), 10);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(untagged)]
pub enum StepCount {
    /// A number of steps.
    Steps(usize),
    /// A fraction of the run's steps, from 0 to 1.
    Ratio(f64),
}

impl StepCount {
    /// Returns the number of steps in a run of `total_steps` steps. A fraction is rounded up.
    pub fn of(self, total_steps: usize) -> usize {
        match self {
            Self::Steps(steps) => steps,
            // The product is not corrected for rounding, so 0.07 of 100 steps are 8, as in
            // transformers.
            Self::Ratio(ratio) => (total_steps as f64 * ratio).ceil() as usize,
        }
    }

    /// Returns whether the number is 0 in every run.
    pub(crate) fn is_zero(self) -> bool {
        matches!(self, Self::Steps(0) | Self::Ratio(0.0))
    }
}
