//! The engine: forward, backward and step on a sharded model.
//!
//! Main type: [`Engine`], what [`initialize`] makes of a Burn module and a [`Plan`]. Its calls are
//! DeepSpeed's, and like there every micro-batch goes through forward, backward and step; only the
//! step at an accumulation boundary updates the parameters.

use std::cell::OnceCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::module::AutodiffModule;
use burn::tensor::{DType, Tensor, TensorData};
use deepburn_comm::CommError;
use deepburn_config::{BatchPlan, OverflowPlan, Plan};
use deepburn_ops::OptimizerOps;
use deepburn_zero::{
    Buffer, Category, Group, Ledger, ModelStates, Parameter, Pass, Policy, Rates, StepOutcome,
    Training, ZeroError,
};
use serde::{Deserialize, Serialize};
use tracing::trace_span;

use crate::EngineError;
use crate::loss_scale::LossScaler;
use crate::schedule::Schedule;
use crate::source::StepSize;

/// Shards `module` over `group` as `plan` says and makes it trainable.
///
/// Every rank calls this with the same module structure; all start from the values of rank 0. The
/// engine stays on the thread that made it.
///
/// # Errors
/// When the plan was made for another number of ranks, the module has parameters that cannot be
/// trained, its parameter groups do not fit the module, or the ranks' modules differ.
pub fn initialize<B: OptimizerOps, M: AutodiffModule<Training<B>>>(
    module: M,
    plan: &Plan,
    group: Group<B>,
) -> Result<Engine<B, M>, EngineError> {
    Engine::new(module, plan, group)
}

/// A model in training on one rank.
pub struct Engine<B: OptimizerOps, M: AutodiffModule<Training<B>>> {
    pub(crate) module: M,
    pub(crate) states: ModelStates<B>,
    pub(crate) schedule: Schedule,
    pub(crate) scaler: LossScaler,
    overflow: OverflowPlan,
    pub(crate) batch: BatchPlan,
    clip: Option<f64>,
    gathers_for_saving: bool,
    pub(crate) progress: Progress,
    pub(crate) times: PhaseTimes,
    /// Overrides whether the present micro-batch ends an accumulation.
    boundary: Option<bool>,
    /// How the present optimizer step differs from others.
    pub(crate) next_size: Option<StepSize>,
    /// Learning rate of the next optimizer step, in place of the schedule's.
    pub(crate) next_rate: Option<f64>,
    /// Whether the accumulated gradients are those of losses that were not divided by the number
    /// of micro-batches.
    pub(crate) undivided: bool,
    last_step: Option<Step>,
    /// The first failure of a collective: what every later call returns.
    failure: OnceCell<EngineError>,
}

/// Skipped steps in a row that end a run whose loss scale cannot fall: no data is that unlucky, and
/// everything after would be lost time.
const MAX_SKIPS_IN_A_ROW: u64 = 100;

/// Where the engine is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Progress {
    /// Micro-batches since the beginning.
    pub(crate) micro_steps: u64,
    /// Micro-batches since the last optimizer step.
    pub(crate) accumulated: usize,
    /// Optimizer steps, skipped ones included.
    pub(crate) global_steps: u64,
    /// Optimizer steps that were left out.
    pub(crate) skipped_steps: u64,
    /// Those since the last one that was taken.
    pub(crate) skipped_in_a_row: u64,
    /// Samples over all ranks.
    pub(crate) global_samples: u64,
    /// Tokens over all ranks, as far as they were counted.
    pub(crate) global_tokens: u64,
}

/// Wall-clock time by phase, since the last time it was asked for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PhaseTimes {
    /// Forward passes, gathers included.
    pub forward: Duration,
    /// Backward passes, gathers and reductions included.
    pub backward: Duration,
    /// Optimizer steps, gathers of updated parameters included.
    pub step: Duration,
}

/// An optimizer step, as it was taken.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Step {
    /// Number of the step, from 1.
    pub number: u64,
    /// Learning rate that it used.
    pub learning_rate: f64,
    /// Factor of the loss in its backward passes.
    pub loss_scale: f64,
    /// Global L2 norm of the gradients before clipping, unscaled; `None` for a step that was skipped
    /// because a gradient was not finite.
    pub gradient_norm: Option<f64>,
}

