//! The micro-batches of an optimizer step in the order of a schedule.
//!
//! In a pipeline, the passes of a step interleave: a stage runs the forward passes of later
//! micro-batches while other stages run the backward passes of earlier ones. The engine therefore
//! runs all of them in one call, [`Engine::train_batch`].

use std::collections::VecDeque;
use std::time::Instant;

use burn::module::AutodiffModule;
use burn::tensor::{DType, ElementConversion, Tensor, TensorPrimitive};
use deepburn_ops::OptimizerOps;
use deepburn_pipeline::Action;
use deepburn_zero::{Ledger, Pass, Stages, Training, WeightGradients};
use tracing::trace_span;

use crate::engine::{Step, check_elements, check_tracked, guard};
use crate::step_state::LossWeights;
use crate::{Cause, Engine, EngineError};

/// The micro-batches of an optimizer step.
pub trait MicroBatches<B: OptimizerOps, M: AutodiffModule<Training<B>>> {
    /// Returns the mean loss of micro-batch `index`, shape `[1]`.
    ///
    /// In a pipeline, every stage runs the whole forward pass, and reading a value inside it makes
    /// the stages wait for each other.
    ///
    /// # Errors
    /// Returns an error if the batch does not fit the model.
    fn loss(&mut self, model: &M, index: usize) -> Result<Tensor<Training<B>, 1>, Cause>;

    /// Returns the weight of the loss, as for [`Engine::backward_weighted`].
    fn weight(&self, index: usize) -> f64;

    /// Checks the value of a loss before the parameters are updated.
    ///
    /// # Errors
    /// Returns an error for a value with which the model must not be trained.
    fn check(&self, _index: usize, _loss: f64) -> Result<(), Cause> {
        Ok(())
    }

    /// Called after each pass and after the update. Gradients of weights that a schedule defers
    /// are a pass of their own.
    fn after_phase(&mut self, _ledger: &Ledger) {}
}

/// A completed optimizer step.
#[derive(Debug, Clone, PartialEq)]
pub struct TrainedBatch {
    /// The mean losses of this rank's micro-batches, which all stages of a pipeline know.
    pub losses: Vec<f64>,
    /// The record of the step.
    pub step: Step,
}

impl<B: OptimizerOps, M: AutodiffModule<Training<B>>> Engine<B, M> {
    /// Returns true if the model is divided into pipeline stages. Then only
    /// [`train_batch`](Self::train_batch) trains it.
    pub fn is_pipeline(&self) -> bool {
        self.states.stages().is_some()
    }

    /// Runs the forward and backward passes of `gradient_accumulation_steps` micro-batches, and
    /// updates the parameters. All ranks call this together.
    ///
    /// Without a pipeline, this is the same as forward, backward and step for each of them. In a
    /// pipeline, the passes run in the order of the schedule.
    ///
    /// # Errors
    /// Returns the errors of [`forward`](Self::forward), [`backward`](Self::backward) and
    /// [`step`](Self::step), and of `batches`. Returns [`EngineError::Order`] if there are
    /// gradients already. A pipeline in which a pass has failed returns
    /// [`EngineError::BrokenSchedule`] from then on.
    pub fn train_batch(
        &mut self,
        batches: &mut impl MicroBatches<B, M>,
    ) -> Result<TrainedBatch, Cause> {
        self.check_group()?;
        // A call that failed may have left gradients, to which this step would add its own.
        if self.step_state.is_accumulating() {
            let when = "with gradients of an incomplete step (forward, backward and step complete \
                        it, zero_grad drops them)";
            return Err(EngineError::Order { call: "train_batch", when }.into());
        }
        let actions = self.states.stages().map(|stages| {
            let count = self.batch.gradient_accumulation_steps;
            self.settings.pass_schedule.actions(stages.stage(), stages.count(), count)
        });
        let (losses, taken) = match actions {
            Some(actions) => self.run_schedule(batches, actions)?,
            None => self.run_in_turn(batches)?,
        };
        let when = "with accumulation boundaries set by hand";
        let step = taken.ok_or(EngineError::Order { call: "train_batch", when })?;
        Ok(TrainedBatch { losses, step })
    }

