//! The training loop: optimizer steps, evaluations, checkpoints and their records.
//!
//! Main function: [`train`]. One step of the loop, with its exchanges in brackets:
//!
//! ```text
//! read the data ─► [batch totals: tokens, targets, unreadable data]
//! micro-batches ─► forward ─► backward [gradients] ─► step [norm, parameters]
//!               ─► [loss, interruption, checkpoint written]
//! hooks ─► evaluation, if due ─► save, if due
//! ```
//!
//! Decisions that must be the same on all ranks (stopping, committing a checkpoint, ending after
//! unreadable data) depend on flags that are summed over the ranks, so all ranks leave the loop at
//! the same step. After an interruption or unreadable data, the last complete step is saved.
//!
//! A step without any target on any rank is skipped before its forward passes, so it changes
//! neither parameters nor optimizer states.
//!
//! The loop stores no separate files. Each checkpoint contains `LoopState`, the engine's counters
//! and the position of the data.

mod step;

use std::time::Instant;

use burn::module::AutodiffModule;
use deepburn_comm::CollectiveTag;
use deepburn_ops::OptimizerOps;
use deepburn_zero::Training;
use serde_json::Value;
use tracing::{trace_span, warn};

use crate::batch_schedule::BatchSchedule;
use crate::best::{BestPlan, LoopState};
use crate::evaluation::{EvaluationEnd, data_failure, evaluate_until};
use crate::final_model::{FinalModel, TrainingEnd, load_best};
use crate::hook::Hook;
use crate::interval::Interval;
use crate::saving::{CheckpointPlan, Interrupt, Outcome, Saver};
use crate::source::{BatchSource, EvaluationStream, NextStep, StepBatches, StepSize};
use crate::task::{GeneratedTexts, Task};
use crate::{BoxError, Cause, Engine, EngineError, TrainError};
use step::{RankFlags, StepData, Totals, complete};

/// The settings of a training loop: steps, batch sizes, evaluation and checkpoints.
#[derive(Debug, Clone, Default)]
pub struct TrainPlan {
    /// The number of optimizer steps, counted from the start of the first run.
    pub max_steps: u64,
    /// The number of samples of each step; `None` keeps the engine's batch size.
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
    /// ([`ClientStates::loop_state`](crate::ClientStates)); the default for a new run.
    pub resumed: LoopState,
}

/// Trains from the engine's current step until `plan.max_steps`, early stopping or an interruption.
///
/// All ranks call this together. With `plan.best.load_at_end` the engine has the weights of the
/// best model afterwards.
///
/// A step in which no micro-batch of any rank has a target is skipped with a warning: parameters,
/// optimizer states, schedule and loss scale stay unchanged, and its row has no loss and is marked
/// as skipped.
///
/// # Errors
/// Returns the first failure of this rank with the step in which it occurred. Ten consecutive steps
/// without any target are a failure, and so is a run in which no step has one.
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
    // The best value of another metric is not comparable and is dropped here.
    let state = plan.resumed.resumed_with(&plan.best);
    let mut run = TrainLoop {
        first_step: engine.global_steps(),
        engine,
        task,
        source,
        plan,
        hooks,
        saver: Saver::new(plan.checkpoints.as_ref(), plan.best, &state),
        state,
        empty_steps: 0,
        failed_evaluation: None,
    };
    if let (0, Some(best), None) = (run.engine.rank(), plan.resumed.best, run.state.best) {
        warn!(
            "the best evaluation so far, of step {}, used a different metric or different data; the \
             best model is chosen among later evaluations",
            best.step
        );
    }
    run.warn_of_missing_best();
    let step = run.engine.global_steps();
    if run.engine.step_state.is_accumulating() {
        let when = "in the middle of an accumulation (finish_accumulation or zero_grad ends it)";
        let cause = EngineError::Order { call: "train", when }.into();
        return Err(TrainError { step: step + 1, cause });
    }
    // If the previous run was interrupted during an evaluation, or while the model generated texts
    // after it, this is repeated first. The checkpoint that was saved at the interruption has no
    // metric, so the step is saved again if it is due or the best so far.
    let LoopState { evaluation_pending, texts_pending, .. } = plan.resumed;
    let mut is_interrupted = (evaluation_pending || texts_pending)
        && !run.evaluate_and_save().map_err(|cause| TrainError { step, cause })?;
    while !is_interrupted && !run.is_over() {
        let step = run.engine.global_steps() + 1;
        is_interrupted = run.step().map_err(|cause| TrainError { step, cause })?;
    }
    let step = run.engine.global_steps();
    run.end(is_interrupted).map_err(|cause| TrainError { step, cause })
}

