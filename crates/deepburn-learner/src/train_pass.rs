//! Training passes in which the caller runs the backward pass.
//!
//! Frameworks on top of Burn, such as burn-train with its `TrainStep`, pass a closure that computes
//! a loss and calls `backward` on it. [`Engine::train_pass`] runs such a closure as one
//! micro-batch.
//!
//! The first gradient that autodiff reports is the start of the backward pass
//! (`deepburn-zero/src/gradient/backward_watch.rs`). The engine never sees the loss, so the step
//! divides the accumulated gradients by the number of micro-batches.
//! [`Engine::finish_accumulation`] ends an accumulation that stays incomplete, and divides by the
//! number that there are.

use std::time::Instant;

use burn::module::AutodiffModule;
use deepburn_ops::OptimizerOps;
use deepburn_zero::{Pass, Training};
use tracing::trace_span;

use crate::engine::guard;
use crate::step_state::LossWeights;
use crate::{Engine, EngineError};

impl<B: OptimizerOps, M: AutodiffModule<Training<B>>> Engine<B, M> {
    /// Runs a micro-batch whose forward and backward passes are both in `run`.
    ///
    /// It replaces [`forward`](Self::forward) and [`backward`](Self::backward);
    /// [`step`](Self::step) follows as usual. `run` must call `backward` exactly once, on the mean
    /// loss of the micro-batch.
    ///
    /// Each gradient is reduced as soon as it is final. The container that autodiff returns
    /// therefore contains markers instead of gradients
    /// ([`ZeroTensor::Reduced`](deepburn_zero::ZeroTensor::Reduced)). Autodiff reports the gradient
    /// of a parameter only once per pass. A second call of `backward` is an error, because its
    /// gradients would be lost.
    ///
    /// The engine does not see the loss, so it cannot divide it by the number of micro-batches.
    /// Instead, the step divides the accumulated gradients by this number. If the number is a power
    /// of two, the division is exact and the result is bit-identical.
    ///
    /// A micro-batch with several losses calls this once for each of them, or adds them, before it
    /// calls [`step`](Self::step).
    ///
    /// # Errors
    /// Returns the same errors as [`forward`](Self::forward). Also returns an error in fp16 (the
    /// loss would have to be scaled), if `run` does not call `backward` exactly once, or if the
    /// accumulation was started with `backward`. After an error, call
    /// [`zero_grad`](Self::zero_grad) before the next pass, because some gradients may have been
    /// added.
    pub fn train_pass<T>(&mut self, run: impl FnOnce(&M) -> T) -> Result<T, EngineError> {
        self.check_group()?;
        if self.scaler.is_dynamic() || self.scaler.scale() != 1.0 {
            return Err(EngineError::ScaledLoss);
        }
        self.accumulate_as("train_pass", LossWeights::Undivided)?;
        self.module = self.note(self.states.start_training_pass(self.module.clone()))?;
        let _context = self.states.enter(Some(Pass::Train));
        // The engine cannot tell when the closure calls `backward`, so the first gradient that is
        // reported announces the pass.
        self.states.watch_for_backward();
        let passes = self.states.backward_passes();
        let started = Instant::now();
        let result = trace_span!("train pass").in_scope(|| guard(|| run(self.module())));
        self.states.close_training_pass();
        let result = self.note(result)?;
        // Only passes that report gradients of this model are counted, so `backward` on a detached
        // loss, or on one of another model, counts as none.
        match self.states.backward_passes() - passes {
            1 => self.note(self.states.finish_pass())?,
            passes => return Err(EngineError::BackwardPasses { passes }),
        }
        self.note(guard(|| self.agree_buffers()).and_then(|agreed| agreed))?;
        // The start of the backward pass is noticed when it reports its first gradient. The time
        // before counts as forward time.
        let backward = self.states.backward_began().map_or(started, |began| began.max(started));
        self.reports.times.forward += backward - started;
        let elapsed = self.time_since(backward);
        self.reports.times.backward += elapsed;
        self.count_backward();
        Ok(result)
    }

    /// Returns the number of parameters whose gradients the last [`train_pass`](Self::train_pass)
    /// reduced.
    pub fn gradients_taken(&self) -> usize {
        self.states.gradients_reported()
    }

    /// Sets the learning rate of the next optimizer step only, instead of the schedule's. All ranks
    /// must set the same value.
    ///
    /// # Errors
    /// Returns an error if `rate` is negative or not finite.
    pub fn set_learning_rate(&mut self, rate: f64) -> Result<(), EngineError> {
        if !rate.is_finite() || rate < 0.0 {
            return Err(EngineError::LearningRate { rate });
        }
        self.overrides.rate = Some(rate);
        Ok(())
    }
}
