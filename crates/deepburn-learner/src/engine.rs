//! The engine: forward, backward and step on a sharded model.
//!
//! Main type: [`Engine`], created by [`initialize`] from a Burn module and a [`Plan`]. The API
//! follows DeepSpeed's engine: every micro-batch calls forward, backward and step, and only the
//! step at an accumulation boundary updates the parameters.
//!
//! ```text
//! forward(run)       mark leaves, gather parameters                         per loss
//! backward(loss)     loss * weight * loss scale, reduce gradients           per loss
//! step()             count the micro-batch; at a boundary:                  per micro-batch
//!                    unscale, norm, clip, update ─► schedule, loss scale
//! ```
//!
//! An engine is used from one thread, and all ranks make the same calls in the same order. After a
//! failed collective, every later call returns the same error, so that a program cannot continue
//! with ranks that have diverged.

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::module::AutodiffModule;
use burn::tensor::{DType, Tensor, TensorData};
use deepburn_checkpoint::BaseValues;
use deepburn_comm::CommError;
use deepburn_config::{BatchPlan, OverflowPlan, Plan};
use deepburn_ops::OptimizerOps;
use deepburn_zero::assignment::AssignmentError;
use deepburn_zero::{
    Buffer, Group, Ledger, ModelStates, Parameter, Pass, PipelineLayout, Policy, Rates,
    StepOutcome, Training, ZeroError,
};
use tracing::trace_span;

use crate::EngineError;
use crate::loss_scale::LossScaler;
use crate::schedule::Schedule;
use crate::settings::EngineSettings;
use crate::source::StepSize;
use crate::step_state::{LossWeights, StepOverrides, StepState};

/// Shards `module` over `group` according to `plan` and returns its engine.
///
/// Every rank calls this with the same module structure. The values of rank 0 are used on all
/// ranks. The engine cannot be moved to another thread.
///
/// # Errors
/// Returns an error if the plan was made for a different number of ranks, if the module has
/// parameters that cannot be trained, if a parameter group matches no parameter of the module, or
/// if the modules of the ranks differ.
pub fn initialize<B: OptimizerOps, M: AutodiffModule<Training<B>>>(
    module: M,
    plan: &Plan,
    group: Group<B>,
) -> Result<Engine<B, M>, EngineError> {
    Engine::new(module, plan, group, None)
}

/// Shards `module` over `group` in the pipeline stages of `layout`, and returns its engine.
///
/// The ranks of a stage are consecutive. Every rank has the module of all stages, and keeps the
/// parameters of its own. [`Engine::train_batch`] trains it.
///
/// # Errors
/// Returns the errors of [`initialize`], and an error if a parameter is on no stage or the model
/// cannot be trained in a pipeline.
pub fn initialize_pipeline<B: OptimizerOps, M: AutodiffModule<Training<B>>>(
    module: M,
    plan: &Plan,
    layout: PipelineLayout,
    group: Group<B>,
) -> Result<Engine<B, M>, EngineError> {
    Engine::new(module, plan, group, Some(layout))
}

/// The engine of one rank: a sharded model, its optimizer, schedule and loss scale.
pub struct Engine<B: OptimizerOps, M: AutodiffModule<Training<B>>> {
    /// The module with handles instead of values.
    pub(crate) module: M,
    /// Parameters, gradients and optimizer states of this rank.
    pub(crate) states: ModelStates<B>,
    /// The learning-rate schedule, which counts applied steps.
    pub(crate) schedule: Schedule,
    /// The loss scale.
    pub(crate) scaler: LossScaler,
    /// The settings that do not change.
    pub(crate) settings: EngineSettings,
    /// The batch sizes, which `set_train_batch_size` changes.
    pub(crate) batch: BatchPlan,
    /// The micro-batches since the last optimizer step.
    pub(crate) step_state: StepState,
    /// What the caller has set for the next calls.
    pub(crate) overrides: StepOverrides,
    /// The counters of the run, which checkpoints store.
    pub(crate) progress: EngineCounters,
    /// Times and the last step, which the caller reads, and the warnings so far.
    pub(crate) reports: EngineReports,
    /// The parameters that checkpoints omit, by index: the frozen ones that still have the values
    /// of a base model.
    pub(crate) omitted: BTreeMap<usize, BaseValues>,
    /// The first failed collective. Every later call returns it.
    pub(crate) failure: OnceCell<EngineError>,
}

