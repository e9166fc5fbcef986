//! The part of a run that every rank executes: restore, train, export and test.
//!
//! Main function: [`train_rank`]. All ranks call it together, and every collective in it is called
//! on all of them.
//!
//! An error of one rank ends all ranks, so the ranks do not have to agree after each phase. A
//! signal is different, because ranks receive it at different times. So the training loop and the
//! evaluation exchange a flag between steps or batches, and all ranks return the same
//! [`RankOutcome`].

use std::cell::Cell;
use std::path::PathBuf;
use std::rc::Rc;

use burn::module::AutodiffModule;
use deepburn::metrics::EvalRow;
use deepburn::ops::{FusedOps, OptimizerOps};
use deepburn::zero::{Group, Training};
use deepburn::{
    BestEvaluation, BestMetric, BestPlan, BoxError, EarlyStopping, Engine, EvaluationEnd,
    FinalModel, Hook, Interrupt, LoopState, Outcome, TrainError, TrainPlan, TrainingEnd,
};
use deepburn_config::{ModelMetric, counted};
use deepburn_datasets::DataShard;

use crate::console;
use crate::data::recipe::Recipe;
use crate::run::hooks::RankHooks;
use crate::run::preparation::Preparation;
use crate::run::prepared::{PreparedRun, Purpose};
use crate::run::progress_hook::with_progress;
use crate::run::results::{record_model, record_test, save_model};
use crate::run::resume;
use crate::run::signals::Signals;
use crate::run::swap::report_swap;
use crate::run::wandb::WandbRecord;

/// How a rank ended.
pub(super) enum RankOutcome {
    /// The model is saved, and tested if there is a test split.
    Finished,
    /// A signal stopped training.
    Interrupted {
        /// The checkpoint to resume from.
        checkpoint: Option<PathBuf>,
    },
    /// A signal stopped the test. The model is saved.
    WithoutTest {
        /// The last step of training.
        step: u64,
    },
    /// The model was evaluated without training.
    Evaluated,
    /// A signal stopped the run before its first step.
    WithoutSteps,
    /// A signal stopped an evaluation without training.
    WithoutEvaluation,
}

impl RankOutcome {
    /// Returns the exit status of the process, which is 128 plus the signal number if a signal
    /// stopped the run.
    pub(super) fn status(&self, signals: &Signals) -> u8 {
        match self {
            Self::Finished | Self::Evaluated => 0,
            Self::Interrupted { .. }
            | Self::WithoutTest { .. }
            | Self::WithoutSteps
            | Self::WithoutEvaluation => 128 + signals.last().0,
        }
    }

    /// Returns whether the trained model is saved.
    pub(super) fn has_model(&self) -> bool {
        matches!(self, Self::Finished | Self::WithoutTest { .. })
    }
}

/// The inputs of one rank. Ranks of a process share `recipe` and `signals`.
pub(super) struct RankRun<'a, B: FusedOps + OptimizerOps, R: Recipe<B>> {
    /// The recipe, shared by all ranks of the process.
    pub(super) recipe: &'a R,
    /// Model of this rank, without weights until it is sharded.
    pub(super) model: R::Model,
    /// The process group, with the rank of this member.
    pub(super) group: Group<B>,
    /// Device of this rank.
    pub(super) device: B::Device,
    /// Hooks that record and show the run. Most of them are only on rank 0.
    pub(super) hooks: RankHooks,
    /// The signals that stop the run.
    pub(super) signals: &'a Signals,
}

/// Trains, exports and tests the model on one rank, and finishes its W&B run.
///
/// # Errors
/// Returns the first error of this rank, which ends the other ranks as well.
pub(super) fn train_rank<B: FusedOps + OptimizerOps, R: Recipe<B>>(
    run: &PreparedRun,
    mut rank: RankRun<'_, B, R>,
) -> Result<RankOutcome, BoxError> {
    let (wandb, signals) = (rank.hooks.wandb.take(), rank.signals);
    // On an error the W&B run is dropped, which records it as failed.
    let outcome = train_and_test(run, rank, wandb.as_ref())?;
    if let Some(wandb) = wandb {
        wandb.finish(outcome.status(signals));
    }
    Ok(outcome)
}