impl Step {
    /// Whether it left the parameters as they were.
    pub fn is_skipped(&self) -> bool {
        self.gradient_norm.is_none()
    }
}

impl<B: OptimizerOps, M: AutodiffModule<Training<B>>> Engine<B, M> {
    fn new(module: M, plan: &Plan, group: Group<B>) -> Result<Self, EngineError> {
        let (planned, actual) = (plan.batch.world_size, group.world_size());
        if planned != actual {
            return Err(EngineError::WorldSize { planned, actual });
        }
        let cycles_momentum = plan.schedule.cycles_momentum();
        plan.param_groups.check(&plan.optimizer, cycles_momentum).map_err(ZeroError::from)?;
        let policy = Policy {
            zero: plan.zero.clone(),
            reduction: plan.reduction,
            precision: plan.precision,
            optimizer: plan.optimizer.clone(),
            param_groups: plan.param_groups.clone(),
            activations: plan.activations.clone(),
        };
        let (module, states) = ModelStates::shard(module, policy, group)?;
        states.set_micro_batches(plan.batch.gradient_accumulation_steps);
        Ok(Self {
            module,
            states,
            schedule: Schedule::new(&plan.schedule),
            scaler: LossScaler::new(&plan.precision.loss_scale),
            overflow: plan.precision.overflow,
            batch: plan.batch,
            clip: plan.gradient_clipping,
            gathers_for_saving: plan.zero.parameters.gather_16bit_weights_on_model_save,
            progress: Progress::default(),
            times: PhaseTimes::default(),
            boundary: None,
            next_size: None,
            next_rate: None,
            undivided: false,
            last_step: None,
            failure: OnceCell::new(),
        })
    }

    /// Starts the random streams of dropout anew. All ranks pass the same seed; each draws its
    /// own numbers from it.
    pub fn seed(&mut self, seed: u64) {
        self.states.seed(seed);
    }

    /// The module, on handles of sharded parameters. Clones of it have the same handles and change
    /// with every step; [`whole_module`](Self::whole_module) makes a copy that does not. The module is
    /// there after a failure too; ops on it then fail.
    pub fn module(&self) -> &M {
        &self.module
    }

    /// Returns what ended the run, if something did: a collective that failed here before, or a
    /// rank that failed since.
    ///
    /// # Errors
    /// The first failure, the same whichever call comes after it.
    pub fn check_group(&self) -> Result<(), EngineError> {
        match self.failure.get() {
            Some(first) => Err(first.clone()),
            None => Ok(self.states.check()?),
        }
    }

    /// Records the first unrecoverable failure, which all later calls return.
    pub(crate) fn note<T>(&self, result: Result<T, EngineError>) -> Result<T, EngineError> {
        if let Err(error @ EngineError::Zero(ZeroError::Comm(_))) = &result {
            // Only the first is kept.
            let _ = self.failure.set(error.clone());
        }
        result
    }

    /// Runs the forward pass of a micro-batch.
    ///
    /// # Errors
    /// When a collective fails inside an op; other panics of `run` pass through. After a failure
    /// every call returns it again.
    pub fn forward<T>(&mut self, run: impl FnOnce(&M) -> T) -> Result<T, EngineError> {
        self.check_group()?;
        // A copy of handles, so that the module stays where the pass cannot begin.
        let prepared = self.states.start_training_pass(self.module.clone());
        self.module = self.note(prepared.map_err(EngineError::from))?;
        let _context = self.states.enter(Some(Pass::Train));
        let started = Instant::now();
        let result = trace_span!("forward").in_scope(|| guard(|| run(self.module())));
        self.times.forward += started.elapsed();
        if result.is_err() {
            self.states.close_training_pass();
        }
        self.note(result)
    }