/// A run with a static loss scale fails after this many consecutive skipped steps. A static scale
/// is never reduced, so all later steps would be skipped too.
const MAX_SKIPS_IN_A_ROW: u64 = 100;

/// The counters of an engine.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct EngineCounters {
    /// Micro-batches since the start of the run: calls of `step`.
    pub(crate) micro_steps: u64,
    /// Optimizer steps, including skipped ones.
    pub(crate) global_steps: u64,
    /// Optimizer steps that were skipped because a gradient was not finite or because they had no
    /// target.
    pub(crate) skipped_steps: u64,
    /// Consecutive steps since the last applied one that were skipped because a gradient was not
    /// finite.
    pub(crate) skipped_in_a_row: u64,
    /// Samples processed on all ranks.
    pub(crate) global_samples: u64,
    /// Tokens processed on all ranks, if the caller counts them.
    pub(crate) global_tokens: u64,
}

/// What an engine measures and logs for its caller.
#[derive(Debug, Default)]
pub(crate) struct EngineReports {
    /// The time per phase since the last call of `take_times`.
    pub(crate) times: PhaseTimes,
    /// The record of the last optimizer step of this run.
    pub(crate) last_step: Option<Step>,
    /// Whether the warning about missing calls of `step` was given.
    pub(crate) warned_of_excess: bool,
}

/// Wall-clock time by phase, since the last call of [`Engine::take_times`]. A device works on after
/// a phase has ended on the host, so these are times of the host, unless `wall_clock_breakdown` is
/// set.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PhaseTimes {
    /// Forward passes, including gathers.
    pub forward: Duration,
    /// Backward passes, including gathers and reductions.
    pub backward: Duration,
    /// Optimizer steps, including the gather of updated parameters.
    pub step: Duration,
}

/// The record of an optimizer step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Step {
    /// The number of the step, from 1.
    pub number: u64,
    /// The learning rate of the step.
    pub learning_rate: f64,
    /// The factor by which the loss was multiplied in the backward passes.
    pub loss_scale: f64,
    /// The global L2 norm of the unscaled gradients before clipping. `None` for a step that was
    /// skipped because a gradient was not finite or because the step had no target.
    pub gradient_norm: Option<f64>,
}

impl Step {
    /// Returns true if the step left the parameters unchanged.
    pub fn is_skipped(&self) -> bool {
        self.gradient_norm.is_none()
    }
}

impl<B: OptimizerOps, M: AutodiffModule<Training<B>>> Engine<B, M> {
    /// Checks the plan against the group, then shards the module.
    fn new(
        module: M,
        plan: &Plan,
        group: Group<B>,
        pipeline: Option<PipelineLayout>,
    ) -> Result<Self, EngineError> {
        let (planned, actual) = (plan.mesh.world_size(), group.world_size());
        if planned != actual {
            return Err(EngineError::WorldSize { planned, actual });
        }
        let (planned, actual) =
            (plan.mesh.pipeline_stages, pipeline.as_ref().map_or(1, PipelineLayout::stages));
        if planned != actual {
            return Err(EngineError::Stages { planned, actual });
        }
        let checked = plan.param_groups.check(&plan.optimizer, plan.schedule.cycles_momentum());
        checked.map_err(|error| ZeroError::from(AssignmentError::from(error)))?;
        let policy = Policy {
            zero: plan.zero.clone(),
            reduction: plan.backward.reduction,
            precision: plan.precision,
            optimizer: plan.optimizer.clone(),
            param_groups: plan.param_groups.clone(),
            quantization: plan.quantization.clone(),
            activations: plan.backward.activations.clone(),
            pipeline,
            // Without replicas, the shard is the whole group, for which `None` stands.
            shard_size: (plan.mesh.replicate > 1).then_some(plan.mesh.shard),
        };
        let (module, states) = ModelStates::shard(module, policy, group)?;
        states.set_micro_batches(plan.batch.gradient_accumulation_steps);
        Ok(Self {
            module,
            states,
            schedule: Schedule::new(&plan.schedule),
            scaler: LossScaler::new(&plan.precision.loss_scale),
            settings: EngineSettings::new(plan),
            batch: plan.batch,
            step_state: StepState::default(),
            overrides: StepOverrides::default(),
            progress: EngineCounters::default(),
            reports: EngineReports::default(),
            omitted: BTreeMap::new(),
            failure: OnceCell::new(),
        })
    }

