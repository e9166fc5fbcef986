//! Training passes whose backward pass belongs to the caller.
//!
//! Frameworks above Burn hand over a closure that computes a loss and calls `backward` on it, such as
//! burn-train's `TrainStep`. [`Engine::train_pass`] runs such a closure as one micro-batch.

use std::time::Instant;

use burn::module::AutodiffModule;
use deepburn_ops::OptimizerOps;
use deepburn_zero::{Pass, Training};
use tracing::trace_span;

use crate::engine::guard;
use crate::{Engine, EngineError};

impl<B: OptimizerOps, M: AutodiffModule<Training<B>>> Engine<B, M> {
    /// Runs a micro-batch whose forward and backward pass are both inside `run`, in place of
    /// [`forward`](Self::forward) and [`backward`](Self::backward). [`step`](Self::step) follows as
    /// usual.
    ///
    /// `run` calls `backward` on the mean loss of the micro-batch, once. Gradients are taken as they
    /// become final, so the container that autodiff returns holds markers in their place
    /// ([`ZeroTensor::Reduced`](deepburn_zero::ZeroTensor::Reduced)). Autodiff reports gradients of a
    /// parameter only once a pass: those of a second `backward` would not be taken, and its container
    /// holds tensors instead of markers. The engine cannot divide a loss that it does not see, so it
    /// divides the accumulated gradients by the number of micro-batches at the step. The result has
    /// the same bits where that number is a power of two.
    ///
    /// # Errors
    /// As [`forward`](Self::forward). In fp16, which needs the loss scaled. When `run` does not call
    /// `backward`. When the accumulation was begun with `backward`.
    pub fn train_pass<T>(&mut self, run: impl FnOnce(&M) -> T) -> Result<T, EngineError> {
        self.check_group()?;
        if self.scaler.is_dynamic() || self.scaler.scale() != 1.0 {
            return Err(EngineError::ScaledLoss);
        }
        self.accumulate_as("train_pass", true)?;
        let prepared = self.states.start_training_pass(self.module.clone());
        self.module = self.note(prepared.map_err(EngineError::from))?;
        let _context = self.states.enter(Some(Pass::Train));
        self.states.watch_for_backward();
        let passes = self.states.backward_passes();
        let started = Instant::now();
        let result = trace_span!("train pass").in_scope(|| guard(|| run(self.module())));
        self.states.close_training_pass();
        let result = self.note(result)?;
        match self.states.backward_passes() - passes {
            1 => self.note(self.states.finish_pass().map_err(EngineError::from))?,
            passes => return Err(EngineError::BackwardPasses { passes }),
        }
        self.note(guard(|| self.agree_buffers()).and_then(|agreed| agreed))?;
        // Where backward began is known only once it reports a gradient. Until then it counts as
        // forward.
        let backward = self.states.backward_began().map_or(started, |began| began.max(started));
        self.times.forward += backward - started;
        self.times.backward += backward.elapsed();
        self.progress.accumulated += 1;
        Ok(result)
    }

    /// Number of parameters whose gradients the last [`train_pass`](Self::train_pass) took.
    pub fn gradients_taken(&self) -> usize {
        self.states.gradients_reported()
    }

    /// Sets the learning rate of the next optimizer step alone, in place of the schedule's. All
    /// ranks set the same.
    ///
    /// # Errors
    /// When `rate` is negative or not finite.
    pub fn set_learning_rate(&mut self, rate: f64) -> Result<(), EngineError> {
        if !rate.is_finite() || rate < 0.0 {
            return Err(EngineError::LearningRate { rate });
        }
        self.next_rate = Some(rate);
        Ok(())
    }

    /// Refuses to add undivided gradients to divided ones: no single factor would average them.
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

    /// What the accumulated gradients still have to be divided by, apart from the loss scale.
    pub(crate) fn take_divisor(&mut self) -> f64 {
        let undivided = std::mem::take(&mut self.undivided);
        if undivided { self.batch.gradient_accumulation_steps as f64 } else { 1.0 }
    }
}