/// Trains, exports and tests the model on one rank.
///
/// A checkpoint is restored into an engine, which has already sharded the model. So the engine is
/// initialized first. If the run resumes, it is initialized with weights of zero, unless
/// checkpoints omit parameters of the pretrained model.
///
/// # Errors
/// Returns the first error of this rank, which ends the other ranks as well.
fn train_and_test<B: FusedOps + OptimizerOps, R: Recipe<B>>(
    run: &PreparedRun,
    rank: RankRun<'_, B, R>,
    wandb: Option<&WandbRecord>,
) -> Result<RankOutcome, BoxError> {
    let Preparation { job, plan, .. } = &run.preparation;
    let RankRun { recipe, model, group, device, mut hooks, signals } = rank;
    let mesh = plan.mesh;
    let shard =
        DataShard { rank: mesh.data_rank(group.rank()), num_ranks: mesh.data_parallel_size() };
    // Its thread loads the first batches while the model is sharded.
    let mut source = recipe.source(shard, plan)?;
    let mut engine = match &run.layout {
        Some(layout) => deepburn::initialize_pipeline(model, plan, layout.clone(), group)?,
        None => deepburn::initialize(model, plan, group)?,
    };
    // A checkpoint of DeepBurn replaces these random streams with its own.
    engine.seed(job.training.seed);
    if let Some(map) = &run.preparation.omitted {
        // Also before a checkpoint is loaded, while the engine has the values of the pretrained
        // model.
        engine.omit_base(map)?;
    }
    // The reference is the model at the start of the job, so it is measured before a checkpoint is
    // loaded.
    if !recipe.measure_reference(&engine, &device, plan, &signals.interrupt())? {
        return Ok(RankOutcome::WithoutSteps);
    }
    let resumed = match &run.checkpoint {
        Some(checkpoint) => {
            resume::restore(&mut engine, checkpoint, &mut source, &run.preparation)?
        }
        None => LoopState::default(),
    };

    let task = recipe.task(device);
    let (preparation, interrupt) = (&run.preparation, signals.interrupt());
    let evaluation = RankEvaluation { preparation, recipe, task, interrupt, wandb };
    if run.purpose == Purpose::Evaluate {
        return evaluation.run(&mut engine, source, hooks);
    }
    let (task, train_plan) = (&evaluation.task, train_plan(preparation, signals, resumed));
    let outcome = deepburn::train(&mut engine, task, &mut source, &train_plan, &mut hooks.hooks)?;
    // End the threads of the data loader.
    drop(source);
    let end = match outcome {
        Outcome::Finished(end) => end,
        Outcome::Interrupted { checkpoint } => {
            hooks.close().map_err(|cause| format!("step {}: {cause}", engine.global_steps()))?;
            return Ok(RankOutcome::Interrupted { checkpoint });
        }
    };
    let step = end.step;
    save_results(run, &engine, end, hooks)?;
    evaluation.test_trained(&engine, step)
}

/// Returns the error message for the splits whose loss is not finite; `None` if there are none.
fn not_finite(losses: &[(&str, Option<f64>)]) -> Option<String> {
    let wrong = losses.iter().filter_map(|(split, loss)| {
        let loss = loss.filter(|loss| !loss.is_finite())?;
        Some(format!("the loss of the {split} split is {loss}"))
    });
    let wrong = wrong.collect::<Vec<_>>().join(" and ");
    (!wrong.is_empty()).then(|| {
        format!(
            "{wrong}: the model computes values that are not finite, or no target has a label; check the weights and the \
             rope fields of model.pretrained, and lora_alpha of an adapter, and use bf16 or fp32 instead of fp16"
        )
    })
}

/// Saves and records the model of a training that ended, and closes the hooks.
///
/// # Errors
/// Returns an error if the model or the last rows of metrics cannot be written, or if the last
/// evaluation failed.
fn save_results<B: OptimizerOps, M: AutodiffModule<Training<B>>>(
    run: &PreparedRun,
    engine: &Engine<B, M>,
    end: TrainingEnd,
    hooks: RankHooks,
) -> Result<(), BoxError> {
    let step = end.step;
    if engine.rank() == 0 {
        report_end(&run.preparation, &end);
        if let Some(statistics) = engine.states().io_statistics() {
            report_swap(&statistics, step);
        }
    }

    // The model is saved before anything else that may fail: the last rows of metrics and the test.
    // So neither a full disk nor a signal nor unreadable data loses it. A signal that arrives while
    // the model is written stops the test.
    save_model(engine, &run.preparation)
        .map_err(|cause| format!("step {step}: saving the model: {cause}"))?;
    if engine.rank() == 0 {
        record_model(&run.preparation, &end);
    }
    hooks.close().map_err(|cause| format!("step {step}: {cause}"))?;
    if let Some(reason) = end.failed_evaluation {
        return Err(format!(
            "step {step}: the evaluation after the last step failed: {reason}; the model is saved, and --resume \
             repeats the evaluation"
        )
        .into());
    }
    Ok(())
}