    /// Runs one micro-batch after the other. Returns their losses, and the record of the step if
    /// the last one was an accumulation boundary.
    fn run_in_turn(
        &mut self,
        batches: &mut impl MicroBatches<B, M>,
    ) -> Result<(Vec<f64>, Option<Step>), Cause> {
        let count = self.batch.gradient_accumulation_steps;
        let (mut losses, mut unread, mut taken) = (Vec::with_capacity(count), Vec::new(), None);
        for index in 0..count {
            let loss = self.forward(|model| batches.loss(model, index))??;
            unread.push(value_of(&loss));
            batches.after_phase(self.ledger());
            //= trl 1.16.0 trainer/sft_trainer.py compute_loss
            self.backward_weighted(loss, batches.weight(index))?;
            batches.after_phase(self.ledger());
            if self.is_gradient_accumulation_boundary() || index + 1 == count {
                // Once a step: a device would be idle while the host reads a loss and submits the
                // next pass.
                for value in read_values(unread.drain(..)) {
                    batches.check(losses.len(), value)?;
                    losses.push(value);
                }
            }
            taken = self.step()?;
            batches.after_phase(self.ledger());
        }
        Ok((losses, taken))
    }

    /// Runs the passes of this stage in the order of the schedule. Returns the same as
    /// [`run_in_turn`](Self::run_in_turn).
    fn run_schedule(
        &mut self,
        batches: &mut impl MicroBatches<B, M>,
        actions: Vec<Action>,
    ) -> Result<(Vec<f64>, Option<Step>), Cause> {
        self.check_passes("train_batch")?;
        let count = self.batch.gradient_accumulation_steps;
        let losses = match self.run_passes(batches, actions) {
            Ok(losses) => losses,
            Err(cause) => {
                // Stages are at different passes, and messages of some are on their way, so that no
                // call can continue. An error of the group was recorded as the first failure.
                let _ = self.failure.set(EngineError::BrokenSchedule { cause: cause.to_string() });
                return Err(cause);
            }
        };
        // All passes have run, so that all stages are at the same point, whatever is found here.
        losses.iter().enumerate().try_for_each(|(index, loss)| batches.check(index, *loss))?;
        // `step` ends the last micro-batch and updates the parameters.
        (1..count).for_each(|_| self.end_micro_batch());
        let taken = self.step()?;
        batches.after_phase(self.ledger());
        Ok((losses, taken))
    }

    /// Runs the passes of a schedule, and returns the losses.
    fn run_passes(
        &mut self,
        batches: &mut impl MicroBatches<B, M>,
        actions: Vec<Action>,
    ) -> Result<Vec<f64>, Cause> {
        // Schedules run the passes of each kind in the order of micro-batches.
        let (mut open, mut values) = (VecDeque::new(), Vec::new());
        for action in actions {
            match action {
                Action::Forward(index) => {
                    let pass = self.run_separate_forward(batches, index)?;
                    values.push(pass.value.clone());
                    open.push_back(pass);
                }
                Action::Backward(index) => {
                    let Some(pass) = open.pop_front() else {
                        unreachable!("a schedule runs a backward pass after its forward pass")
                    };
                    self.run_separate_backward(pass, index)?;
                    if self.deferred_passes() == 0 {
                        self.run_deferred()?;
                    }
                }
                Action::Weights(_) if self.deferred_passes() > 0 => self.run_deferred()?,
                // They were computed with the backward pass.
                Action::Weights(_) => {}
            }
            batches.after_phase(self.ledger());
        }
        // The losses are read once per step: a stage that waits for the last one at every
        // micro-batch could not work ahead.
        self.read_losses(values)
    }

    /// Runs the forward pass of micro-batch `index`, whose backward pass comes after other passes.
    fn run_separate_forward(
        &mut self,
        batches: &mut impl MicroBatches<B, M>,
        index: usize,
    ) -> Result<OpenPass<B>, Cause> {
        let (started, pass) = (Instant::now(), self.pass_number(index));
        let factor = batches.weight(index) * self.scaler.scale();
        if !factor.is_finite() {
            return Err(EngineError::LossWeight { weight: batches.weight(index) }.into());
        }
        self.module = self.note(self.states.start_training_pass(self.module.clone()))?;
        self.states.enter_forward(pass);
        let context = self.states.enter(Some(Pass::Train));
        let loss = trace_span!("forward").in_scope(|| {
            guard(|| {
                let loss = batches.loss(self.module(), index)?;
                let value = loss.clone().inner();
                // The factor is part of the forward pass, because the backward pass starts with the
                // last op.
                let loss = if loss.dtype() == DType::F32 { loss } else { loss.cast(DType::F32) };
                let scaled = if factor == 1.0 { loss } else { loss.mul_scalar(factor) };
                Ok::<_, Cause>(OpenPass { value, scaled })
            })
        });
        drop(context);
        let loss = self.note(loss)??;
        check_elements(&loss.scaled)?;
        check_tracked(&loss.scaled)?;
        self.note(self.states.end_separate_forward())?;
        let elapsed = self.time_since(started);
        self.reports.times.forward += elapsed;
        Ok(loss)
    }

