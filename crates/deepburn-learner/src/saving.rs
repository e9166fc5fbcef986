//! When the training loop saves, and what becomes of older checkpoints.
//!
//! Main type: [`CheckpointPlan`]. A failed save, on a full disk for example, is logged and skipped: training
//! continues, and earlier checkpoints stay as they were.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use burn::module::AutodiffModule;
use deepburn_checkpoint::{Retention, delete_checkpoint};
use deepburn_ops::OptimizerOps;
use deepburn_zero::Training;
use serde_json::Value;
use tracing::{info, warn};

use crate::best::{BestEvaluation, BestPlan, LoopState};
use crate::checkpoint::{SaveInProgress, SaveRequest, TrainingCheckpointError};
use crate::metrics::EvalRow;
use crate::{Engine, EngineError};

/// Where and how often checkpoints are saved.
#[derive(Debug, Clone, PartialEq)]
pub struct CheckpointPlan {
    /// The folder that they lie in.
    pub root: PathBuf,
    /// Optimizer steps between two, of which the last step always has one; `None` saves only what is
    /// interrupted.
    pub save_steps: Option<u64>,
    /// Whether training goes on while a checkpoint is written, for up to once more the memory of
    /// what is saved. It is there some steps later, and waits for the one before it.
    pub asynchronous: bool,
    /// Which are kept.
    pub retention: Retention,
    /// What the run is called.
    pub job: String,
    /// What is saved with them, the same on all ranks.
    pub client_state: Value,
}

impl CheckpointPlan {
    /// Whether one is to be saved after `step`, which may be the last.
    fn is_due(&self, step: u64, is_last: bool) -> bool {
        self.save_steps.is_some_and(|every| is_last || step.is_multiple_of(every.max(1)))
    }
}

/// Saves as a plan says; at most one checkpoint is being written.
pub(crate) struct Saver<'a> {
    plan: Option<&'a CheckpointPlan>,
    best: BestPlan,
    in_progress: Option<RunningSave>,
    /// The last evaluation.
    evaluation: Option<EvaluatedModel>,
    /// The last checkpoint of this run, and its step.
    saved: Option<(u64, PathBuf)>,
    /// The last checkpoint of this run that was saved for no other reason than that its model was the best.
    best_only: Option<PathBuf>,
}

/// A checkpoint that is being written.
struct RunningSave {
    save: SaveInProgress,
    /// Whether no checkpoint was due and its model is the best so far.
    is_best_only: bool,
}

/// What an evaluation says about the model of its step.
#[derive(Debug, Clone, Copy)]
struct EvaluatedModel {
    step: u64,
    metric: Option<f64>,
    is_best: bool,
}

impl<'a> Saver<'a> {
    pub(crate) fn new(plan: Option<&'a CheckpointPlan>, best: BestPlan) -> Self {
        Self { plan, best, in_progress: None, evaluation: None, saved: None, best_only: None }
    }

    /// Takes note of an evaluation of the model that is saved next.
    pub(crate) fn note_evaluation(&mut self, row: &EvalRow, is_best: bool) {
        let metric = self.best.metric.of(row);
        self.evaluation = Some(EvaluatedModel { step: row.step, metric, is_best });
    }

    /// The evaluation of the model of `step`, if there was one.
    fn evaluation_of(&self, step: u64) -> Option<EvaluatedModel> {
        self.evaluation.filter(|evaluation| evaluation.step == step)
    }

    fn request(
        &self,
        plan: &CheckpointPlan,
        step: u64,
        rank_state: Value,
        state: LoopState,
    ) -> SaveRequest {
        SaveRequest {
            tag: None,
            job: plan.job.clone(),
            metric: self.evaluation_of(step).and_then(|evaluation| evaluation.metric),
            client_state: plan.client_state.clone(),
            rank_state,
            loop_state: state,
        }
    }

    /// Whether this rank has written its part of the checkpoint in progress.
    pub(crate) fn has_written(&self) -> bool {
        self.in_progress.as_ref().is_some_and(|running| running.save.is_written())
    }

    /// Saves if a checkpoint is due after the step that the engine stands at, which may be the last, or if the
    /// model is the best so far and the best one is asked for. All ranks call this together.
    ///
    /// # Errors
    /// Only those that end the run. Other failures are logged.
    pub(crate) fn save_if_due<B: OptimizerOps, M: AutodiffModule<Training<B>>>(
        &mut self,
        engine: &Engine<B, M>,
        is_last: bool,
        rank_state: Value,
        state: LoopState,
    ) -> Result<(), EngineError> {
        let step = engine.global_steps();
        let is_best =
            self.best.load_at_end && self.evaluation_of(step).is_some_and(|it| it.is_best);
        let Some(plan) = self.plan else { return Ok(()) };
        let is_due = plan.is_due(step, is_last);
        if !is_due && !is_best {
            return Ok(());
        }
        self.finish(engine, &state)?;
        match engine.start_save(&plan.root, self.request(plan, step, rank_state, state)) {
            Ok(save) => self.in_progress = Some(RunningSave { save, is_best_only: !is_due }),
            Err(error) => log_failed_save(engine, step, error)?,
        }
        if plan.asynchronous { Ok(()) } else { self.finish(engine, &state) }
    }