/// Keeps the loss of the last evaluation.
struct LossHook(Rc<Cell<Option<f64>>>);

impl Hook for LossHook {
    fn after_evaluation(&mut self, row: &EvalRow, _samples: u64) -> Result<(), BoxError> {
        self.0.set(Some(row.eval_loss));
        Ok(())
    }
}

/// The evaluation of a model on one rank, after its training or without.
struct RankEvaluation<'a, B: FusedOps + OptimizerOps, R: Recipe<B>> {
    preparation: &'a Preparation,
    recipe: &'a R,
    task: R::Task,
    interrupt: Interrupt,
    wandb: Option<&'a WandbRecord>,
}

impl<B: FusedOps + OptimizerOps, R: Recipe<B>> RankEvaluation<'_, B, R> {
    /// Evaluates the model on the eval and test splits, without training. Rank 0 records the
    /// results, as of step 0.
    ///
    /// # Errors
    /// Returns an error if data cannot be read, if a collective fails, or if a result cannot be
    /// written.
    fn run(
        self,
        engine: &mut Engine<B, R::Model>,
        mut source: R::Source,
        mut hooks: RankHooks,
    ) -> Result<RankOutcome, BoxError> {
        // A training loop without steps, in which an evaluation is due.
        let resumed = LoopState { evaluation_pending: true, ..LoopState::default() };
        let eval_loss = Rc::new(Cell::new(None));
        hooks.hooks.push(Box::new(LossHook(eval_loss.clone())));
        let plan = TrainPlan { interrupt: self.interrupt.clone(), resumed, ..TrainPlan::default() };
        let outcome = deepburn::train(engine, &self.task, &mut source, &plan, &mut hooks.hooks)?;
        // End the threads of the data loader before the test starts its own.
        drop(source);
        hooks.close()?;
        match outcome {
            Outcome::Interrupted { .. } => return Ok(RankOutcome::WithoutEvaluation),
            Outcome::Finished(TrainingEnd { failed_evaluation: Some(reason), .. }) => {
                return Err(format!("the evaluation failed: {reason}").into());
            }
            Outcome::Finished(_) => {}
        }
        let (outcome, test_loss) = self.test(engine, 0)?;
        let reason = not_finite(&[("eval", eval_loss.get()), ("test", test_loss)]);
        // The rows stay recorded.
        if let Some(reason) = reason.filter(|_| engine.rank() == 0) {
            return Err(reason.into());
        }
        Ok(match outcome {
            RankOutcome::WithoutTest { .. } => RankOutcome::WithoutEvaluation,
            _ => RankOutcome::Evaluated,
        })
    }

    /// Tests the model after training, with a warning if its loss is not finite: the model is
    /// saved, so the run has its result.
    ///
    /// # Errors
    /// Returns the errors of [`test`](Self::test).
    fn test_trained(
        &self,
        engine: &Engine<B, R::Model>,
        step: u64,
    ) -> Result<RankOutcome, BoxError> {
        let (outcome, loss) = self.test(engine, step)?;
        if let Some(reason) = not_finite(&[("test", loss)]).filter(|_| engine.rank() == 0) {
            tracing::warn!("{reason}");
        }
        Ok(outcome)
    }

    /// Evaluates the model of `step` on the test split, if there is one, until it is done or
    /// interrupted. Returns the loss too, if it is done. Rank 0 records the result, in its W&B run
    /// too.
    ///
    /// # Errors
    /// Returns an error if data cannot be read, if a collective fails, or if the result cannot be
    /// written.
    fn test(
        &self,
        engine: &Engine<B, R::Model>,
        step: u64,
    ) -> Result<(RankOutcome, Option<f64>), BoxError> {
        let Self { preparation: Preparation { job, plan, .. }, task, interrupt, .. } = self;
        // The stages of a pipeline evaluate the same samples together.
        let shard = DataShard { rank: engine.data_rank(), num_ranks: engine.data_ranks() };
        let Some(mut batches) = self.recipe.test(shard, plan)? else {
            return Ok((RankOutcome::Finished, None));
        };
        let is_first = engine.rank() == 0;
        if is_first {
            // One rank is enough, because all of them have the same number of batches.
            batches = with_progress("evaluating the test split", batches);
        }
        let failed = |cause| TrainError { step, cause };
        match deepburn::evaluate_until(engine, task, batches, interrupt, |_| {}).map_err(failed)? {
            EvaluationEnd::Completed(measured) => {
                if is_first {
                    record_test(&measured, &job.training.output_dir)?;
                    if let Some(wandb) = self.wandb {
                        wandb.test(&measured.row)?;
                    }
                }
                Ok((RankOutcome::Finished, Some(measured.row.eval_loss)))
            }
            EvaluationEnd::Interrupted => Ok((RankOutcome::WithoutTest { step }, None)),
            EvaluationEnd::Unreadable(cause) => {
                Err(failed(deepburn::data_failure(engine, cause, None)).into())
            }
        }
    }
}