    /// Restarts the random streams, for example of dropout. All ranks pass the same seed, from
    /// which each rank derives its own stream.
    pub fn seed(&mut self, seed: u64) {
        self.states.seed(seed);
    }

    /// Returns the module, whose parameters are handles.
    ///
    /// Clones share the handles, so every step changes the clones too.
    /// [`whole_module`](Self::whole_module) returns an independent copy. The module remains
    /// accessible after a failure, but operations on it then fail.
    pub fn module(&self) -> &M {
        &self.module
    }

    /// Checks that neither this engine nor another rank has failed.
    ///
    /// # Errors
    /// Returns the first failure: a collective that failed in an earlier call of this engine, or
    /// the failure of another rank. All later calls return the same error.
    pub fn check_group(&self) -> Result<(), EngineError> {
        match self.failure.get() {
            Some(first) => Err(first.clone()),
            None => Ok(self.states.check()?),
        }
    }

    /// Records the first unrecoverable failure, which all later calls return.
    pub(crate) fn note<T>(
        &self,
        result: Result<T, impl Into<EngineError>>,
    ) -> Result<T, EngineError> {
        let result = result.map_err(Into::into);
        let is_final = |error: &ZeroError| {
            matches!(error, ZeroError::Comm(_) | ZeroError::Disagreement { .. })
        };
        if let Err(error @ EngineError::Zero(cause)) = &result
            && is_final(cause)
        {
            // `OnceCell::set` keeps the first failure and rejects later ones.
            let _ = self.failure.set(error.clone());
        }
        result
    }

    /// Returns the time of a phase that started then. A device computes after the host has queued
    /// its work, and is waited for if the times of phases are wanted.
    pub(crate) fn time_since(&self, started: Instant) -> Duration {
        if self.settings.times_phases {
            self.states.wait_for_device();
        }
        started.elapsed()
    }

    /// Runs the forward pass of a micro-batch. `run` is called with the module and returns, for
    /// example, the loss.
    ///
    /// # Errors
    /// Returns an error if a collective fails inside an op. Other panics of `run` are propagated.
    /// After a failure every call returns the same error.
    pub fn forward<T>(&mut self, run: impl FnOnce(&M) -> T) -> Result<T, EngineError> {
        self.check_group()?;
        // The handles are cloned, so that the engine keeps its module if the pass cannot be
        // started.
        self.module = self.note(self.states.start_training_pass(self.module.clone()))?;
        let _context = self.states.enter(Some(Pass::Train));
        let started = Instant::now();
        let result = trace_span!("forward").in_scope(|| guard(|| run(self.module())));
        let elapsed = self.time_since(started);
        self.reports.times.forward += elapsed;
        // While a pass is open, steps of this engine and of engines whose models it has read are
        // errors.
        if result.is_err() {
            self.states.close_training_pass();
        }
        self.note(result)
    }

