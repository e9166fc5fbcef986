//! Accumulation: the micro-batches of an optimizer step.
//!
//! Gradients of micro-batches are added until [`Engine::step`] is called at an
//! accumulation boundary. The functions of this file count the micro-batches,
//! change their number, and drop what was accumulated.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use burn::module::AutodiffModule;
use deepburn_ops::OptimizerOps;
use deepburn_zero::Training;
use tracing::warn;

use crate::batch_schedule::with_train_batch_size;
use crate::source::StepSize;
use crate::{Engine, EngineError};

impl<B: OptimizerOps, M: AutodiffModule<Training<B>>> Engine<B, M> {
    /// Counts a backward pass. Logs a warning if there are more of them than
    /// micro-batches per step.
    ///
    /// More backward passes than micro-batches are correct if a micro-batch has
    /// several losses. They also occur in a loop that never calls `step` and
    /// therefore never updates the parameters. The warning is logged once.
    pub(crate) fn count_micro_batch(&mut self) {
        self.progress.accumulated += 1;
        let steps = self.batch.gradient_accumulation_steps;
        if self.progress.accumulated > steps && self.boundary.is_none() && !self.warned_of_excess {
            self.warned_of_excess = true;
            warn!(
                "{} backward passes since the last optimizer step, but gradient_accumulation_steps is {steps}: call \
                 Engine::step after the backward pass of every micro-batch",
                self.progress.accumulated
            );
        }
    }

    /// Drops the accumulated gradients, and an open forward pass whose backward
    /// pass was not run.
    pub fn zero_grad(&mut self) {
        self.states.zero_grad();
        self.states.close_training_pass();
        self.progress.accumulated = 0;
        self.undivided = false;
    }

    /// Returns true if [`step`](Self::step) will update the parameters after
    /// the current micro-batch.
    pub fn is_gradient_accumulation_boundary(&self) -> bool {
        let accumulated = self.progress.accumulated.max(1);
        self.boundary.unwrap_or(accumulated >= self.batch.gradient_accumulation_steps)
    }

    /// Sets whether the next steps are accumulation boundaries. With `None`,
    /// the number of micro-batches decides again.
    pub fn set_gradient_accumulation_boundary(&mut self, boundary: Option<bool>) {
        self.boundary = boundary;
    }

    /// Changes the number of samples per optimizer step by changing the number
    /// of micro-batches.
    ///
    /// # Errors
    ///
    /// Returns an error if the size is not a multiple of the micro-batch size
    /// times the number of ranks, or in the middle of an accumulation.
    pub fn set_train_batch_size(&mut self, train_batch_size: usize) -> Result<(), EngineError> {
        if self.progress.accumulated > 0 {
            let (call, when) = ("set_train_batch_size", "in the middle of an accumulation");
            return Err(EngineError::Order { call, when });
        }
        self.batch = with_train_batch_size(self.batch, train_batch_size)?;
        self.states.set_micro_batches(self.batch.gradient_accumulation_steps);
        Ok(())
    }

    /// Sets the number of samples of the next optimizer step, over all ranks,
    /// and multiplies its learning rate by `lr_factor`. Both apply to that step
    /// only. All ranks must pass the same values.
    pub fn size_next_step(&mut self, samples: u64, lr_factor: f64) {
        self.next_size = Some(StepSize { samples, lr_factor });
    }

    /// Runs forward and backward passes without reducing their gradients.
    ///
    /// The next backward pass outside `run` reduces them together with its own.
    /// This saves communication, but sums over micro-batches before summing
    /// over ranks. The last bits of the gradients can therefore differ.
    ///
    /// # Errors
    ///
    /// Returns an error at stages 2 and 3, which do not keep complete
    /// gradients, and the errors of `run`.
    pub fn no_sync<T>(
        &mut self,
        run: impl FnOnce(&mut Self) -> Result<T, EngineError>,
    ) -> Result<T, EngineError> {
        self.check_group()?;
        let stage = self.states.stage();
        if stage.shards_gradients() {
            return Err(EngineError::NoSync { stage: stage.number() });
        }
        self.states.set_synchronise(false);
        // The setting is restored even if the caller catches a panic of `run`.
        let result = catch_unwind(AssertUnwindSafe(|| run(self)));
        self.states.set_synchronise(true);
        result.unwrap_or_else(|panic| resume_unwind(panic))
    }

    /// Returns an error if divided and undivided gradients would be added,
    /// because no single divisor would be correct for the sum.
    pub(crate) fn accumulate_as(
        &mut self,
        call: &'static str,
        undivided: bool,
    ) -> Result<(), EngineError> {
        if self.progress.accumulated > 0 && self.undivided != undivided {
            let when = "in an accumulation that mixes backward and train_pass";
            return Err(EngineError::Order { call, when });
        }
        self.undivided = undivided;
        Ok(())
    }

    /// Returns the divisor of the accumulated gradients, apart from the loss
    /// scale.
    pub(crate) fn take_divisor(&mut self) -> f64 {
        let undivided = std::mem::take(&mut self.undivided);
        if undivided { self.batch.gradient_accumulation_steps as f64 } else { 1.0 }
    }
}
