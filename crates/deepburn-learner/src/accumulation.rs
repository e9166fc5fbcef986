//! Accumulation: the micro-batches of an optimizer step.
//!
//! As in DeepSpeed, a micro-batch ends with a call of [`Engine::step`]. Several backward passes
//! before this call, such as one for each loss, belong to the same micro-batch. The call that ends
//! the last micro-batch of a step is the accumulation boundary, at which the parameters are
//! updated.
//!
//! ```text
//! gradient_accumulation_steps: 2
//! backward ─► step     │ backward ─► backward ─► step     │ backward ─► step
//! micro-batch 1        │ micro-batch 2: boundary, update  │ micro-batch 1 of the next step
//! ```

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use burn::module::AutodiffModule;
use deepburn_ops::OptimizerOps;
use deepburn_zero::Training;
use tracing::warn;

use crate::batch_schedule::with_train_batch_size;
use crate::engine::Step;
use crate::source::StepSize;
use crate::step_state::{LossWeights, StepState};
use crate::{Engine, EngineError};

/// With one micro-batch per step, the warning about missing calls of `step` is logged at this
/// number of backward passes, because a micro-batch rarely has that many losses.
const MANY_LOSSES: usize = 16;

impl<B: OptimizerOps, M: AutodiffModule<Training<B>>> Engine<B, M> {
    /// Counts a backward pass of the current micro-batch. Logs a warning once if `step` seems to be
    /// called too rarely.
    ///
    /// Several backward passes are correct if a micro-batch has several losses. They also occur in
    /// a loop that calls `step` only after every `gradient_accumulation_steps` micro-batches, as in
    /// PyTorch, or never.
    pub(crate) fn count_backward(&mut self) {
        self.step_state.count_backward();
        let passes = self.step_state.passes();
        let steps = self.batch.gradient_accumulation_steps;
        let suspicious = if steps > 1 { steps } else { MANY_LOSSES };
        // A caller that sets boundaries by hand counts its micro-batches itself.
        if passes >= suspicious
            && self.overrides.boundary.is_none()
            && !self.reports.warned_of_excess
        {
            self.reports.warned_of_excess = true;
            warn!(
                "{passes} backward passes without a call of Engine::step count as one micro-batch, and \
                 gradient_accumulation_steps is {steps}: if they are several micro-batches, call Engine::step \
                 after each of them; it updates the parameters at the accumulation boundary"
            );
        }
    }

    /// Ends the current micro-batch.
    pub(crate) fn end_micro_batch(&mut self) {
        self.progress.micro_steps += 1;
        self.step_state.end_micro_batch();
    }

    /// Updates the parameters with the micro-batches since the last optimizer step, although there
    /// are fewer than `gradient_accumulation_steps`. Returns `None` if there is none.
    ///
    /// Call it on all ranks at the end of an epoch whose micro-batches do not fill the last step.
    /// The gradients of [`backward`](Self::backward) and [`train_pass`](Self::train_pass) become
    /// the mean over the micro-batches that there are. Weights that were passed to
    /// [`backward_weighted`](Self::backward_weighted) stay as they are. The step counts the samples
    /// of these micro-batches only.
    ///
    /// # Errors
    /// Returns the same errors as [`step`](Self::step).
    pub fn finish_accumulation(&mut self) -> Result<Option<Step>, EngineError> {
        self.check_group()?;
        self.check_passes("finish_accumulation")?;
        // `step` was not called for the last micro-batch, which has gradients nevertheless.
        if self.step_state.passes() > 0 {
            self.end_micro_batch();
        }
        let present = self.step_state.ended();
        if present == 0 {
            return Ok(None);
        }
        let planned = self.batch.gradient_accumulation_steps;
        let divisor = match self.step_state.weights() {
            // The losses were divided by the planned number.
            LossWeights::Equal => present as f64 / planned as f64,
            LossWeights::Given => 1.0,
            LossWeights::Undivided => present as f64,
        };
        // Full micro-batches are assumed. If the last one is smaller, the caller sets the number
        // with `size_next_step`.
        let samples = present * self.batch.micro_batch_size * self.batch.data_parallel_size;
        self.update(divisor, samples as u64).map(Some)
    }

    /// Returns the number of micro-batches that [`step`](Self::step) has ended since the last
    /// optimizer step.
    pub fn accumulated_micro_batches(&self) -> usize {
        self.step_state.ended()
    }

    /// Drops the accumulated gradients, gradients that a failed backward pass left behind, and an
    /// open forward pass whose backward pass was not run. The next micro-batch is the first one of
    /// a step.
    ///
    /// Uses no collective. All ranks must call it at the same point.
    pub fn zero_grad(&mut self) {
        self.states.zero_grad();
        self.states.close_training_pass();
        self.step_state = StepState::default();
    }