    /// Runs a forward pass without autodiff.
    ///
    /// Parameters are gathered and released as in training. Dropout is disabled. Batch norm uses
    /// the running statistics, which are averaged over the ranks first. All ranks must call this
    /// the same number of times.
    ///
    /// # Errors
    /// Returns the same errors as [`forward`](Self::forward).
    pub fn evaluate<T>(&self, run: impl FnOnce(&M::InnerModule) -> T) -> Result<T, EngineError> {
        self.check_group()?;
        self.note(self.run_evaluation(run))
    }

    /// Runs the evaluation. The caller records a failure.
    fn run_evaluation<T>(&self, run: impl FnOnce(&M::InnerModule) -> T) -> Result<T, EngineError> {
        guard(|| self.agree_buffers())??;
        self.states.start_evaluation_pass()?;
        let module = self.module().valid();
        let _context = self.states.enter(Some(Pass::Evaluate));
        let result = trace_span!("evaluate").in_scope(|| guard(|| run(&module)))?;
        self.states.finish_pass()?;
        Ok(result)
    }

    /// Runs the backward pass of a micro-batch's mean loss, shape `[1]`.
    ///
    /// The loss is divided by the number of micro-batches per step, so the accumulated gradients
    /// are the mean over the whole batch. Running statistics that the forward pass updated are
    /// averaged over the ranks.
    ///
    /// A micro-batch with several losses runs `forward` and `backward` for each of them before it
    /// calls [`step`](Self::step). Their gradients are added.
    ///
    /// # Errors
    /// Returns the same errors as [`forward`](Self::forward), and an error if the loss has more
    /// than one element, is detached from the parameters, or was not computed by `forward`.
    /// Gradients are reported only for parameters that `forward` prepared.
    pub fn backward(&mut self, loss: Tensor<Training<B>, 1>) -> Result<(), EngineError> {
        let weight = 1.0 / self.batch.gradient_accumulation_steps as f64;
        self.run_backward(loss, weight, LossWeights::Equal)
    }

    /// Runs the backward pass with a given loss weight.
    ///
    /// [`backward`](Self::backward) uses one over the number of micro-batches. If micro-batches
    /// have different numbers of targets, pass `targets * world_size / total`, where `total` counts
    /// the targets of the whole step on all ranks. Gradients are averaged over ranks, which is why
    /// the world size is a factor. A step whose total is 0 has nothing to learn from, so leave it
    /// out.
    ///
    /// # Errors
    /// Returns the same errors as [`backward`](Self::backward), and an error if the weight is not
    /// finite.
    pub fn backward_weighted(
        &mut self,
        loss: Tensor<Training<B>, 1>,
        weight: f64,
    ) -> Result<(), EngineError> {
        if !weight.is_finite() {
            return Err(EngineError::LossWeight { weight });
        }
        self.run_backward(loss, weight, LossWeights::Given)
    }

    /// Runs the backward pass of a loss.
    fn run_backward(
        &mut self,
        loss: Tensor<Training<B>, 1>,
        weight: f64,
        weights: LossWeights,
    ) -> Result<(), EngineError> {
        self.check_group()?;
        check_elements(&loss)?;
        if !self.states.has_open_pass() {
            let when = "without a forward pass through `Engine::forward` since the last one (call \
                        backward for each loss before the next forward)";
            let call = "backward";
            return Err(EngineError::Order { call, when });
        }
        // The pass stays open, so that the caller can call `backward` again with the correct loss.
        check_tracked(&loss)?;
        self.states.close_training_pass();
        self.accumulate_as("backward", weights)?;
        let _context = self.states.enter(None);
        // The loss is multiplied in f32, because the loss scale alone may exceed the range of fp16.
        // The weight and the loss scale are combined into one factor, so the loss is rounded only
        // once. The optimizer step divides the gradients by the loss scale.
        let loss = if loss.dtype() == DType::F32 { loss } else { loss.cast(DType::F32) };
        let factor = weight * self.scaler.scale();
        let loss = if factor == 1.0 { loss } else { loss.mul_scalar(factor) };
        let started = Instant::now();
        self.states.start_backward();
        // Each gradient was reduced and stored when it became final, so the container that autodiff
        // returns is not needed.
        let result = trace_span!("backward").in_scope(|| -> Result<(), EngineError> {
            guard(|| drop(loss.backward()))?;
            Ok(self.states.finish_pass()?)
        });
        self.note(result)?;
        // A running statistic may depend on a checkpointed activation, which is recomputed here.
        // The recomputation may panic in a collective, hence the `guard`.
        self.note(guard(|| self.agree_buffers()).and_then(|agreed| agreed))?;
        let elapsed = self.time_since(started);
        self.reports.times.backward += elapsed;
        self.count_backward();
        Ok(())
    }