    /// Runs a forward pass on the module without autodiff. Parameters are gathered and released
    /// as in training; dropout is off, and batch norm uses the running statistics on which the ranks
    /// agree. All ranks call this together, the same number of times.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn evaluate<T>(&self, run: impl FnOnce(&M::InnerModule) -> T) -> Result<T, EngineError> {
        self.check_group()?;
        self.note(self.run_evaluation(run))
    }

    fn run_evaluation<T>(&self, run: impl FnOnce(&M::InnerModule) -> T) -> Result<T, EngineError> {
        guard(|| self.agree_buffers())??;
        self.states.start_evaluation_pass()?;
        let module = self.module().valid();
        let _context = self.states.enter(Some(Pass::Evaluate));
        let result = trace_span!("evaluate").in_scope(|| guard(|| run(&module)))?;
        self.states.finish_pass()?;
        Ok(result)
    }

    /// Runs the backward pass of the mean loss of a micro-batch. The loss is divided by the number
    /// of micro-batches of a step, so that gradients add up to those of the whole batch. Running
    /// statistics that forward updated are averaged over the ranks.
    ///
    /// # Errors
    /// As [`forward`](Self::forward), and when the loss did not come from it: gradients are
    /// only reported for parameters that were prepared there.
    pub fn backward(&mut self, loss: Tensor<Training<B>, 1>) -> Result<(), EngineError> {
        let share = 1.0 / self.batch.gradient_accumulation_steps as f64;
        self.backward_weighted(loss, share)
    }

    /// Runs the backward pass with a weight of the caller's instead of one over the number of
    /// micro-batches: for ragged micro-batches, this micro-batch's tokens times the world size
    /// over the tokens of the whole step on all ranks.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn backward_weighted(
        &mut self,
        loss: Tensor<Training<B>, 1>,
        weight: f64,
    ) -> Result<(), EngineError> {
        self.check_group()?;
        if !self.states.close_training_pass() {
            let (call, when) = ("backward", "without a forward pass through `Engine::forward`");
            return Err(EngineError::Order { call, when });
        }
        self.accumulate_as("backward", false)?;
        let _context = self.states.enter(None);
        // A 16-bit loss would overflow by its scale alone.
        let loss = if loss.dtype() == DType::F32 { loss } else { loss.cast(DType::F32) };
        let factor = weight * self.scaler.scale();
        let loss = if factor == 1.0 { loss } else { loss.mul_scalar(factor) };
        let started = Instant::now();
        self.states.start_backward();
        // The gradients were taken as they became final; what autodiff returns holds none.
        let result = trace_span!("backward").in_scope(|| -> Result<(), EngineError> {
            guard(|| drop(loss.backward()))?;
            Ok(self.states.finish_pass()?)
        });
        self.note(result)?;
        // A statistic may be an activation that is computed again.
        self.note(guard(|| self.agree_buffers()).and_then(|agreed| agreed))?;
        self.times.backward += started.elapsed();
        self.progress.accumulated += 1;
        Ok(())
    }

    /// Ends a micro-batch; at an accumulation boundary, updates the parameters and returns what
    /// was done.
    ///
    /// # Errors
    /// When no backward came before or a collective fails; when a gradient is not finite in fp32,
    /// autocast in bf16 or bf16 without `check_grad_overflow`, or with the loss scale at its minimum.
    pub fn step(&mut self) -> Result<Option<Step>, EngineError> {
        self.check_group()?;
        let call = "step";
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
        if self.progress.accumulated == 0 {
            let when = "before any backward of this engine";
            return Err(EngineError::Order { call, when });
        }
        let boundary = self.is_gradient_accumulation_boundary();
        self.progress.micro_steps += 1;
        if !boundary {
            return Ok(None);
        }
        self.progress.accumulated = 0;
        let StepSize { samples, lr_factor } = self
            .next_size
            .take()
            .unwrap_or(StepSize { samples: self.batch.train_batch_size as u64, lr_factor: 1.0 });
        let scheduled = lr_factor * self.schedule.learning_rate();
        let lr = self.next_rate.take().unwrap_or(scheduled);
        let rates = Rates { lr, betas: self.schedule.betas() };
        let loss_scale = self.scaler.scale();
        let divisor = self.take_divisor();
        let started = Instant::now();
        let outcome = trace_span!("optimizer step")
            .in_scope(|| self.states.step(rates, loss_scale * divisor, self.clip));
        let outcome = self.note(outcome.map_err(EngineError::from))?;
        self.times.step += started.elapsed();
        let gradient_norm = match outcome {
            StepOutcome::Applied { gradient_norm } => {
                self.scaler.applied();
                self.schedule.advance();
                self.progress.skipped_in_a_row = 0;
                Some(gradient_norm)
            }
            StepOutcome::Overflow { parameter } => {
                self.skip(parameter)?;
                None
            }
        };
        self.progress.global_steps += 1;
        self.progress.global_samples += samples;
        let number = self.progress.global_steps;
        let step = Step { number, learning_rate: rates.lr, loss_scale, gradient_norm };
        self.last_step = Some(step);
        Ok(Some(step))
    }

    /// Answers an overflow: a skipped step leaves optimizer and schedule as they were.
    fn skip(&mut self, parameter: String) -> Result<(), EngineError> {
        if self.overflow == OverflowPlan::End {
            return Err(ZeroError::GradientNotFinite { path: parameter }.into());
        }
        self.progress.skipped_steps += 1;
        self.progress.skipped_in_a_row += 1;
        if !self.scaler.is_dynamic() && self.progress.skipped_in_a_row == MAX_SKIPS_IN_A_ROW {
            return Err(EngineError::Stuck { path: parameter, steps: MAX_SKIPS_IN_A_ROW });
        }
        self.scaler.overflowed().map_err(|cause| EngineError::LossScale { path: parameter, cause })
    }

    /// Forgets the gradients accumulated so far, and a forward pass whose backward has not come.
    pub fn zero_grad(&mut self) {
        self.states.zero_grad();
        self.states.close_training_pass();
        self.progress.accumulated = 0;
        self.undivided = false;
    }

    /// Whether the step of the present micro-batch updates the parameters.
    pub fn is_gradient_accumulation_boundary(&self) -> bool {
        let accumulated = self.progress.accumulated.max(1);
        self.boundary.unwrap_or(accumulated >= self.batch.gradient_accumulation_steps)
    }

    /// Decides by hand whether the next steps are accumulation boundaries; `None` counts
    /// micro-batches again.
    pub fn set_gradient_accumulation_boundary(&mut self, boundary: Option<bool>) {
        self.boundary = boundary;
    }

    /// Changes the samples per optimizer step by changing the number of micro-batches.
    ///
    /// # Errors
    /// When the size is not a multiple of micro-batch size times ranks, or gradients are under
    /// way.
    pub fn set_train_batch_size(&mut self, train_batch_size: usize) -> Result<(), EngineError> {
        if self.progress.accumulated > 0 {
            let (call, when) = ("set_train_batch_size", "in the middle of an accumulation");
            return Err(EngineError::Order { call, when });
        }
        self.batch = self.batch.with_train_batch_size(train_batch_size)?;
        self.states.set_micro_batches(self.batch.gradient_accumulation_steps);
        Ok(())
    }

    /// Says that the next optimizer step has `samples` samples over all ranks, whatever the batch
    /// size, and multiplies the schedule's learning rate by `lr_factor` for that step alone. All
    /// ranks say the same.
    pub fn size_next_step(&mut self, samples: u64, lr_factor: f64) {
        self.next_size = Some(StepSize { samples, lr_factor });
    }

    /// Runs forward and backward passes whose gradients stay on this rank; the first backward
    /// pass after it reduces them together with its own. Saves messages where the last bit does
    /// not matter: micro-batches are then added up before ranks are, not after.
    ///
    /// # Errors
    /// At stages 2 and 3, which do not keep whole gradients; and those of `run`.
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
        // A caller that catches a panic of `run` gets an engine that reduces gradients again.
        let result = catch_unwind(AssertUnwindSafe(|| run(self)));
        self.states.set_synchronise(true);
        result.unwrap_or_else(|panic| resume_unwind(panic))
    }

    pub(crate) fn gathers_for_saving(&self) -> bool {
        self.gathers_for_saving
    }

    /// Learning rate of the coming optimizer step.
    pub fn learning_rate(&self) -> f64 {
        self.schedule.learning_rate()
    }

    /// The last optimizer step.
    pub fn last_step(&self) -> Option<Step> {
        self.last_step
    }

    /// Global L2 norm of the gradients of the last optimizer step, unscaled, before clipping; `None`
    /// before the first step and for a skipped one.
    pub fn global_gradient_norm(&self) -> Option<f64> {
        self.last_step.and_then(|step| step.gradient_norm)
    }

    /// Factor of the loss of the coming optimizer step; 1 unless parameters or autocast are fp16.
    pub fn loss_scale(&self) -> f64 {
        self.scaler.scale()
    }

    /// The state of the loss scale.
    pub fn loss_scaler(&self) -> &LossScaler {
        &self.scaler
    }

    /// Whether the last call of [`step`](Self::step) at a boundary changed the parameters.
    pub fn was_step_applied(&self) -> bool {
        self.last_step.is_some_and(|step| !step.is_skipped())
    }

    /// Optimizer steps so far, skipped ones included.
    pub fn global_steps(&self) -> u64 {
        self.progress.global_steps
    }

    /// Optimizer steps that were left out because a gradient was not finite; none in fp32, also
    /// under autocast in bf16.
    pub fn skipped_steps(&self) -> u64 {
        self.progress.skipped_steps
    }

    /// Samples over all ranks so far.
    pub fn global_samples(&self) -> u64 {
        self.progress.global_samples
    }

    /// Tokens over all ranks so far, where the training loop or the caller counts them.
    pub fn global_tokens(&self) -> u64 {
        self.progress.global_tokens
    }

    /// Counts tokens of all ranks.
    pub fn count_tokens(&mut self, tokens: u64) {
        self.progress.global_tokens += tokens;
    }

    /// Micro-batches of this rank so far.
    pub fn micro_steps(&self) -> u64 {
        self.progress.micro_steps
    }

    /// Where the time went since this was last called.
    pub fn take_times(&mut self) -> PhaseTimes {
        std::mem::take(&mut self.times)
    }

    /// The batch triple in force.
    pub fn batch(&self) -> BatchPlan {
        self.batch
    }

    /// The process group.
    pub fn group(&self) -> &Group<B> {
        self.states.group()
    }

    /// This rank, from 0.
    pub fn rank(&self) -> usize {
        self.group().rank()
    }

    /// Bytes held by this rank.
    pub fn ledger(&self) -> &Ledger {
        self.states.ledger()
    }

    /// Parameters in the order of the module.
    pub fn parameters(&self) -> &[Arc<Parameter<B>>] {
        self.states.parameters()
    }

    /// Running statistics, integer and bool parameters in the order of the module, which every rank
    /// keeps whole and in their own type.
    pub fn buffers(&self) -> &[Buffer] {
        self.states.buffers()
    }

    /// The values of the buffer at a module path, in its own type (bools in one byte each); those of
    /// a running statistic as the ranks agreed on them last, which is at the end of each backward
    /// pass and before an evaluation or a save.
    ///
    /// # Errors
    /// When the module has no buffer of that path.
    pub fn buffer_data(&self, path: &str) -> Result<TensorData, EngineError> {
        Ok(self.states.buffer_data(self.module(), path)?)
    }

    /// Makes the running statistics of all ranks the same. All ranks call this together.
    pub(crate) fn agree_buffers(&self) -> Result<(), EngineError> {
        Ok(self.states.agree_buffers(self.module())?)
    }

    /// Replaces buffers by what `read` gives; `None` leaves one as it is.
    pub(crate) fn load_buffers<E: From<ZeroError>>(
        &mut self,
        read: impl FnMut(&Buffer) -> Result<Option<TensorData>, E>,
    ) -> Result<(), E> {
        self.module = self.states.load_buffers(&self.module, read)?;
        Ok(())
    }

    /// Model states behind the module, for what this engine has no call for.
    pub fn states(&self) -> &ModelStates<B> {
        &self.states
    }

    /// Bytes of model states on this rank: parameters and buffers, gradients at their peak, optimizer.
    pub fn model_state_bytes(&self) -> usize {
        let ledger = self.ledger();
        ledger.usage(Category::Parameters).current
            + ledger.usage(Category::Gradients).peak
            + ledger.usage(Category::Optimizer).current
    }
}

/// Runs tensor ops and turns the failure of a collective inside them back into an error.
pub(crate) fn guard<T>(run: impl FnOnce() -> T) -> Result<T, EngineError> {
    // The engine is not used again after a failed collective: the group is gone.
    catch_unwind(AssertUnwindSafe(run)).map_err(|panic| match panic.downcast::<CommError>() {
        Ok(error) => EngineError::from(*error),
        Err(panic) => resume_unwind(panic),
    })
}

impl<B: OptimizerOps, M: AutodiffModule<Training<B>>> std::fmt::Debug for Engine<B, M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine")
            .field("states", &self.states)
            .field("batch", &self.batch)
            .field("progress", &self.progress)
            .finish_non_exhaustive()
    }
}