    /// Returns true if the call of [`step`](Self::step) that ends the current micro-batch updates
    /// the parameters. After a call of `step`, the current micro-batch is the next one.
    pub fn is_gradient_accumulation_boundary(&self) -> bool {
        let micro_batches = self.step_state.ended() + 1;
        self.overrides.boundary.unwrap_or(micro_batches >= self.batch.gradient_accumulation_steps)
    }

    /// Sets whether the next calls of [`step`](Self::step) are accumulation boundaries. With
    /// `None`, the number of micro-batches decides again.
    ///
    /// As in DeepSpeed, the weight of a loss does not change: it stays one over
    /// `gradient_accumulation_steps`, however many micro-batches there are.
    /// [`finish_accumulation`](Self::finish_accumulation) takes the mean over the micro-batches
    /// instead.
    pub fn set_gradient_accumulation_boundary(&mut self, boundary: Option<bool>) {
        self.overrides.boundary = boundary;
    }

    /// Changes the number of samples per optimizer step by changing the number of micro-batches.
    ///
    /// # Errors
    /// Returns an error if the size is not a multiple of the micro-batch size times the number of
    /// ranks, or in the middle of an accumulation.
    pub fn set_train_batch_size(&mut self, train_batch_size: usize) -> Result<(), EngineError> {
        // The losses so far were divided by the old number of micro-batches.
        if self.step_state.is_accumulating() {
            let (call, when) = ("set_train_batch_size", "in the middle of an accumulation");
            return Err(EngineError::Order { call, when });
        }
        self.batch = with_train_batch_size(self.batch, train_batch_size)?;
        self.states.set_micro_batches(self.batch.gradient_accumulation_steps);
        Ok(())
    }

    /// Sets the number of samples of the next optimizer step, over all ranks, and multiplies its
    /// learning rate by `lr_factor`. Both apply to that step only. All ranks must pass the same
    /// values.
    pub fn size_next_step(&mut self, samples: u64, lr_factor: f64) {
        self.overrides.size = Some(StepSize { samples, lr_factor });
    }

    /// Runs forward and backward passes without reducing their gradients.
    ///
    /// The next backward pass outside `run` reduces them together with its own. This saves
    /// communication, but sums over micro-batches before summing over ranks. The last bits of the
    /// gradients can therefore differ.
    ///
    /// # Errors
    /// Returns an error at stages 2 and 3, which do not keep complete gradients, and the errors of
    /// `run`.
    pub fn no_sync<T>(
        &mut self,
        run: impl FnOnce(&mut Self) -> Result<T, EngineError>,
    ) -> Result<T, EngineError> {
        self.check_group()?;
        let stage = self.states.stage();
        if stage.shards_gradients() {
            return Err(EngineError::NoSync { stage: stage.number() });
        }
        self.states.set_synchronize(false);
        // The setting is restored even if the caller catches a panic of `run`.
        let result = catch_unwind(AssertUnwindSafe(|| run(self)));
        self.states.set_synchronize(true);
        result.unwrap_or_else(|panic| resume_unwind(panic))
    }

    /// Sets the weights of the next loss.
    ///
    /// # Errors
    /// Returns an error after a failed backward pass, and if divided and undivided gradients would
    /// be added.
    pub(crate) fn accumulate_as(
        &mut self,
        call: &'static str,
        weights: LossWeights,
    ) -> Result<(), EngineError> {
        self.check_backward(call)?;
        if !self.step_state.admit(weights) {
            let when = "in an accumulation that mixes backward and train_pass";
            return Err(EngineError::Order { call, when });
        }
        Ok(())
    }

    /// Returns the divisor of the gradients of a complete accumulation, apart from the loss scale.
    pub(crate) fn divisor(&self) -> f64 {
        match self.step_state.weights() {
            LossWeights::Equal | LossWeights::Given => 1.0,
            LossWeights::Undivided => self.batch.gradient_accumulation_steps as f64,
        }
    }

    /// Returns an error if a backward pass failed after it had reported gradients. An optimizer
    /// step would use a part of them.
    pub(crate) fn check_backward(&self, call: &'static str) -> Result<(), EngineError> {
        if self.states.is_backward_incomplete() {
            let when = "after a backward pass that failed (zero_grad drops its gradients)";
            return Err(EngineError::Order { call, when });
        }
        Ok(())
    }

    /// Returns an error if a pass is open whose gradients an update would miss, or whose parameters
    /// it would change.
    pub(crate) fn check_passes(&self, call: &'static str) -> Result<(), EngineError> {
        self.check_backward(call)?;
        if self.states.has_open_pass() {
            let when = "between forward and backward, or after a forward whose backward never came \
                        (zero_grad drops such a pass)";
            return Err(EngineError::Order { call, when });
        }
        if self.states.is_read_by_open_pass() {
            let when = "while a forward pass of another engine that read this model waits for its \
                        backward (its zero_grad drops such a pass)";
            return Err(EngineError::Order { call, when });
        }
        Ok(())
    }
}
