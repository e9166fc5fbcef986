//! The training loop: batches in, optimizer steps and their record out.

use std::sync::Once;
use std::time::Instant;

use burn::module::AutodiffModule;
use burn::tensor::ElementConversion;
use deepburn_comm::Tag;
use deepburn_config::BatchSchedule;
use deepburn_ops::OptimizerOps;
use deepburn_zero::{Category, Ledger, ModuleOperations, Tier, Training};
use tracing::trace_span;

use crate::engine::{PhaseTimes, Step};
use crate::metrics::{EvalRow, MemoryRow, PhaseSeconds, StepRow};
use crate::saving::{CheckpointPlan, Interrupt, Outcome, Saver};
use crate::source::{BatchSource, NextStep, StepBatches, StepSize};
use crate::task::{Batch, Confusion, Evaluation, Task};
use crate::{Engine, EngineError};

/// A failure of the training loop: what failed, and in which step.
#[derive(Debug, thiserror::Error)]
#[error("step {step}: {cause}")]
pub struct TrainError {
    /// Number of the optimizer step, from 1.
    pub step: u64,
    /// What failed.
    #[source]
    pub cause: Cause,
}

/// What failed in a step.
#[derive(Debug, thiserror::Error)]
pub enum Cause {
    /// The engine.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The data or a hook.
    #[error(transparent)]
    Outside(Box<dyn std::error::Error + Send + Sync>),
}

/// A failure of data or of a hook.
pub type OutsideError = Box<dyn std::error::Error + Send + Sync>;

/// Something that watches a run. Every rank has its own hooks and calls them at the same steps.
pub trait Hook {
    /// Called before each optimizer step.
    ///
    /// # Errors
    /// An error ends the run on all ranks.
    fn before_step(&mut self, _step: u64) -> Result<(), OutsideError> {
        Ok(())
    }

    /// Called after the step whose operations were counted.
    ///
    /// # Errors
    /// An error ends the run on all ranks.
    fn after_count(
        &mut self,
        _operations: &[ModuleOperations],
        _row: &StepRow,
    ) -> Result<(), OutsideError> {
        Ok(())
    }

    /// Called after each forward, backward and update, with what this rank holds then.
    fn after_phase(&mut self, _ledger: &Ledger) {}

    /// Called after each optimizer step, with its record and the samples so far, over all ranks.
    ///
    /// # Errors
    /// An error ends the run on all ranks.
    fn after_step(&mut self, _row: &StepRow, _samples: u64) -> Result<(), OutsideError> {
        Ok(())
    }

    /// Called when training ends, at its last step or before.
    ///
    /// # Errors
    /// An error ends the run on all ranks.
    fn finish(&mut self) -> Result<(), OutsideError> {
        Ok(())
    }

    /// Called after each evaluation.
    ///
    /// # Errors
    /// An error ends the run on all ranks.
    fn after_evaluation(&mut self, _row: &EvalRow, _samples: u64) -> Result<(), OutsideError> {
        Ok(())
    }
}

/// How long to train, in steps of which size, and when to evaluate.
#[derive(Debug, Clone, Default)]
pub struct TrainPlan {
    /// Optimizer steps.
    pub max_steps: u64,
    /// Samples of each step; `None` leaves them as the engine has them.
    pub batch_sizes: Option<BatchSchedule>,
    /// Optimizer steps between two evaluations; `None` evaluates at the end only.
    pub eval_steps: Option<u64>,
    /// The step whose operations are counted.
    pub counted_step: Option<u64>,
    /// When to save; `None` saves nothing.
    pub checkpoints: Option<CheckpointPlan>,
    /// Who may end the run before its time; it is enough that one rank is asked.
    pub interrupt: Interrupt,
}