/// The state of a training loop.
struct TrainLoop<'a, 'b, B: OptimizerOps, M: AutodiffModule<Training<B>>, T, S> {
    /// The engine of this rank.
    engine: &'a mut Engine<B, M>,
    /// Computes losses and metrics.
    task: &'a T,
    /// The data of this rank.
    source: &'a mut S,
    /// The settings of the run.
    plan: &'a TrainPlan,
    /// The observers of this rank.
    hooks: &'a mut [Box<dyn Hook + 'b>],
    /// Saves checkpoints, one at a time.
    saver: Saver<'a>,
    /// The state that checkpoints store: the best evaluation, and whether an evaluation is pending.
    state: LoopState,
    /// The number of optimizer steps before this run.
    first_step: u64,
    /// The number of consecutive steps without any target before the next step.
    empty_steps: u64,
    /// The reason why the evaluation after the last step failed.
    failed_evaluation: Option<String>,
}

/// How an evaluation between two steps ended.
enum Evaluated {
    /// It is complete, or there is no evaluation data.
    Completed,
    /// A rank was interrupted.
    Interrupted,
    /// The data of a rank cannot be read. The error is present on that rank only.
    Unreadable(Option<BoxError>),
}

/// A run ends at the last of this many consecutive steps without any target. A few such steps may
/// be due to single samples without labels. More of them mean that the labels are missing, or that
/// a curriculum, which depends on applied steps, never advances.
const MAX_EMPTY_STEPS: u64 = 10;

