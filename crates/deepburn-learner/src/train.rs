//! The training loop: optimizer steps, evaluations, checkpoints and their
//! records.
//!
//! Main function: [`train`]. One step of the loop, with its exchanges in
//! brackets:
//!
//! ```text
//! read the data ─► [batch totals: tokens, targets, unreadable data]
//! micro-batches ─► forward ─► backward [gradients] ─► step [norm, parameters]
//!               ─► [loss, interruption, checkpoint written]
//! hooks ─► evaluation, if due ─► save, if due
//! ```
//!
//! Decisions that must be the same on all ranks (stopping, committing a
//! checkpoint, ending after unreadable data) depend on flags that are summed
//! over the ranks, so all ranks leave the loop at the same step. After an
//! interruption or unreadable data, the last complete step is saved.
//!
//! The loop stores no separate files. Each checkpoint contains `LoopState`, the
//! engine's counters and the position of the data.

use std::time::{Duration, Instant};

use burn::module::AutodiffModule;
use burn::tensor::ElementConversion;
use deepburn_comm::CollectiveTag;
use deepburn_ops::OptimizerOps;
use deepburn_zero::{Category, Ledger, ModuleOperations, Tier, Training};
use serde_json::Value;
use tracing::{trace_span, warn};

use crate::batch_schedule::BatchSchedule;
use crate::best::{BestPlan, LoopState};
use crate::checkpoint::{LoadPlan, TrainingCheckpointError};
use crate::engine::{PhaseTimes, Step};
use crate::evaluation::{EvaluationEnd, EvaluationProgress, data_failure, evaluate_until};
use crate::interval::Interval;
use crate::metrics::{EvalRow, MemoryRow, PhaseSeconds, StepRow};
use crate::saving::{CheckpointPlan, Interrupt, Outcome, Saver};
use crate::source::{BatchSource, EvaluationStream, NextStep, StepBatches, StepSize};
use crate::task::{Batch, Task};
use crate::{BoxError, Cause, Engine, EngineError, TrainError};

/// An observer of a run. Every rank has its own hooks and calls them at the
/// same steps, in the order in which they were passed.
pub trait Hook {
    /// Called before each optimizer step.
    ///
    /// # Errors
    ///
    /// If it returns an error, the run ends on all ranks.
    fn before_step(&mut self, _step: u64) -> Result<(), BoxError> {
        Ok(())
    }

    /// Called after the step in which floating-point operations were counted.
    ///
    /// # Errors
    ///
    /// If it returns an error, the run ends on all ranks.
    fn after_count(
        &mut self,
        _operations: &[ModuleOperations],
        _row: &StepRow,
    ) -> Result<(), BoxError> {
        Ok(())
    }

    /// Called after each forward pass, backward pass and update, with the
    /// memory ledger of this rank.
    fn after_phase(&mut self, _ledger: &Ledger) {}

    /// Called after each optimizer step, with its record and the number of
    /// samples so far on all ranks.
    ///
    /// # Errors
    ///
    /// If it returns an error, the run ends on all ranks.
    fn after_step(&mut self, _row: &StepRow, _samples: u64) -> Result<(), BoxError> {
        Ok(())
    }

    /// Called after each batch of an evaluation.
    fn after_evaluation_batch(&mut self, _progress: EvaluationProgress) {}

    /// Called at the end of training, after the last step or an interruption.
    ///
    /// # Errors
    ///
    /// If it returns an error, the run ends on all ranks.
    fn finish(&mut self) -> Result<(), BoxError> {
        Ok(())
    }

    /// Called after each evaluation.
    ///
    /// # Errors
    ///
    /// If it returns an error, the run ends on all ranks.
    fn after_evaluation(&mut self, _row: &EvalRow, _samples: u64) -> Result<(), BoxError> {
        Ok(())
    }
}