/// Returns the plan of the training loop. A run that resumes continues with the loop state of its
/// checkpoint.
fn train_plan(preparation: &Preparation, signals: &Signals, resumed: LoopState) -> TrainPlan {
    let Preparation { job, plan, .. } = preparation;
    TrainPlan {
        max_steps: preparation.length.max_steps,
        batch_sizes: Some(preparation.length.batch_sizes.clone()),
        eval_steps: preparation.interval(job.training.evaluation.eval_steps),
        counted_step: plan.outputs.monitor.flops.as_ref().map(|flops| flops.profile_step),
        checkpoints: Some(resume::plan(preparation)),
        interrupt: signals.interrupt(),
        best: best_plan(preparation),
        resumed,
    }
}

/// Returns the job's settings for the best model: the metric, early stopping, and whether the best
/// model is exported.
///
/// The plan includes the identity of the evaluation data. If a run resumes with other evaluation
/// data, its metrics are not comparable with the earlier ones, and the best model is chosen again.
fn best_plan(preparation: &Preparation) -> BestPlan {
    let training = &preparation.job.training;
    BestPlan {
        evaluation_data: preparation.data.evaluation,
        metric: match training.evaluation.metric_for_best_model {
            ModelMetric::Loss => BestMetric::Loss,
            ModelMetric::Accuracy => BestMetric::Accuracy,
            ModelMetric::F1 => BestMetric::F1,
            ModelMetric::Mae => BestMetric::Mae,
        },
        load_at_end: training.evaluation.load_best_model_at_end,
        early_stopping: training.evaluation.early_stopping_patience.map(|patience| EarlyStopping {
            patience: patience as u64,
            threshold: training.evaluation.early_stopping_threshold,
        }),
    }
}

/// Prints whether training stopped early, and which model is saved.
///
/// Without early stopping and without `load_best_model_at_end` it prints nothing.
fn report_end(preparation: &Preparation, end: &TrainingEnd) {
    let training = &preparation.job.training;
    if end.step < preparation.length.max_steps
        && let Some(patience) = training.evaluation.early_stopping_patience
    {
        console::eprint(&format!(
            "stopped early after step {}: {} without a better one",
            end.step,
            counted(patience, "evaluation")
        ));
    }
    // `None` if nothing was evaluated.
    let Some(BestEvaluation { step, metric, by, .. }) = end.best else { return };
    let best = format!("step {step}, {}", metric_text(by, metric));
    match &end.model {
        FinalModel::Last => {}
        FinalModel::Best => console::eprint(&format!("the saved model is the best one: {best}")),
        FinalModel::LastInsteadOfBest { metric, reason } => {
            let last = metric.map(|metric| format!(", {}", metric_text(by, metric)));
            console::eprint(&format!(
                "the saved model is the last one: step {}{}; it is not the best one ({best}), which cannot be loaded: \
                 {reason}",
                end.step,
                last.unwrap_or_default()
            ));
        }
    }
}

/// Formats the metric of a model.
fn metric_text(by: BestMetric, metric: f64) -> String {
    match by {
        BestMetric::Loss => format!("eval loss {metric:.4}"),
        // The training loop minimizes the metric, so an accuracy is stored as the error rate.
        BestMetric::Accuracy => format!("eval accuracy {:.2} %", 100.0 * (1.0 - metric)),
        BestMetric::F1 => format!("eval F1 {:.4}", 1.0 - metric),
        BestMetric::Mae => format!("eval MAE {metric:.4}"),
    }
}