impl<B, M, T, S> TrainLoop<'_, '_, B, M, T, S>
where
    B: OptimizerOps,
    M: AutodiffModule<Training<B>>,
    T: Task<B, M>,
    S: BatchSource<T::Batch>,
{
    /// Calls all hooks, up to the first that fails.
    ///
    /// # Errors
    /// Returns the error of the hook.
    fn tell(
        &mut self,
        call: impl FnMut(&mut Box<dyn Hook + '_>) -> Result<(), BoxError>,
    ) -> Result<(), Cause> {
        self.hooks.iter_mut().try_for_each(call).map_err(Cause::Outside)
    }

    /// Warns at the start of a resumed run if the best model so far, which would be loaded at the
    /// end, has no checkpoint.
    fn warn_of_missing_best(&self) {
        let Some((best, plan)) = self.state.best.zip(self.plan.checkpoints.as_ref()) else {
            return;
        };
        if self.engine.rank() == 0 && self.plan.best.load_at_end && !best.is_saved(&plan.root) {
            warn!(
                "load_best_model_at_end: {} has no checkpoint of step {}, the best model so far; \
                 unless a later evaluation is better, the run ends with the model of its last step",
                plan.root.display(),
                best.step
            );
        }
    }

    /// Returns true if all steps were taken or early stopping applies.
    fn is_over(&self) -> bool {
        self.engine.global_steps() >= self.plan.max_steps || self.state.stops(&self.plan.best)
    }

    /// Runs one optimizer step, and the evaluation and the checkpoint that are due after it.
    /// Returns true if a rank was interrupted.
    ///
    /// `evaluation_pending` is set before the evaluation. If the run is interrupted before the
    /// evaluation ends, the flag is saved in the checkpoint, and the resumed run evaluates first.
    ///
    /// # Errors
    /// Returns a failure of the engine, the task, a hook or the data.
    fn step(&mut self) -> Result<bool, Cause> {
        let plan = self.plan;
        let step = self.engine.global_steps() + 1;
        // An interval of epochs ends at a number of samples, so the numbers before and after the
        // step are needed.
        let samples_before = self.engine.global_samples();
        if let Some(sizes) = &plan.batch_sizes {
            // The schedule counts steps from 0, the loop from 1.
            let size = sizes.at(step as usize - 1).train_batch_size;
            self.engine.set_train_batch_size(size)?;
        }
        self.tell(|hook| hook.before_step(step))?;
        let counts = plan.counted_step == Some(step);
        if counts {
            self.engine.states().start_counting();
        }
        let data = self.take_data(step)?;
        let mine =
            RankFlags { interrupted: plan.interrupt.is_asked(), written: self.saver.has_written() };
        let (row, all) = self.train_step(data, mine)?;
        // Every rank sees the same flag, so all of them commit the checkpoint at this step.
        if all.written {
            self.saver.finish(self.engine)?;
        }
        let samples = self.engine.global_samples();
        self.tell(|hook| hook.after_step(&row, samples))?;
        if counts {
            let operations = self.engine.states().stop_counting();
            self.tell(|hook| hook.after_count(&operations, &row))?;
        }
        let samples = [samples_before, samples];
        let is_due =
            |every: Option<Interval>| every.is_some_and(|every| every.is_due(step, samples));
        self.state.evaluation_pending = is_due(plan.eval_steps) || step == plan.max_steps;
        self.state.save_pending = is_due(plan.checkpoints.as_ref().and_then(|it| it.save_steps));
        // The flags above stay set and are saved with the checkpoint, so the resumed run starts
        // with this evaluation.
        if all.interrupted {
            return Ok(true);
        }
        Ok(!self.evaluate_and_save()?)
    }

    /// Runs the pending evaluation, if there is one, generates the texts after it, and saves the
    /// checkpoint that is due. Returns false if a rank was interrupted.
    ///
    /// If the evaluation after the last step cannot be read, all steps have been taken. The run
    /// then ends as finished, so that its model is not lost, and the outcome has the error.
    ///
    /// # Errors
    /// Returns a failure of the engine, the task, a hook or the data.
    fn evaluate_and_save(&mut self) -> Result<bool, Cause> {
        let position = self.source.position();
        let is_evaluated = self.state.evaluation_pending;
        if is_evaluated {
            match self.evaluate()? {
                Evaluated::Completed => {}
                Evaluated::Interrupted => return Ok(false),
                // A run with steps left cannot continue: the best model and early stopping depend
                // on this evaluation.
                Evaluated::Unreadable(cause)
                    if self.engine.global_steps() < self.plan.max_steps =>
                {
                    return Err(self.stop_without_data(position, cause));
                }
                Evaluated::Unreadable(cause) => {
                    self.finish_unevaluated(position, cause)?;
                    return Ok(true);
                }
            }
        }
        let is_complete = !self.state.texts_pending || self.generate()?;
        // The last step is due whenever checkpoints are saved at all. A run that resumes with texts
        // alone has its checkpoint, with the metric.
        let saves = self.plan.checkpoints.as_ref().is_some_and(|it| it.save_steps.is_some());
        let is_last = saves && is_evaluated && self.is_over();
        let is_due = std::mem::take(&mut self.state.save_pending) || is_last;
        self.saver.save_if_due(self.engine, is_due, position, self.state)?;
        Ok(is_complete)
    }

    /// Saves the last step, whose evaluation cannot be read, and records the error on all ranks.
    /// `cause` is the error of this rank, if it has one.
    ///
    /// # Errors
    /// Returns a failure of the engine.
    fn finish_unevaluated(
        &mut self,
        position: Value,
        cause: Option<BoxError>,
    ) -> Result<(), Cause> {
        let own = cause.map(|cause| cause.to_string()).unwrap_or_default();
        let tag = CollectiveTag::new("failed evaluation", 0);
        // Every rank sends its error, so that the outcome is the same on all ranks.
        let all =
            self.engine.group().gather_bytes(tag, own.as_bytes()).map_err(EngineError::from)?;
        let failed = all.iter().enumerate().find(|(_, message)| !message.is_empty());
        let reason = failed
            .map(|(rank, message)| format!("rank {rank}: {}", String::from_utf8_lossy(message)));
        let reason = reason.unwrap_or_else(|| "the evaluation data cannot be read".to_owned());
        if self.engine.rank() == 0 {
            let step = self.engine.global_steps();
            warn!("step {step}: the evaluation after the last step failed: {reason}");
        }
        self.failed_evaluation = Some(reason);
        self.saver.save_last(self.engine, position, self.state)?;
        Ok(())
    }

    /// Takes the micro-batches of a step.
    ///
    /// No rank starts to compute before all ranks have their data. If one rank cannot read its
    /// data, all ranks are therefore still at a complete step, which is saved.
    ///
    /// # Errors
    /// Returns [`Cause::Data`] on every rank if a rank cannot read its data, or if too many steps
    /// had no target.
    fn take_data(&mut self, step: u64) -> Result<StepData<T::Batch>, Cause> {
        let started = Instant::now();
        // The memory peaks of a step include reading its data.
        self.engine.ledger().reset_peaks();
        // Dynamic batching and curricula depend on the number of applied steps, so skipped ones do
        // not count.
        let next = NextStep {
            micro_batches: self.engine.batch().gradient_accumulation_steps,
            applied_steps: self.engine.global_steps() - self.engine.skipped_steps(),
        };
        // The position is read before the data, so it is the position after the last complete step.
        let position = self.source.position();
        let taken = trace_span!("data").in_scope(|| complete(self.source.next_step(next), next));
        let waited = started.elapsed();
        let batches = taken.as_ref().map(|step| &step.micro_batches[..]).ok();
        let totals = Totals::over_ranks(self.engine.states().data_group(), batches)?;
        match (taken, totals) {
            (Ok(StepBatches { micro_batches, size }), Some(totals)) => {
                if let Err(error) = self.check_targets(step, &totals) {
                    return Err(self.stop_without_data(position, Some(error)));
                }
                if let Some(StepSize { samples, lr_factor }) = size {
                    self.engine.size_next_step(samples, lr_factor);
                }
                Ok(StepData { started, waited, micro_batches, totals })
            }
            (taken, _) => Err(self.stop_without_data(position, taken.err())),
        }
    }

    /// Counts consecutive steps without any target, and logs a warning about each of them.
    ///
    /// # Errors
    /// Returns an error, on every rank, if there were too many of them, or if the run ends without
    /// any target.
    fn check_targets(&mut self, step: u64, totals: &Totals) -> Result<(), BoxError> {
        if totals.targets > 0.0 {
            self.empty_steps = 0;
            return Ok(());
        }
        self.empty_steps += 1;
        let taught_nothing = step == self.plan.max_steps
            && self.empty_steps == self.plan.max_steps - self.first_step;
        if taught_nothing || self.empty_steps == MAX_EMPTY_STEPS {
            return Err(format!(
                "{} with this one had no target on any rank, so there is nothing to learn from: give the data \
                 labels that are not ignored; with a curriculum, raise curriculum_learning.min_difficulty (a \
                 language model needs at least 2 tokens)",
                match self.empty_steps {
                    1 => "the only step".to_owned(),
                    steps => format!("the last {steps} steps together"),
                }
            )
            .into());
        }
        if self.engine.rank() == 0 {
            warn!(
                "step {step} is skipped, because none of its micro-batches has a target on any rank: parameters, \
                 optimizer states and learning-rate schedule stay unchanged; check the labels of the data"
            );
        }
        Ok(())
    }

    /// Saves the last complete step after a rank could not read its data, and returns the failure.
    ///
    /// `cause` is the error of this rank, if it has one. `position` is the position of its data
    /// after the last complete step.
    fn stop_without_data(&mut self, position: Value, cause: Option<BoxError>) -> Cause {
        // If no step was taken, there is nothing new to save.
        let saved = match self.engine.global_steps() > self.first_step {
            true => self.saver.save_last(self.engine, position, self.state),
            false => Ok(None),
        };
        match saved {
            Ok(checkpoint) => data_failure(self.engine, cause, checkpoint),
            Err(error) => error.into(),
        }
    }

    /// Evaluates, if there is evaluation data.
    ///
    /// # Errors
    /// Returns a failure of the engine, the task or a hook.
    fn evaluate(&mut self) -> Result<Evaluated, Cause> {
        let batches: EvaluationStream<'_, T::Batch> = match self.source.evaluation() {
            Ok(Some(batches)) => batches,
            Ok(None) => {
                self.state.evaluation_pending = false;
                return Ok(Evaluated::Completed);
            }
            // The error is passed on as the first batch, so that all ranks are informed in the same
            // exchange.
            Err(error) => Box::new(std::iter::once(Err(error))),
        };
        let hooks = &mut *self.hooks;
        let after_batch = |progress| {
            hooks.iter_mut().for_each(|hook| hook.after_evaluation_batch(progress));
        };
        let interrupt = &self.plan.interrupt;
        let measured =
            match evaluate_until(self.engine, self.task, batches, interrupt, after_batch)? {
                EvaluationEnd::Completed(measured) => measured,
                EvaluationEnd::Interrupted => return Ok(Evaluated::Interrupted),
                EvaluationEnd::Unreadable(cause) => return Ok(Evaluated::Unreadable(cause)),
            };
        if measured.num_targets > 0 {
            let is_best = self.state.record(&self.plan.best, &measured.row);
            self.saver.note_evaluation(&measured.row, is_best);
            // Without steps, the caller asked for nothing but the evaluation, and has its result.
            let loss = measured.row.eval_loss;
            if !loss.is_finite() && self.engine.rank() == 0 && self.plan.max_steps > 0 {
                warn!(
                    "the evaluation after step {} has a loss of {loss}, which counts as no improvement; lower the \
                     learning rate, or train in bf16 instead of fp16",
                    measured.row.step
                );
            }
        } else {
            // There is no metric to compare, so neither the best model nor early stopping depends
            // on this evaluation.
            self.state.evaluation_pending = false;
            if self.engine.rank() == 0 {
                warn!(
                    "the evaluation after step {} has no loss, because the evaluation data has no target: give it \
                     labels that are not ignored",
                    measured.row.step
                );
            }
        }
        let samples = self.engine.global_samples();
        self.tell(|hook| hook.after_evaluation(&measured.row, samples))?;
        self.state.texts_pending = true;
        Ok(Evaluated::Completed)
    }

    /// Generates the texts after an evaluation. Returns false if a rank was interrupted. The
    /// checkpoint then has the flag, and the resumed run generates all texts of the evaluation.
    ///
    /// # Errors
    /// Returns a failure of the task or a hook.
    fn generate(&mut self) -> Result<bool, Cause> {
        let generated =
            self.task.generate(self.engine, &self.plan.interrupt).map_err(Cause::Outside)?;
        let resumes = self.plan.checkpoints.is_some();
        if let (GeneratedTexts::Part(_), 0) = (&generated, self.engine.rank()) {
            let when = if resumes { "when the run resumes" } else { "never" };
            let step = self.engine.global_steps();
            warn!(
                "interrupted: texts after the evaluation of step {step} will be generated {when}"
            );
        }
        let texts = match generated {
            GeneratedTexts::Part(_) if resumes => return Ok(false),
            GeneratedTexts::Part(texts) | GeneratedTexts::All(texts) => texts,
        };
        self.state.texts_pending = false;
        if !texts.is_empty() {
            self.tell(|hook| hook.after_generation(&texts))?;
        }
        Ok(true)
    }

    /// Ends the run: completes the checkpoint in progress, loads the best model and calls the
    /// hooks.
    fn end(mut self, is_interrupted: bool) -> Result<Outcome, Cause> {
        if is_interrupted {
            let checkpoint =
                self.saver.save_last(self.engine, self.source.position(), self.state)?;
            self.tell(|hook| hook.finish())?;
            return Ok(Outcome::Interrupted { checkpoint });
        }
        self.saver.finish(self.engine)?;
        let step = self.engine.global_steps();
        let model = match self.plan.best.load_at_end {
            true => self.load_best()?,
            false => FinalModel::Last,
        };
        self.tell(|hook| hook.finish())?;
        let Self { state, failed_evaluation, .. } = self;
        Ok(Outcome::Finished(TrainingEnd { step, best: state.best, model, failed_evaluation }))
    }

    /// Loads the weights of the best model, and returns which model the engine has then.
    ///
    /// If no evaluation had a finite metric, or the best model cannot be loaded, the model of the
    /// last step is kept and a warning is logged.
    ///
    /// # Errors
    /// Returns the errors of [`load_best`].
    fn load_best(&mut self) -> Result<FinalModel, Cause> {
        let Some(best) = &self.state.best else {
            if self.engine.rank() == 0 {
                warn!(
                    "no evaluation with the current settings has a finite metric; the model of the last step is kept"
                );
            }
            return Ok(FinalModel::Last);
        };
        let root = self.plan.checkpoints.as_ref().map(|checkpoints| checkpoints.root.as_path());
        let last_metric = self.saver.metric_of(self.engine.global_steps());
        load_best(self.engine, best, root, last_metric)
    }
}
