//! Observers of a training run.

use deepburn_monitor::GeneratedText;
use deepburn_zero::{Ledger, ModuleOperations};

use crate::BoxError;
use crate::evaluation::EvaluationProgress;
use crate::metrics::{EvalRow, StepRow};

/// An observer of a run. Every rank has its own hooks and calls them at the same steps, in the
/// order in which they were passed.
pub trait Hook {
    /// Called before each optimizer step.
    ///
    /// # Errors
    /// If it returns an error, the run ends on all ranks.
    fn before_step(&mut self, _step: u64) -> Result<(), BoxError> {
        Ok(())
    }

    /// Called after the step in which floating-point operations were counted.
    ///
    /// # Errors
    /// If it returns an error, the run ends on all ranks.
    fn after_count(
        &mut self,
        _operations: &[ModuleOperations],
        _row: &StepRow,
    ) -> Result<(), BoxError> {
        Ok(())
    }

    /// Called after each forward pass, backward pass and update, with the memory ledger of this
    /// rank.
    fn after_phase(&mut self, _ledger: &Ledger) {}

    /// Called after each optimizer step, with its record and the number of samples so far on all
    /// ranks.
    ///
    /// # Errors
    /// If it returns an error, the run ends on all ranks.
    fn after_step(&mut self, _row: &StepRow, _samples: u64) -> Result<(), BoxError> {
        Ok(())
    }

    /// Called after each batch of an evaluation.
    fn after_evaluation_batch(&mut self, _progress: EvaluationProgress) {}

    /// Called at the end of training, after the last step or an interruption.
    ///
    /// # Errors
    /// If it returns an error, the run ends on all ranks.
    fn finish(&mut self) -> Result<(), BoxError> {
        Ok(())
    }

    /// Called after each evaluation.
    ///
    /// # Errors
    /// If it returns an error, the run ends on all ranks.
    fn after_evaluation(&mut self, _row: &EvalRow, _samples: u64) -> Result<(), BoxError> {
        Ok(())
    }

    /// Called after each evaluation with the texts of [`Task::generate`](crate::Task::generate), if
    /// there are some.
    ///
    /// # Errors
    /// If it returns an error, the run ends on all ranks.
    fn after_generation(&mut self, _texts: &[GeneratedText]) -> Result<(), BoxError> {
        Ok(())
    }
}
