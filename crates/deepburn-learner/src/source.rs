//! Where micro-batches come from.
//!
//! Main type: [`BatchSource`], one rank's share of the data. It is asked for whole optimizer steps,
//! because what a step has may differ from step to step: how many micro-batches, how long their
//! samples are, and which learning rate goes with them.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::train::OutsideError;

/// An optimizer step that is about to begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NextStep {
    /// Micro-batches that each rank takes.
    pub micro_batches: usize,
    /// Optimizer steps that have updated the parameters so far; skipped ones do not count.
    pub applied_steps: u64,
}

/// What one rank learns from in one optimizer step.
#[derive(Debug, Clone, PartialEq)]
pub struct StepBatches<T> {
    /// As many as were asked for, on every rank.
    pub micro_batches: Vec<T>,
    /// How the step differs from one of `train_batch_size` samples; `None` where it does not.
    pub size: Option<StepSize>,
}

/// A step whose number of samples is its own.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepSize {
    /// Samples over all ranks and micro-batches.
    pub samples: u64,
    /// Factor of the schedule's learning rate.
    pub lr_factor: f64,
}

impl<T> From<Vec<T>> for StepBatches<T> {
    /// A step of `train_batch_size` samples.
    fn from(micro_batches: Vec<T>) -> Self {
        Self { micro_batches, size: None }
    }
}

/// The batches of one evaluation, each made when it is asked for, as many on every rank.
pub type EvaluationStream<'a, T> = Box<dyn ExactSizeIterator<Item = Result<T, OutsideError>> + 'a>;

/// One rank's share of the data: an endless stream of steps.
pub trait BatchSource<T> {
    /// The next step.
    ///
    /// # Errors
    /// What is wrong with the data.
    fn next_step(&mut self, next: NextStep) -> Result<StepBatches<T>, OutsideError>;

    /// Returns the batches of one evaluation; `None` without evaluation data.
    ///
    /// # Errors
    /// What is wrong with the data.
    fn evaluation(&mut self) -> Result<Option<EvaluationStream<'_, T>>, OutsideError>;

    /// Where the next step begins, to be saved with the model.
    fn position(&self) -> Value;

    /// Goes to what [`position`](Self::position) gave on this rank or, where this run has more ranks
    /// than that one, on rank 0.
    ///
    /// # Errors
    /// A position that this data does not have.
    fn seek(&mut self, position: &Value) -> Result<(), OutsideError>;
}