    /// Ends a micro-batch. At an accumulation boundary, updates the parameters and returns the
    /// record of the step; otherwise returns `None`.
    ///
    /// As in DeepSpeed, every call counts as one micro-batch, however many backward passes came
    /// before it. A call without a backward pass since the last one therefore counts as a
    /// micro-batch whose gradients are 0.
    ///
    /// Gradients are unscaled, checked for overflow, clipped by their global norm, and applied.
    /// With a dynamic loss scale, a step whose gradients are not finite is skipped: parameters,
    /// moments and schedule stay unchanged, and the scale is reduced.
    ///
    /// # Errors
    /// Returns an error if there was no backward pass since the last update, or if a collective
    /// fails. A gradient that is not finite is an error if steps are not skipped (fp32, bf16
    /// without `check_grad_overflow`, bf16 autocast), if the loss scale is already at its minimum,
    /// or after 100 consecutive skipped steps with a static scale.
    pub fn step(&mut self) -> Result<Option<Step>, EngineError> {
        self.check_group()?;
        self.check_passes("step")?;
        if !self.step_state.is_accumulating() {
            let when = "before any backward of this engine";
            return Err(EngineError::Order { call: "step", when });
        }
        // The question is about the current micro-batch, so it comes before the micro-batch ends.
        let boundary = self.is_gradient_accumulation_boundary();
        self.end_micro_batch();
        if !boundary {
            return Ok(None);
        }
        let samples = self.batch.train_batch_size as u64;
        self.update(self.divisor(), samples).map(Some)
    }

    /// Updates the parameters with the accumulated gradients, divided by `divisor` and the loss
    /// scale. `samples` is the number of samples of the step, unless the caller has set another
    /// one.
    pub(crate) fn update(&mut self, divisor: f64, samples: u64) -> Result<Step, EngineError> {
        // The gradients of this accumulation are consumed even if the step is skipped.
        self.step_state.end_step();
        let (samples, lr) = self.take_size_and_rate(samples);
        let rates = Rates { lr, betas: self.schedule.betas() };
        let loss_scale = self.scaler.scale();
        let started = Instant::now();
        let outcome = trace_span!("optimizer step")
            .in_scope(|| self.states.step(rates, loss_scale * divisor, self.settings.clip));
        let outcome = self.note(outcome)?;
        let elapsed = self.time_since(started);
        self.reports.times.step += elapsed;
        //= deepspeed 0.19.8 runtime/engine.py _take_model_step
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
        Ok(self.record_step(samples, rates.lr, loss_scale, gradient_norm))
    }

    /// Ends an optimizer step without any target, whose micro-batches are not run. Parameters,
    /// optimizer states, schedule and loss scale stay unchanged; the step counts as skipped.
    pub(crate) fn skip_step(&mut self) -> Step {
        let (samples, lr) = self.take_size_and_rate(self.batch.train_batch_size as u64);
        // The data of these micro-batches was taken, so they count as if they had been run.
        self.progress.micro_steps += self.batch.gradient_accumulation_steps as u64;
        self.progress.skipped_steps += 1;
        self.record_step(samples, lr, self.scaler.scale(), None)
    }

