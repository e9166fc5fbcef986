//! The state of the optimizer step in progress.
//!
//! Main type: [`StepState`], how far the micro-batches of the step are:
//!
//! ```text
//! Idle ──── backward ────────────► InMicroBatch ──┐ backward: another loss
//!  ▲                                  │    ▲ ▲────┘
//!  │                             step │    │ backward
//!  │                                  ▼    │
//!  │                         BetweenMicroBatches ──┐ step: a micro-batch whose gradients are 0
//!  │                                        ▲──────┘
//!  └── step at a boundary, finish_accumulation, zero_grad: from any state
//! ```
//!
//! Only `step` and `finish_accumulation` update the parameters, and neither does in `Idle`, where
//! there is nothing to apply.
//!
//! Two conditions are independent of the state. An open forward pass and a failed backward pass are
//! states of the model, which other engines may share, so that `ModelStates` knows them; every call
//! asks it (`Engine::check_passes`). A failed collective ends the run in any state, and also within
//! an evaluation, which borrows the engine (`Engine::check_group`).

use std::num::NonZeroUsize;

use serde::{Deserialize, Serialize};

use crate::source::StepSize;

/// The micro-batches since the last optimizer step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StepState {
    /// There are no gradients.
    Idle {
        /// The weights of the losses of the last step. Checkpoints store them, but nothing depends
        /// on them.
        weights: LossWeights,
    },
    /// The current micro-batch has gradients, and `step` has not ended it.
    InMicroBatch {
        /// The micro-batches that `step` has ended.
        ended: usize,
        /// The backward passes of the current micro-batch.
        passes: NonZeroUsize,
        /// The weights of all losses so far.
        weights: LossWeights,
    },
    /// `step` has ended the last micro-batch, and the next one has no gradients yet.
    BetweenMicroBatches {
        /// The micro-batches that `step` has ended.
        ended: NonZeroUsize,
        /// The weights of all losses so far.
        weights: LossWeights,
    },
}

/// The weights of the losses in an accumulation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum LossWeights {
    /// `backward` divided each loss by the number of micro-batches per step.
    #[default]
    Equal,
    /// At least one weight was passed to `backward_weighted`.
    Given,
    /// `train_pass` does not see the losses, so the step divides the gradients by the number of
    /// micro-batches.
    Undivided,
}

/// What the caller has set for the next calls, instead of the configuration.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct StepOverrides {
    /// Whether calls of `step` are accumulation boundaries, until it is unset; `None` counts the
    /// micro-batches.
    pub(crate) boundary: Option<bool>,
    /// The number of samples and the learning-rate factor of the next optimizer step.
    pub(crate) size: Option<StepSize>,
    /// The learning rate of the next optimizer step.
    pub(crate) rate: Option<f64>,
}

impl Default for StepState {
    fn default() -> Self {
        Self::Idle { weights: LossWeights::default() }
    }
}

impl StepState {
    /// Returns the state after `ended` micro-batches and `passes` backward passes of the next one.
    pub(crate) fn new(ended: usize, passes: usize, weights: LossWeights) -> Self {
        match (NonZeroUsize::new(ended), NonZeroUsize::new(passes)) {
            (_, Some(passes)) => Self::InMicroBatch { ended, passes, weights },
            (Some(ended), None) => Self::BetweenMicroBatches { ended, weights },
            (None, None) => Self::Idle { weights },
        }
    }

    /// Returns true if there are gradients for the next optimizer step.
    pub(crate) fn is_accumulating(self) -> bool {
        !matches!(self, Self::Idle { .. })
    }

    /// Returns the number of micro-batches that `step` has ended.
    pub(crate) fn ended(self) -> usize {
        match self {
            Self::Idle { .. } => 0,
            Self::InMicroBatch { ended, .. } => ended,
            Self::BetweenMicroBatches { ended, .. } => ended.get(),
        }
    }

    /// Returns the number of backward passes of the current micro-batch.
    pub(crate) fn passes(self) -> usize {
        match self {
            Self::InMicroBatch { passes, .. } => passes.get(),
            Self::Idle { .. } | Self::BetweenMicroBatches { .. } => 0,
        }
    }

    /// Returns the weights of the losses.
    pub(crate) fn weights(self) -> LossWeights {
        match self {
            Self::Idle { weights }
            | Self::InMicroBatch { weights, .. }
            | Self::BetweenMicroBatches { weights, .. } => weights,
        }
    }

    /// Sets the weights of the next loss. Returns false, and changes nothing, if divided and
    /// undivided gradients would be added: no single divisor would be correct for the sum.
    #[must_use]
    pub(crate) fn admit(&mut self, next: LossWeights) -> bool {
        let merged = match (*self, self.weights()) {
            (Self::Idle { .. }, _) => next,
            (_, earlier) if earlier == next => next,
            (_, LossWeights::Undivided) => return false,
            _ if next == LossWeights::Undivided => return false,
            // The divisor of an incomplete step cannot correct only the losses that `backward`
            // divided.
            _ => LossWeights::Given,
        };
        *self = Self::new(self.ended(), self.passes(), merged);
        true
    }

    /// Counts a backward pass of the current micro-batch.
    pub(crate) fn count_backward(&mut self) {
        *self = Self::new(self.ended(), self.passes() + 1, self.weights());
    }

    /// Ends the current micro-batch, which may have no gradients if an earlier one has some.
    pub(crate) fn end_micro_batch(&mut self) {
        assert!(self.is_accumulating(), "a step without gradients has no micro-batch");
        *self = Self::new(self.ended() + 1, 0, self.weights());
    }

    /// Ends the optimizer step, applied or skipped.
    pub(crate) fn end_step(&mut self) {
        *self = Self::Idle { weights: self.weights() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the state after `ended` micro-batches and `passes` backward passes with equal
    /// weights.
    fn state(ended: usize, passes: usize) -> StepState {
        StepState::new(ended, passes, LossWeights::Equal)
    }

    #[test]
    fn calls_move_through_the_states_of_a_step() {
        let mut now = StepState::default();
        assert!(!now.is_accumulating());
        now.count_backward();
        now.count_backward();
        assert_eq!(now, state(0, 2));
        now.end_micro_batch();
        assert_eq!((now, now.ended(), now.passes()), (state(1, 0), 1, 0));
        // A micro-batch without gradients.
        now.end_micro_batch();
        now.count_backward();
        assert_eq!((now, now.ended(), now.passes()), (state(2, 1), 2, 1));
        now.end_step();
        assert_eq!(now, StepState::default());
    }

    #[test]
    fn divided_and_undivided_gradients_are_not_added() {
        use LossWeights::{Equal, Given, Undivided};
        for (earlier, next, merged) in [
            (Equal, Equal, Some(Equal)),
            (Equal, Given, Some(Given)),
            (Equal, Undivided, None),
            (Given, Equal, Some(Given)),
            (Given, Given, Some(Given)),
            (Given, Undivided, None),
            (Undivided, Equal, None),
            (Undivided, Given, None),
            (Undivided, Undivided, Some(Undivided)),
        ] {
            let accumulating = StepState::new(1, 0, earlier);
            let mut now = accumulating;
            assert_eq!(now.admit(next), merged.is_some(), "{earlier:?}, {next:?}");
            assert_eq!(now.weights(), merged.unwrap_or(earlier));
            // The weights of an earlier step do not matter.
            let mut idle = StepState::Idle { weights: earlier };
            assert!(idle.admit(next));
            assert_eq!(idle, StepState::Idle { weights: next });
        }
    }
}