/// The settings of a training loop: steps, batch sizes, evaluation and
/// checkpoints.
#[derive(Debug, Clone, Default)]
pub struct TrainPlan {
    /// The number of optimizer steps, counted from the start of the first run.
    pub max_steps: u64,
    /// The number of samples of each step; `None` keeps the engine's batch
    /// size.
    pub batch_sizes: Option<BatchSchedule>,
    /// How often to evaluate; `None` evaluates only after the last step.
    pub eval_steps: Option<Interval>,
    /// The step in which floating-point operations are counted.
    pub counted_step: Option<u64>,
    /// The settings of checkpoints; `None` saves no checkpoints.
    pub checkpoints: Option<CheckpointPlan>,
    /// Ends the run early. All ranks stop if any rank is interrupted.
    pub interrupt: Interrupt,
    /// Settings for the best model and early stopping.
    pub best: BestPlan,
    /// The loop state of the checkpoint that the engine was loaded from
    /// ([`ClientStates::loop_state`](crate::ClientStates)); the default for a
    /// new run.
    pub resumed: LoopState,
}

/// Trains from the engine's current step until `plan.max_steps`, early stopping
/// or an interruption.
///
/// All ranks call this together. With `plan.best.load_at_end` the engine has
/// the weights of the best model afterwards.
///
/// # Errors
///
/// Returns the first failure of this rank with the step in which it occurred.
pub fn train<B, M, T>(
    engine: &mut Engine<B, M>,
    task: &T,
    source: &mut impl BatchSource<T::Batch>,
    plan: &TrainPlan,
    hooks: &mut [Box<dyn Hook + '_>],
) -> Result<Outcome, TrainError>
where
    B: OptimizerOps,
    M: AutodiffModule<Training<B>>,
    T: Task<B, M>,
{
    let mut run = TrainLoop {
        plan,
        hooks,
        saver: Saver::new(plan.checkpoints.as_ref(), plan.best),
        // The best value of another metric is not comparable and is dropped
        // here.
        state: plan.resumed.resumed_with(&plan.best),
        first_step: engine.global_steps(),
    };
    if let (0, Some(best), None) = (engine.rank(), plan.resumed.best, run.state.best) {
        warn!(
            "the best evaluation so far, of step {}, used a different metric or different data; the \
             best model is chosen among later evaluations",
            best.step
        );
    }
    let step = engine.global_steps();
    // If the previous run was interrupted during an evaluation, the evaluation
    // is repeated first.
    let mut is_interrupted = plan.resumed.evaluation_pending
        && !run.evaluate(engine, task, source).map_err(|cause| TrainError { step, cause })?;
    while !is_interrupted && !run.is_over(engine) {
        let step = engine.global_steps() + 1;
        is_interrupted =
            run.step(engine, task, source).map_err(|cause| TrainError { step, cause })?;
    }
    let step = engine.global_steps();
    run.end(engine, source, is_interrupted).map_err(|cause| TrainError { step, cause })
}

/// The state of a training loop.
struct TrainLoop<'a, 'b> {
    /// The settings of the run.
    plan: &'a TrainPlan,
    /// The observers of this rank.
    hooks: &'a mut [Box<dyn Hook + 'b>],
    /// Saves checkpoints, one at a time.
    saver: Saver<'a>,
    /// The state that checkpoints store: the best evaluation, and whether an
    /// evaluation is pending.
    state: LoopState,
    /// The number of optimizer steps before this run.
    first_step: u64,
}

impl TrainLoop<'_, '_> {
    /// Returns true if all steps were taken or early stopping applies.
    fn is_over<B, M>(&self, engine: &Engine<B, M>) -> bool
    where
        B: OptimizerOps,
        M: AutodiffModule<Training<B>>,
    {
        engine.global_steps() >= self.plan.max_steps || self.state.stops(&self.plan.best)
    }