    /// Returns the number of samples and the learning rate of an optimizer step: what the caller
    /// has set for it, or else `samples` and the schedule's rate.
    fn take_size_and_rate(&mut self, samples: u64) -> (u64, f64) {
        // Both apply to one step, even if the step is skipped.
        let size = self.overrides.size.take();
        let StepSize { samples, lr_factor } = size.unwrap_or(StepSize { samples, lr_factor: 1.0 });
        let scheduled = lr_factor * self.schedule.learning_rate();
        (samples, self.overrides.rate.take().unwrap_or(scheduled))
    }

    /// Counts an optimizer step, applied or skipped, and returns its record.
    fn record_step(
        &mut self,
        samples: u64,
        learning_rate: f64,
        loss_scale: f64,
        gradient_norm: Option<f64>,
    ) -> Step {
        self.progress.global_steps += 1;
        self.progress.global_samples += samples;
        let number = self.progress.global_steps;
        let step = Step { number, learning_rate, loss_scale, gradient_norm };
        self.reports.last_step = Some(step);
        step
    }

    /// Handles an overflow. The optimizer and the schedule stay unchanged, so that the next step
    /// repeats the same learning rate.
    fn skip(&mut self, parameter: String) -> Result<(), EngineError> {
        if self.settings.overflow == OverflowPlan::End {
            return Err(ZeroError::GradientNotFinite { path: parameter }.into());
        }
        self.progress.skipped_steps += 1;
        self.progress.skipped_in_a_row += 1;
        if !self.scaler.is_dynamic() && self.progress.skipped_in_a_row == MAX_SKIPS_IN_A_ROW {
            return Err(EngineError::Stuck { path: parameter, steps: MAX_SKIPS_IN_A_ROW });
        }
        // A static scaler ignores the overflow, and the next step has the same scale.
        self.scaler.overflowed().map_err(|cause| EngineError::LossScale { path: parameter, cause })
    }

    /// Returns the schedule's learning rate for the next optimizer step. The record of a step
    /// ([`Step::learning_rate`]) has the rate that it used.
    pub fn learning_rate(&self) -> f64 {
        self.schedule.learning_rate()
    }

    /// Returns the record of the last optimizer step; `None` before the first.
    pub fn last_step(&self) -> Option<Step> {
        self.reports.last_step
    }

    /// Returns the global L2 norm of the unscaled gradients of the last optimizer step, before
    /// clipping. `None` before the first step and after a skipped one.
    pub fn global_gradient_norm(&self) -> Option<f64> {
        self.reports.last_step.and_then(|step| step.gradient_norm)
    }

    /// Returns the factor by which the loss of the next optimizer step is multiplied. It is 1
    /// unless parameters or autocast use fp16.
    pub fn loss_scale(&self) -> f64 {
        self.scaler.scale()
    }

    /// Returns true if the last call of [`step`](Self::step) at a boundary changed the parameters.
    pub fn was_step_applied(&self) -> bool {
        self.reports.last_step.is_some_and(|step| !step.is_skipped())
    }

    /// Returns the number of optimizer steps so far, including skipped ones.
    pub fn global_steps(&self) -> u64 {
        self.progress.global_steps
    }

    /// Returns the number of optimizer steps that were skipped because a gradient was not finite
    /// (never in fp32 and with bf16 autocast), or because no rank had a target
    /// ([`train`](crate::train)).
    pub fn skipped_steps(&self) -> u64 {
        self.progress.skipped_steps
    }

    /// Returns the number of samples processed so far on all ranks.
    pub fn global_samples(&self) -> u64 {
        self.progress.global_samples
    }

    /// Returns the number of tokens processed so far on all ranks, as counted by the training loop
    /// or the caller.
    pub fn global_tokens(&self) -> u64 {
        self.progress.global_tokens
    }

    /// Adds to the token counter; `tokens` is the sum over all ranks.
    pub fn count_tokens(&mut self, tokens: u64) {
        self.progress.global_tokens += tokens;
    }