    /// Runs the backward pass of micro-batch `index`.
    fn run_separate_backward(&mut self, open: OpenPass<B>, index: usize) -> Result<(), Cause> {
        let (started, pass) = (Instant::now(), self.pass_number(index));
        self.accumulate_as("backward", LossWeights::Given)?;
        let context = self.states.enter(None);
        let result = trace_span!("backward").in_scope(|| -> Result<(), EngineError> {
            self.states.start_separate_backward(pass, self.weight_gradients())?;
            guard(|| drop(open.scaled.backward()))?;
            Ok(self.states.end_separate_backward(pass)?)
        });
        drop(context);
        self.note(result)?;
        // The state is changed directly: `Engine::count_backward` warns of backward passes between
        // which `step` was not called, which is how a pipeline runs.
        self.step_state.count_backward();
        let elapsed = self.time_since(started);
        self.reports.times.backward += elapsed;
        Ok(())
    }

    /// Returns when this stage computes the gradients of weights.
    fn weight_gradients(&self) -> WeightGradients {
        let is_first = self.states.stages().is_none_or(|stages| stages.stage() == 0);
        match self.deferred_passes() {
            // No stage waits for the first one, so each product can free its operands at once.
            0 if is_first => WeightGradients::InPass,
            // A pass would hold what it recomputes for all its blocks.
            0 if self.settings.recomputes => WeightGradients::InPass,
            _ => WeightGradients::Deferred,
        }
    }

    /// Returns how many backward passes run between one and its gradients of weights.
    fn deferred_passes(&self) -> usize {
        let count = self.batch.gradient_accumulation_steps;
        let stage = self.states.stages().map_or(0, Stages::stage);
        self.settings.pass_schedule.deferred(stage, count)
    }

    /// Computes the gradients of weights that the oldest backward pass has left.
    fn run_deferred(&mut self) -> Result<(), Cause> {
        if self.weight_gradients() == WeightGradients::InPass {
            return Ok(());
        }
        let started = Instant::now();
        let context = self.states.enter(None);
        let result = trace_span!("weight gradients").in_scope(|| -> Result<(), EngineError> {
            Ok(guard(|| self.states.reduce_deferred())??)
        });
        drop(context);
        self.note(result)?;
        let elapsed = self.time_since(started);
        self.reports.times.backward += elapsed;
        Ok(())
    }

    /// Reads the losses, which the last stage sends to the others.
    fn read_losses(&self, losses: Vec<LossValue<B>>) -> Result<Vec<f64>, Cause> {
        let pass = self.pass_number(losses.len());
        let _context = self.states.enter(None);
        self.states.enter_forward(pass);
        let read = || losses.into_iter().map(|loss| loss.into_scalar().elem::<f64>()).collect();
        Ok(self.note(guard(read))?)
    }

    /// Returns the number of the pass of micro-batch `index` in the run.
    fn pass_number(&self, index: usize) -> u64 {
        // One number of each step is left for the losses.
        self.progress.micro_steps + self.progress.global_steps + index as u64
    }
}

/// Returns the value of a loss, to be read after its backward pass. It has no entry in the ledger:
/// the passes need no memory for a scalar that waits.
fn value_of<B: OptimizerOps>(loss: &Tensor<Training<B>, 1>) -> Tensor<B, 1> {
    let value = loss.clone().inner().into_primitive().tensor().into_value();
    Tensor::from_primitive(TensorPrimitive::Float(value.into_full()))
}

/// Returns the values of losses. The host waits for the device once.
fn read_values<B: OptimizerOps>(losses: impl Iterator<Item = Tensor<B, 1>>) -> Vec<f64> {
    let mut values: Vec<_> = losses.map(|loss| loss.into_primitive().tensor()).collect();
    let joined = match values.len() {
        1 => values.remove(0),
        _ => B::concat(values, 0),
    };
    let joined = Tensor::<B, 1>::from_primitive(TensorPrimitive::Float(joined));
    joined.into_data().iter::<f64>().collect()
}

/// A forward pass whose backward pass has not run yet.
struct OpenPass<B: OptimizerOps> {
    /// The loss, for people.
    value: LossValue<B>,
    /// The loss with its weight and the loss scale.
    scaled: Tensor<Training<B>, 1>,
}

/// A loss without its graph.
type LossValue<B> = Tensor<deepburn_zero::Zero<B>, 1>;