    /// Runs one optimizer step, and the evaluation and the checkpoint that are
    /// due after it. Returns true if a rank was interrupted.
    ///
    /// `evaluation_pending` is set before the evaluation. If the run is
    /// interrupted before the evaluation ends, the flag is saved in the
    /// checkpoint, and the resumed run evaluates first.
    ///
    /// # Errors
    ///
    /// Returns a failure of the engine, the task, a hook or the data.
    fn step<B, M, T>(
        &mut self,
        engine: &mut Engine<B, M>,
        task: &T,
        source: &mut impl BatchSource<T::Batch>,
    ) -> Result<bool, Cause>
    where
        B: OptimizerOps,
        M: AutodiffModule<Training<B>>,
        T: Task<B, M>,
    {
        let plan = self.plan;
        let step = engine.global_steps() + 1;
        let samples_before = engine.global_samples();
        if let Some(sizes) = &plan.batch_sizes {
            // The schedule counts steps from 0, the loop from 1.
            let size = sizes.at(step as usize - 1).train_batch_size;
            engine.set_train_batch_size(size)?;
        }
        for hook in self.hooks.iter_mut() {
            hook.before_step(step).map_err(Cause::Outside)?;
        }
        let counts = plan.counted_step == Some(step);
        if counts {
            engine.states().start_counting();
        }
        let data = self.take_data(engine, source)?;
        let mine =
            RankFlags { interrupted: plan.interrupt.is_asked(), written: self.saver.has_written() };
        let (row, all) = train_step(engine, task, data, self.hooks, mine)?;
        // Every rank sees the same flag, so all of them commit the checkpoint
        // at this step.
        if all.written {
            self.saver.finish(engine, &self.state)?;
        }
        for hook in self.hooks.iter_mut() {
            hook.after_step(&row, engine.global_samples()).map_err(Cause::Outside)?;
        }
        if counts {
            let operations = engine.states().stop_counting();
            for hook in self.hooks.iter_mut() {
                hook.after_count(&operations, &row).map_err(Cause::Outside)?;
            }
        }
        let samples = [samples_before, engine.global_samples()];
        let is_due =
            |every: Option<Interval>| every.is_some_and(|every| every.is_due(step, samples));
        self.state.evaluation_pending = is_due(plan.eval_steps) || step == plan.max_steps;
        if all.interrupted
            || (self.state.evaluation_pending && !self.evaluate(engine, task, source)?)
        {
            return Ok(true);
        }
        let saves = plan.checkpoints.as_ref().and_then(|plan| plan.save_steps);
        let is_due = saves.is_some() && self.is_over(engine) || is_due(saves);
        self.saver.save_if_due(engine, is_due, source.position(), self.state)?;
        Ok(false)
    }

    /// Takes the micro-batches of a step.
    ///
    /// No rank starts to compute before all ranks have their data. If one rank
    /// cannot read its data, all ranks are therefore still at a complete step,
    /// which is saved.
    ///
    /// # Errors
    ///
    /// Returns [`Cause::Data`] if a rank cannot read its data, on every rank.
    fn take_data<B, M, T: Batch>(
        &mut self,
        engine: &mut Engine<B, M>,
        source: &mut impl BatchSource<T>,
    ) -> Result<StepData<T>, Cause>
    where
        B: OptimizerOps,
        M: AutodiffModule<Training<B>>,
    {
        let started = Instant::now();
        // The memory peaks of a step include reading its data.
        engine.ledger().reset_peaks();
        // Dynamic batching and curricula depend on the number of applied steps,
        // so skipped ones do not count.
        let next = NextStep {
            micro_batches: engine.batch().gradient_accumulation_steps,
            applied_steps: engine.global_steps() - engine.skipped_steps(),
        };
        // The position is read before the data, so it is the position after the
        // last complete step.
        let position = source.position();
        let taken = trace_span!("data").in_scope(|| source.next_step(next));
        let waited = started.elapsed();
        let batches = taken.as_ref().map(|step| &step.micro_batches[..]).ok();
        let totals = Totals::over_ranks(engine, batches)?;
        match (taken, totals) {
            (Ok(StepBatches { micro_batches, size }), Some(totals)) => {
                if let Some(StepSize { samples, lr_factor }) = size {
                    engine.size_next_step(samples, lr_factor);
                }
                Ok(StepData { started, waited, micro_batches, totals })
            }
            (taken, _) => Err(self.stop_without_data(engine, position, taken.err())),
        }
    }