    /// Returns the number of micro-batches so far: calls of [`step`](Self::step).
    pub fn micro_steps(&self) -> u64 {
        self.progress.micro_steps
    }

    /// Returns the time spent in each phase since the last call, and resets it.
    pub fn take_times(&mut self) -> PhaseTimes {
        std::mem::take(&mut self.reports.times)
    }

    /// Returns the current batch sizes.
    pub fn batch(&self) -> BatchPlan {
        self.batch
    }

    /// Returns the process group.
    pub fn group(&self) -> &Group<B> {
        self.states.group()
    }

    /// Returns the rank, from 0.
    pub fn rank(&self) -> usize {
        self.group().rank()
    }

    /// Returns the position of this rank among the ranks with different data, from 0. Stages of a
    /// pipeline have the same data.
    pub fn data_rank(&self) -> usize {
        self.states.data_group().rank()
    }

    /// Returns the number of ranks with different data.
    pub fn data_ranks(&self) -> usize {
        self.states.data_group().world_size()
    }

    /// Returns the memory ledger of this rank.
    pub fn ledger(&self) -> &Ledger {
        self.states.ledger()
    }

    /// Returns the parameters in module order.
    pub fn parameters(&self) -> &[Arc<Parameter<B>>] {
        self.states.parameters()
    }

    /// Returns the buffers in module order: running statistics, integer and bool parameters. Every
    /// rank keeps them complete and in their own type.
    pub fn buffers(&self) -> &[Buffer] {
        self.states.buffers()
    }

    /// Returns the values of the buffer at a module path, in the buffer's own type (bools as one
    /// byte each).
    ///
    /// Running statistics are averaged over the ranks at the end of each backward pass and before
    /// an evaluation or a save. This returns the value after the last average.
    ///
    /// # Errors
    /// Returns an error if the module has no such buffer.
    pub fn buffer_data(&self, path: &str) -> Result<TensorData, EngineError> {
        Ok(self.states.buffer_data(self.module(), path)?)
    }

    /// Averages running statistics over the ranks. All ranks call this together.
    pub(crate) fn agree_buffers(&self) -> Result<(), EngineError> {
        Ok(self.states.agree_buffers(self.module())?)
    }

    /// Replaces buffers with the values that `read` returns; `None` leaves a buffer unchanged.
    pub(crate) fn load_buffers<E: From<ZeroError>>(
        &mut self,
        read: impl FnMut(&Buffer) -> Result<Option<TensorData>, E>,
    ) -> Result<(), E> {
        self.module = self.states.load_buffers(&self.module, read)?;
        Ok(())
    }

    /// Returns the sharded model states.
    pub fn states(&self) -> &ModelStates<B> {
        &self.states
    }
}

/// Checks that a loss is one value.
///
/// # Errors
/// Returns [`EngineError::LossElements`] otherwise.
pub(crate) fn check_elements<B: OptimizerOps>(
    loss: &Tensor<Training<B>, 1>,
) -> Result<(), EngineError> {
    match loss.shape().num_elements() {
        1 => Ok(()),
        numel => Err(EngineError::LossElements { numel }),
    }
}

/// Checks that a loss depends on trainable parameters.
///
/// # Errors
/// Returns [`EngineError::DetachedLoss`] otherwise.
pub(crate) fn check_tracked<B: OptimizerOps>(
    loss: &Tensor<Training<B>, 1>,
) -> Result<(), EngineError> {
    match loss.clone().into_primitive().tensor().is_tracked() {
        true => Ok(()),
        false => Err(EngineError::DetachedLoss),
    }
}

/// Runs tensor ops and converts the panic of a failed collective back to an error.
pub(crate) fn guard<T>(run: impl FnOnce() -> T) -> Result<T, EngineError> {
    // Asserting unwind safety is sound, because the engine only returns errors after a failed
    // collective.
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
