//! The source of micro-batches.
//!
//! Main type: [`BatchSource`], one rank's part of the data. It returns the data of one complete
//! optimizer step at a time, because the number of micro-batches, the sequence length and the
//! learning-rate factor can differ from step to step.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::BoxError;

/// The optimizer step that is about to start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NextStep {
    /// The number of micro-batches of each rank.
    pub micro_batches: usize,
    /// The number of optimizer steps that updated the parameters so far, without skipped ones.
    pub applied_steps: u64,
}

/// The data of one rank for one optimizer step.
#[derive(Debug, Clone, PartialEq)]
pub struct StepBatches<T> {
    /// The micro-batches; their number is [`NextStep::micro_batches`].
    pub micro_batches: Vec<T>,
    /// The size of the step; `None` if it has `train_batch_size` samples.
    pub size: Option<StepSize>,
}

/// A step with its own number of samples.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepSize {
    /// The number of samples over all ranks and micro-batches.
    pub samples: u64,
    /// The factor of the schedule's learning rate.
    pub lr_factor: f64,
}

impl<T> From<Vec<T>> for StepBatches<T> {
    /// Returns a step of `train_batch_size` samples.
    fn from(micro_batches: Vec<T>) -> Self {
        Self { micro_batches, size: None }
    }
}

/// The batches of one evaluation, created one at a time. Every rank must have the same number.
pub type EvaluationStream<'a, T> = Box<dyn ExactSizeIterator<Item = Result<T, BoxError>> + 'a>;

/// One rank's part of the data: an endless stream of optimizer steps.
pub trait BatchSource<T> {
    /// Returns the data of the next step.
    ///
    /// # Errors
    /// Returns an error if the data cannot be read or is malformed.
    fn next_step(&mut self, next: NextStep) -> Result<StepBatches<T>, BoxError>;

    /// Returns the batches of one evaluation; `None` without evaluation data.
    ///
    /// # Errors
    /// Returns an error if the data cannot be read or is malformed.
    fn evaluation(&mut self) -> Result<Option<EvaluationStream<'_, T>>, BoxError>;

    /// Returns the position of the next step, to be saved in a checkpoint.
    fn position(&self) -> Value;

    /// Moves to a position that [`position`](Self::position) returned. If this run has more ranks
    /// than the run that saved the checkpoint, the additional ranks get rank 0's position.
    ///
    /// # Errors
    /// Returns an error if the position does not exist in this data.
    fn seek(&mut self, position: &Value) -> Result<(), BoxError>;
}