/// Trains from where the engine stands until `plan.max_steps`. All ranks call this together.
///
/// # Errors
/// The first failure of this rank, with the step in which it happened.
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
    let mut saver = Saver::new(plan.checkpoints.as_ref());
    while engine.global_steps() < plan.max_steps {
        let step = engine.global_steps() + 1;
        let failed = |cause| TrainError { step, cause };
        if let Some(sizes) = &plan.batch_sizes {
            let size = sizes.at(step as usize - 1).train_batch_size;
            engine.set_train_batch_size(size).map_err(|error| failed(error.into()))?;
        }
        let outside = |error| failed(Cause::Outside(error));
        for hook in hooks.iter_mut() {
            hook.before_step(step).map_err(outside)?;
        }
        let counts = plan.counted_step == Some(step);
        if counts {
            engine.states().start_counting();
        }
        let mine = Notice { asked: plan.interrupt.is_asked(), written: saver.has_written() };
        let (row, all) = train_step(engine, task, source, hooks, mine).map_err(failed)?;
        if all.written {
            saver.finish(engine).map_err(|error| failed(error.into()))?;
        }
        let samples = engine.global_samples();
        for hook in hooks.iter_mut() {
            hook.after_step(&row, samples).map_err(outside)?;
        }
        if counts {
            let operations = engine.states().stop_counting();
            for hook in hooks.iter_mut() {
                hook.after_count(&operations, &row).map_err(outside)?;
            }
        }
        let due = plan.eval_steps.is_some_and(|every| step.is_multiple_of(every.max(1)));
        let mut metric = None;
        if (due || step == plan.max_steps)
            && let Some(batches) = source.evaluation().map_err(outside)?
        {
            let measured = evaluate(engine, task, &batches).map_err(failed)?;
            metric = Some(measured.row.eval_loss);
            for hook in hooks.iter_mut() {
                hook.after_evaluation(&measured.row, samples).map_err(outside)?;
            }
        }
        if all.asked {
            let saved = saver.save_last(engine, source.position(), metric);
            let checkpoint = saved.map_err(|error| failed(error.into()))?;
            finish(hooks).map_err(failed)?;
            return Ok(Outcome::Interrupted { checkpoint });
        }
        let saved = saver.save_if_due(engine, plan.max_steps, source.position(), metric);
        saved.map_err(|error| failed(error.into()))?;
    }
    let step = engine.global_steps();
    let failed = |cause| TrainError { step, cause };
    saver.finish(engine).map_err(|error| failed(error.into()))?;
    finish(hooks).map_err(failed)?;
    Ok(Outcome::Finished)
}