    /// Saves the last complete step after a rank could not read its data, and
    /// returns the failure.
    ///
    /// `cause` is the error of this rank, if it has one. `position` is the
    /// position of its data after the last complete step.
    fn stop_without_data<B, M>(
        &mut self,
        engine: &Engine<B, M>,
        position: Value,
        cause: Option<BoxError>,
    ) -> Cause
    where
        B: OptimizerOps,
        M: AutodiffModule<Training<B>>,
    {
        // If no step was taken, there is nothing new to save.
        let saved = match engine.global_steps() > self.first_step {
            true => self.saver.save_last(engine, position, self.state),
            false => Ok(None),
        };
        match saved {
            Ok(checkpoint) => data_failure(engine, cause, checkpoint),
            Err(error) => error.into(),
        }
    }

    /// Evaluates, if there is evaluation data. Returns `false` if a rank was
    /// interrupted during the evaluation.
    ///
    /// # Errors
    ///
    /// Returns a failure of the engine, the task, a hook or the evaluation
    /// data.
    fn evaluate<B, M, T>(
        &mut self,
        engine: &Engine<B, M>,
        task: &T,
        source: &mut impl BatchSource<T::Batch>,
    ) -> Result<bool, Cause>
    where
        B: OptimizerOps,
        M: AutodiffModule<Training<B>>,
        T: Task<B, M>,
    {
        let position = source.position();
        let batches: EvaluationStream<'_, T::Batch> = match source.evaluation() {
            Ok(Some(batches)) => batches,
            Ok(None) => {
                self.state.evaluation_pending = false;
                return Ok(true);
            }
            // The error is passed on as the first batch, so that all ranks are
            // informed in the same exchange.
            Err(error) => Box::new(std::iter::once(Err(error))),
        };
        let hooks = &mut *self.hooks;
        let after_batch = |progress| {
            hooks.iter_mut().for_each(|hook| hook.after_evaluation_batch(progress));
        };
        let interrupt = &self.plan.interrupt;
        let measured = match evaluate_until(engine, task, batches, interrupt, after_batch)? {
            EvaluationEnd::Completed(measured) => measured,
            EvaluationEnd::Interrupted => return Ok(false),
            EvaluationEnd::Unreadable(cause) => {
                return Err(self.stop_without_data(engine, position, cause));
            }
        };
        let is_best = self.state.record(&self.plan.best, &measured.row);
        self.saver.note_evaluation(&measured.row, is_best);
        for hook in self.hooks.iter_mut() {
            hook.after_evaluation(&measured.row, engine.global_samples())
                .map_err(Cause::Outside)?;
        }
        Ok(true)
    }

    /// Ends the run: completes the checkpoint in progress, loads the best model
    /// and calls the hooks.
    fn end<B, M, T>(
        mut self,
        engine: &mut Engine<B, M>,
        source: &impl BatchSource<T>,
        is_interrupted: bool,
    ) -> Result<Outcome, Cause>
    where
        B: OptimizerOps,
        M: AutodiffModule<Training<B>>,
    {
        if is_interrupted {
            let checkpoint = self.saver.save_last(engine, source.position(), self.state)?;
            finish(self.hooks)?;
            return Ok(Outcome::Interrupted { checkpoint });
        }
        self.saver.finish(engine, &self.state)?;
        let step = engine.global_steps();
        if self.plan.best.load_at_end {
            self.load_best(engine)?;
        }
        finish(self.hooks)?;
        Ok(Outcome::Finished { step, best: self.state.best })
    }

    /// Loads the weights of the best model.
    ///
    /// The optimizer states are not loaded, because training is over. If no
    /// evaluation had a finite metric, the model of the last step is kept and a
    /// warning is logged.
    ///
    /// # Errors
    ///
    /// Returns an error if the best checkpoint is missing or cannot be loaded.
    fn load_best<B, M>(&self, engine: &mut Engine<B, M>) -> Result<(), Cause>
    where
        B: OptimizerOps,
        M: AutodiffModule<Training<B>>,
    {
        let Some((best, checkpoints)) = self.state.best.zip(self.plan.checkpoints.as_ref()) else {
            if engine.rank() == 0 {
                warn!("no evaluation returned a finite metric; the model of the last step is kept");
            }
            return Ok(());
        };
        let outside = |error: TrainingCheckpointError| Cause::Outside(error.into());
        let found = best.checkpoint(&checkpoints.root).map_err(|error| outside(error.into()))?;
        let Some(checkpoint) = found else {
            let root = checkpoints.root.display();
            let step = best.step;
            return Err(Cause::Outside(
                format!(
                    "load_best_model_at_end: {root} has no checkpoint of step {step}, the best one; \
                     it could not be saved or was deleted; resume from another checkpoint, or set \
                     load_best_model_at_end to false"
                )
                .into(),
            ));
        };
        engine.load_checkpoint(&checkpoint, LoadPlan::ModuleOnly).map_err(outside)?;
        Ok(())
    }
}