    /// Waits for the checkpoint in progress, if there is one, and deletes those that are not kept any more. All
    /// ranks call this together.
    ///
    /// # Errors
    /// As [`save_if_due`](Self::save_if_due).
    pub(crate) fn finish<B: OptimizerOps, M: AutodiffModule<Training<B>>>(
        &mut self,
        engine: &Engine<B, M>,
        state: &LoopState,
    ) -> Result<(), EngineError> {
        let Some((plan, running)) = self.plan.zip(self.in_progress.take()) else {
            return Ok(());
        };
        let RunningSave { save, is_best_only } = running;
        let step = save.step();
        match save.finish(engine.group()) {
            Ok(path) => {
                self.complete(engine, plan, &path, state);
                if is_best_only && let Some(previous) = self.best_only.replace(path.clone()) {
                    drop_superseded(engine, plan, &previous);
                }
                self.saved = Some((step, path));
                Ok(())
            }
            Err(error) => log_failed_save(engine, step, error),
        }
    }

    /// Saves the checkpoint of a run that ends early, unless this step has one; `None` without a plan, or if it
    /// cannot be saved.
    ///
    /// # Errors
    /// As [`save_if_due`](Self::save_if_due).
    pub(crate) fn save_last<B: OptimizerOps, M: AutodiffModule<Training<B>>>(
        &mut self,
        engine: &Engine<B, M>,
        rank_state: Value,
        state: LoopState,
    ) -> Result<Option<PathBuf>, EngineError> {
        self.finish(engine, &state)?;
        let Some(plan) = self.plan else { return Ok(None) };
        let step = engine.global_steps();
        if let Some((_, path)) = self.saved.take_if(|(saved, _)| *saved == step) {
            return Ok(Some(path));
        }
        match engine.save_checkpoint(&plan.root, self.request(plan, step, rank_state, state)) {
            Ok(path) => {
                self.complete(engine, plan, &path, &state);
                Ok(Some(path))
            }
            Err(TrainingCheckpointError::Engine(error)) => Err(error),
            Err(error) => {
                if engine.rank() == 0 {
                    warn!("step {step}: no checkpoint was saved: {error}");
                }
                Ok(None)
            }
        }
    }

    /// Logs a checkpoint that was saved, and deletes those that are not kept any more.
    fn complete<B: OptimizerOps, M: AutodiffModule<Training<B>>>(
        &self,
        engine: &Engine<B, M>,
        plan: &CheckpointPlan,
        path: &Path,
        state: &LoopState,
    ) {
        if engine.rank() != 0 {
            return;
        }
        info!("saved {}", path.display());
        let best = state.best.filter(|_| self.best.load_at_end).map(|best| best.step);
        if let Err(error) = plan.retention.apply(&plan.root, best) {
            warn!("old checkpoints were not deleted: {error}");
        }
    }
}

/// Deletes the checkpoint of a model that was the best until now, unless the plan counts checkpoints anyway. Without
/// this, a run whose evaluations keep improving would fill the disk with one checkpoint each.
fn drop_superseded<B: OptimizerOps, M: AutodiffModule<Training<B>>>(
    engine: &Engine<B, M>,
    plan: &CheckpointPlan,
    previous: &Path,
) {
    if engine.rank() != 0 || plan.retention != Retention::default() {
        return;
    }
    let name = previous.file_name().and_then(|name| name.to_str());
    let Some(Ok(tag)) = name.map(str::parse) else { return };
    if let Err(error) = delete_checkpoint(&plan.root, &tag) {
        warn!("the checkpoint of the previous best model was not deleted: {error}");
    }
}

/// Logs a save that failed; training continues. A failure of the engine ends the run.
fn log_failed_save<B: OptimizerOps, M: AutodiffModule<Training<B>>>(
    engine: &Engine<B, M>,
    step: u64,
    error: TrainingCheckpointError,
) -> Result<(), EngineError> {
    match error {
        TrainingCheckpointError::Engine(error) => Err(error),
        error => {
            if engine.rank() == 0 {
                warn!("step {step}: no checkpoint was saved, and training goes on: {error}");
            }
            Ok(())
        }
    }
}

/// Asks a run to end after the step that it is at: a signal, a button. Clones ask the same run.
#[derive(Debug, Clone, Default)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// One that is asked by `flag`.
    pub fn from_flag(flag: Arc<AtomicBool>) -> Self {
        Self(flag)
    }

    /// Asks.
    pub fn ask(&self) {
        self.0.store(true, Relaxed);
    }

    /// Whether the run was asked.
    pub fn is_asked(&self) -> bool {
        self.0.load(Relaxed)
    }
}

/// How training ended.
#[derive(Debug, Clone, PartialEq)]
#[must_use = "an interrupted run has not trained to its end"]
pub enum Outcome {
    /// All steps were taken, or early stopping ended the run.
    Finished {
        /// The last step.
        step: u64,
        /// The best evaluation, whose model the engine has where the plan asks for it.
        best: Option<BestEvaluation>,
    },
    /// It was asked to end before.
    Interrupted {
        /// What it resumes from; `None` without a plan for checkpoints, or if it could not be written.
        checkpoint: Option<PathBuf>,
    },
}