fn finish(hooks: &mut [Box<dyn Hook + '_>]) -> Result<(), Cause> {
    hooks.iter_mut().try_for_each(|hook| hook.finish()).map_err(Cause::Outside)
}

/// What ranks tell each other once a step.
struct Notice {
    /// Whether this rank, of all whether any, was asked to end the run.
    asked: bool,
    /// Whether this rank, of all whether each, has written its part of a checkpoint.
    written: bool,
}

/// One optimizer step: all its micro-batches and the update, and where its time went. Also tells what
/// holds for all ranks.
fn train_step<B, M, T>(
    engine: &mut Engine<B, M>,
    task: &T,
    source: &mut impl BatchSource<T::Batch>,
    hooks: &mut [Box<dyn Hook + '_>],
    mine: Notice,
) -> Result<(StepRow, Notice), Cause>
where
    B: OptimizerOps,
    M: AutodiffModule<Training<B>>,
    T: Task<B, M>,
{
    let started = Instant::now();
    engine.ledger().reset_peaks();
    let next = NextStep {
        micro_batches: engine.batch().gradient_accumulation_steps,
        applied_steps: engine.global_steps() - engine.skipped_steps(),
    };
    let StepBatches { micro_batches: batches, size } =
        trace_span!("data").in_scope(|| source.next_step(next)).map_err(Cause::Outside)?;
    let waited = started.elapsed();
    if let Some(StepSize { samples, lr_factor }) = size {
        engine.size_next_step(samples, lr_factor);
    }
    let totals = Totals::over_ranks(engine, &batches)?;

    let world_size = engine.group().world_size() as f64;
    let mut loss_sum = 0.0;
    let mut taken = None;
    for batch in batches {
        let targets = batch.num_targets() as f64;
        let loss = engine.forward(|model| task.loss(model, &batch))?.map_err(Cause::Outside)?;
        loss_sum += targets * loss.clone().into_scalar().elem::<f64>();
        hooks.iter_mut().for_each(|hook| hook.after_phase(engine.ledger()));
        engine.backward_weighted(loss, targets * world_size / totals.targets)?;
        hooks.iter_mut().for_each(|hook| hook.after_phase(engine.ledger()));
        taken = engine.step()?;
        hooks.iter_mut().for_each(|hook| hook.after_phase(engine.ledger()));
    }
    // One message for all.
    let message = vec![loss_sum, f64::from(mine.asked), f64::from(mine.written)];
    let sums = engine.group().sum(Tag::new("loss", 0), message).map_err(EngineError::from)?;
    let all = Notice { asked: sums[1] > 0.0, written: sums[2] == world_size };

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

/// Sums over all micro-batches of a step, on all ranks.
struct Totals {
    tokens: f64,
    targets: f64,
}

impl Totals {
    fn over_ranks<B, M>(engine: &Engine<B, M>, batches: &[impl Batch]) -> Result<Self, EngineError>
    where
        B: OptimizerOps,
        M: AutodiffModule<Training<B>>,
    {
        let tokens: usize = batches.iter().map(Batch::num_tokens).sum();
        let targets: usize = batches.iter().map(Batch::num_targets).sum();
        let mine = vec![tokens as f64, targets as f64];
        let sums = engine.group().sum(Tag::new("batch totals", 0), mine)?;
        // A step without any target has loss 0 and gradient 0, not 0/0.
        Ok(Self { tokens: sums[0], targets: sums[1].max(1.0) })
    }
}

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

/// Memory of this rank over the step that just ended.
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

/// Resident set of this process; 0 where the system does not tell.
fn resident_bytes() -> u64 {
    // A first call that runs beside another one finds the crate half-way through its set-up, and 0.
    static FIRST: Once = Once::new();
    FIRST.call_once(|| {
        memory_stats::memory_stats();
    });
    memory_stats::memory_stats().map_or(0, |stats| stats.physical_mem as u64)
}

/// What an evaluation found.
#[derive(Debug, Clone, PartialEq)]
pub struct Measured {
    /// The record of it.
    pub row: EvalRow,
    /// Targets that were judged.
    pub num_targets: u64,
    /// Which answers were given, where there is such a thing.
    pub answers: Option<Confusion>,
}

/// Mean loss over the batches of all ranks, of which each has as many, at least one.
///
/// # Errors
/// When a batch does not fit the model or a collective fails.
pub fn evaluate<B, M, T>(
    engine: &Engine<B, M>,
    task: &T,
    batches: &[T::Batch],
) -> Result<Measured, Cause>
where
    B: OptimizerOps,
    M: AutodiffModule<Training<B>>,
    T: Task<B, M>,
{
    // Loss, targets, then the counts of answers.
    let mut sums = vec![0.0; 2];
    for batch in batches {
        let measured = engine.evaluate(|model| task.evaluate(model, batch))?;
        let Evaluation { loss_sum, answers } = measured.map_err(Cause::Outside)?;
        let counts = answers.iter().flat_map(Confusion::counts);
        let found: Vec<f64> =
            [loss_sum, batch.num_targets() as f64].into_iter().chain(counts).collect();
        sums.resize(found.len(), 0.0);
        sums.iter_mut().zip(found).for_each(|(sum, found)| *sum += found);
    }
    let tag = Tag::new("evaluation", 0);
    let sums = engine.group().sum(tag, sums).map_err(EngineError::from)?;
    let answers = (sums.len() > 2).then(|| Confusion::from_counts(&sums[2..]));
    let accuracy = answers.as_ref().map(|answers| answers.num_correct() as f64 / sums[1]);
    Ok(Measured {
        row: EvalRow {
            step: engine.global_steps(),
            eval_loss: sums[0] / sums[1],
            eval_accuracy: accuracy,
        },
        num_targets: sums[1] as u64,
        answers,
    })
}