/// Calls [`Hook::finish`] of all hooks.
fn finish(hooks: &mut [Box<dyn Hook + '_>]) -> Result<(), Cause> {
    hooks.iter_mut().try_for_each(|hook| hook.finish()).map_err(Cause::Outside)
}

/// Flags that the ranks combine once per step.
struct RankFlags {
    /// Whether this rank was interrupted; over all ranks, whether any was.
    interrupted: bool,
    /// Whether this rank has written its part of a checkpoint; over all ranks,
    /// whether every rank has.
    written: bool,
}

/// The data of one optimizer step.
struct StepData<T> {
    /// The start time of the step.
    started: Instant,
    /// The time spent waiting for the data.
    waited: Duration,
    /// The micro-batches of this rank, in order.
    micro_batches: Vec<T>,
    /// The sums over the micro-batches of all ranks.
    totals: Totals,
}

/// Runs one optimizer step: all its micro-batches and the update. Returns its
/// record and the combined flags of all ranks.
///
/// Each micro-batch is weighted by its number of targets, so that the gradient
/// of a step is the mean over all targets of the step on all ranks, even if
/// micro-batches have different lengths. The factor `world_size` is needed
/// because gradients are averaged over ranks.
///
/// ```text
/// weight of micro-batch i on rank r = targets(r, i) * world_size / targets of the step
/// ```
fn train_step<B, M, T>(
    engine: &mut Engine<B, M>,
    task: &T,
    data: StepData<T::Batch>,
    hooks: &mut [Box<dyn Hook + '_>],
    mine: RankFlags,
) -> Result<(StepRow, RankFlags), Cause>
where
    B: OptimizerOps,
    M: AutodiffModule<Training<B>>,
    T: Task<B, M>,
{
    let StepData { started, waited, micro_batches: batches, totals } = data;
    let world_size = engine.group().world_size() as f64;
    let mut loss_sum = 0.0;
    let mut taken = None;
    for batch in batches {
        let targets = batch.num_targets() as f64;
        let loss = engine.forward(|model| task.loss(model, &batch))?.map_err(Cause::Outside)?;
        // The loss of a step is the sum over all targets divided by their
        // number, so that micro-batches of different lengths are weighted
        // correctly.
        loss_sum += targets * loss.clone().into_scalar().elem::<f64>();
        hooks.iter_mut().for_each(|hook| hook.after_phase(engine.ledger()));
        engine.backward_weighted(loss, targets * world_size / totals.targets)?;
        hooks.iter_mut().for_each(|hook| hook.after_phase(engine.ledger()));
        taken = engine.step()?;
        hooks.iter_mut().for_each(|hook| hook.after_phase(engine.ledger()));
    }
    // The loss and the flags share one collective, because its latency does not
    // depend on the number of values.
    let message = vec![loss_sum, f64::from(mine.interrupted), f64::from(mine.written)];
    let sums =
        engine.group().sum(CollectiveTag::new("loss", 0), message).map_err(EngineError::from)?;
    let all = RankFlags { interrupted: sums[1] > 0.0, written: sums[2] == world_size };

    let step = taken.ok_or(EngineError::Order {
        call: "train",
        when: "with accumulation boundaries set by hand",
    })?;
    let PhaseTimes { forward, backward, step: optimizer } = engine.take_times();
    let [data, forward, backward, optimizer] =
        [waited, forward, backward, optimizer].map(|time| time.as_secs_f64());
    engine.count_tokens(totals.tokens as u64);
    let row = step_row(engine, step, sums[0] / totals.targets, totals.tokens, started);
    let seconds = Some(PhaseSeconds { data, forward, backward, optimizer });
    Ok((StepRow { seconds, ..row }, all))
}

/// Sums over all micro-batches of a step on all ranks.
struct Totals {
    /// The number of tokens, for throughput.
    tokens: f64,
    /// The number of targets (labelled tokens or samples), at least 1.
    targets: f64,
}

impl Totals {
    /// Sums `batches` over all ranks. A rank that could not read its data
    /// passes `None`, and then all ranks return `None`.
    fn over_ranks<B, M, T: Batch>(
        engine: &Engine<B, M>,
        batches: Option<&[T]>,
    ) -> Result<Option<Self>, EngineError>
    where
        B: OptimizerOps,
        M: AutodiffModule<Training<B>>,
    {
        let own = batches.unwrap_or_default();
        let tokens: usize = own.iter().map(Batch::num_tokens).sum();
        let targets: usize = own.iter().map(Batch::num_targets).sum();
        let mine = vec![tokens as f64, targets as f64, f64::from(batches.is_none())];
        let sums = engine.group().sum(CollectiveTag::new("batch totals", 0), mine)?;
        // A step without any target has a loss and gradients of 0 instead of
        // 0/0.
        let totals = Self { tokens: sums[0], targets: sums[1].max(1.0) };
        Ok((sums[2] == 0.0).then_some(totals))
    }
}

/// Builds the record of a step.
///
/// `loss` is the mean over all targets of the step, and `tokens` counts all
/// ranks. The time is measured on this rank since `started` and includes
/// waiting for data.
fn step_row<B, M>(
    engine: &Engine<B, M>,
    step: Step,
    loss: f64,
    tokens: f64,
    started: Instant,
) -> StepRow
where
    B: OptimizerOps,
    M: AutodiffModule<Training<B>>,
{
    let step_seconds = started.elapsed().as_secs_f64();
    StepRow {
        step: step.number,
        loss,
        lr: step.learning_rate,
        grad_norm: step.gradient_norm,
        loss_scale: step.loss_scale,
        skipped: step.is_skipped(),
        tokens: tokens as u64,
        step_seconds,
        tokens_per_second: tokens / step_seconds,
        memory: memory_row(engine),
        seconds: None,
    }
}

/// Returns the memory of this rank during the last step.
///
/// For parameters and optimizer states these are the current bytes, which do
/// not change within a step. All other values are the peaks of the step.
fn memory_row<B, M>(engine: &Engine<B, M>) -> MemoryRow
where
    B: OptimizerOps,
    M: AutodiffModule<Training<B>>,
{
    let usage = |category| engine.ledger().usage(category);
    let total = |tier| engine.ledger().total_on(tier).peak as u64;
    MemoryRow {
        parameters: usage(Category::Parameters).current as u64,
        gradients: usage(Category::Gradients).peak as u64,
        optimizer: usage(Category::Optimizer).current as u64,
        gathered_peak: usage(Category::Gathered).peak as u64,
        activations_peak: usage(Category::Activations).peak as u64,
        device_peak: total(Tier::Device),
        host_peak: total(Tier::Host),
        disk_peak: total(Tier::Disk),
        rss: resident_bytes(),
    }
}

/// Returns the resident set size of this process; 0 if the operating system
/// does not report it.
fn resident_bytes() -> u64 {
    memory_stats::memory_stats().map_or(0, |stats| stats.physical_mem as u64)
}
