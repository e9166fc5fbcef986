//! Saves checkpoints in the training loop and deletes older ones.
//!
//! Main type: [`CheckpointPlan`]. A failed save, for example on a full disk, is logged and skipped:
//! training continues, and earlier checkpoints are unchanged.
//!
//! A checkpoint is saved if it is due after a step ([`Interval`]), after the last step, or if a
//! step has the best evaluation so far (`load_best_model_at_end`). Asynchronous saves overlap with
//! training. In the exchange of each step, the ranks report whether their files are written. Once
//! all files are written, the ranks commit the checkpoint between two steps. Only rank 0 deletes
//! older checkpoints.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use burn::module::AutodiffModule;
use deepburn_checkpoint::{Retention, delete_checkpoint};
use deepburn_ops::OptimizerOps;
use deepburn_zero::Training;
use serde_json::Value;
use tracing::{info, warn};

use crate::best::{BestPlan, LoopState};
use crate::checkpoint::{SaveInProgress, SaveRequest, TrainingCheckpointError};
use crate::final_model::TrainingEnd;
use crate::interval::Interval;
use crate::metrics::EvalRow;
use crate::{Engine, EngineError};

/// Where and how often checkpoints are saved.
#[derive(Debug, Clone, PartialEq)]
pub struct CheckpointPlan {
    /// The folder that contains the checkpoints.
    pub root: PathBuf,
    /// How often to save; the last step is saved too. `None` saves only on interruption.
    pub save_steps: Option<Interval>,
    /// Whether training continues while a checkpoint is written. This needs memory for up to a
    /// second copy of the saved arrays. A new save waits for the previous one.
    pub asynchronous: bool,
    /// Which checkpoints are kept.
    pub retention: Retention,
    /// The name of the run.
    pub job: String,
    /// Client state that is saved with each checkpoint; the same on all ranks.
    pub client_state: Value,
}

/// Saves checkpoints according to a plan. At most one checkpoint is being written at a time.
pub(crate) struct Saver<'a> {
    /// The settings; `None` saves nothing.
    plan: Option<&'a CheckpointPlan>,
    /// The settings by which evaluations are compared.
    best: BestPlan,
    /// The checkpoint that is being written, if there is one.
    in_progress: Option<RunningSave>,
    /// The last evaluation of this run.
    evaluation: Option<EvaluatedModel>,
    /// The step and folder of this run's last checkpoint.
    saved: Option<(u64, PathBuf)>,
    /// The last checkpoint that was saved only because its model was the best so far.
    best_only: Option<PathBuf>,
    /// The step of the best model that has a complete checkpoint. Retention keeps it until the
    /// checkpoint of a better model is complete.
    best_saved: Option<u64>,
}

/// A checkpoint that is being written.
struct RunningSave {
    /// The save in progress on this rank.
    save: SaveInProgress,
    /// Whether it is due by `save_steps`, or because the run ends.
    is_due: bool,
    /// Whether its model is the best so far.
    is_best: bool,
}

/// The evaluation of the model after a step.
#[derive(Debug, Clone, Copy)]
struct EvaluatedModel {
    /// The step after which the model was evaluated.
    step: u64,
    /// The metric by which models are compared.
    metric: Option<f64>,
    /// Whether it is the best evaluation so far.
    is_best: bool,
}

impl<'a> Saver<'a> {
    /// Creates a saver that has saved nothing yet. `resumed` is the loop state with which the run
    /// starts.
    pub(crate) fn new(
        plan: Option<&'a CheckpointPlan>,
        best: BestPlan,
        resumed: &LoopState,
    ) -> Self {
        Self {
            plan,
            best,
            in_progress: None,
            evaluation: None,
            saved: None,
            best_only: None,
            best_saved: resumed.best.map(|best| best.step),
        }
    }

    /// Records an evaluation of the model that is saved next.
    pub(crate) fn note_evaluation(&mut self, row: &EvalRow, is_best: bool) {
        let metric = self.best.metric.of(row);
        self.evaluation = Some(EvaluatedModel { step: row.step, metric, is_best });
    }

    /// Returns the metric of the model after `step`; `None` if it was not evaluated in this run.
    pub(crate) fn metric_of(&self, step: u64) -> Option<f64> {
        self.evaluation_of(step)?.metric
    }

    /// Returns the evaluation of the model after `step`; `None` if it was not evaluated.
    fn evaluation_of(&self, step: u64) -> Option<EvaluatedModel> {
        self.evaluation.filter(|evaluation| evaluation.step == step)
    }

    /// Returns true if the model after `step` is the best so far and is loaded at the end of
    /// training.
    fn is_best(&self, step: u64) -> bool {
        self.best.load_at_end && self.evaluation_of(step).is_some_and(|it| it.is_best)
    }

    /// Returns the request for a checkpoint of the current step. The checkpoint is named after the
    /// step.
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
            metric: self.metric_of(step),
            client_state: plan.client_state.clone(),
            rank_state,
            loop_state: state,
        }
    }

    /// Returns true if this rank has written its part of the checkpoint in progress.
    pub(crate) fn has_written(&self) -> bool {
        self.in_progress.as_ref().is_some_and(|running| running.save.is_written())
    }

    /// Saves a checkpoint if `is_due`, or if the model is the best so far and
    /// `load_best_model_at_end` is set. All ranks call this together.
    ///
    /// # Errors
    /// Returns only errors that end the run. A failed save is logged.
    pub(crate) fn save_if_due<B: OptimizerOps, M: AutodiffModule<Training<B>>>(
        &mut self,
        engine: &Engine<B, M>,
        is_due: bool,
        rank_state: Value,
        state: LoopState,
    ) -> Result<(), EngineError> {
        let step = engine.global_steps();
        let Some(plan) = self.plan else { return Ok(()) };
        // `is_due` and `is_best` are the same on all ranks: they depend on the step and on metrics
        // that were summed over the ranks.
        let is_best = self.is_best(step);
        if !is_due && !is_best {
            return Ok(());
        }
        self.finish(engine)?;
        match engine.start_save(&plan.root, self.request(plan, step, rank_state, state)) {
            Ok(save) => self.in_progress = Some(RunningSave { save, is_due, is_best }),
            Err(error) => log_failed_save(engine.rank(), step, error)?,
        }
        if plan.asynchronous { Ok(()) } else { self.finish(engine) }
    }

    /// Waits for the checkpoint in progress, if there is one, and deletes the checkpoints that
    /// retention does not keep. All ranks call this together.
    ///
    /// # Errors
    /// Returns the same errors as [`save_if_due`](Self::save_if_due).
    pub(crate) fn finish<B: OptimizerOps, M: AutodiffModule<Training<B>>>(
        &mut self,
        engine: &Engine<B, M>,
    ) -> Result<(), EngineError> {
        // The save is taken before it can fail, so that a failed one is not finished again.
        let Some((plan, running)) = self.plan.zip(self.in_progress.take()) else {
            return Ok(());
        };
        let RunningSave { save, is_due, is_best } = running;
        let step = save.step();
        match save.finish(engine.group()) {
            Ok(path) => {
                if is_best {
                    self.best_saved = Some(step);
                }
                self.complete(engine.rank(), plan, &path);
                if !is_due && let Some(previous) = self.best_only.replace(path.clone()) {
                    drop_superseded(engine.rank(), plan, &previous);
                }
                self.saved = Some((step, path));
                Ok(())
            }
            Err(error) => log_failed_save(engine.rank(), step, error),
        }
    }

    /// Saves the checkpoint of a run that ends early, unless the current step already has one.
    /// Returns `None` without a plan, or if the save failed.
    ///
    /// # Errors
    /// Returns the same errors as [`save_if_due`](Self::save_if_due).
    pub(crate) fn save_last<B: OptimizerOps, M: AutodiffModule<Training<B>>>(
        &mut self,
        engine: &Engine<B, M>,
        rank_state: Value,
        state: LoopState,
    ) -> Result<Option<PathBuf>, EngineError> {
        self.finish(engine)?;
        let Some(plan) = self.plan else { return Ok(None) };
        let step = engine.global_steps();
        // An interrupted run may have saved this step because it was due.
        if let Some((_, path)) = self.saved.take_if(|(saved, _)| *saved == step) {
            return Ok(Some(path));
        }
        match engine.save_checkpoint(&plan.root, self.request(plan, step, rank_state, state)) {
            Ok(path) => {
                if self.is_best(step) {
                    self.best_saved = Some(step);
                }
                self.complete(engine.rank(), plan, &path);
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

    /// Logs a saved checkpoint and deletes the checkpoints that retention does not keep.
    fn complete(&self, rank: usize, plan: &CheckpointPlan, path: &Path) {
        if rank != 0 {
            return;
        }
        info!("saved {}", path.display());
        // The best model so far may not be saved yet, or its save may fail. The best one that has a
        // checkpoint is therefore kept.
        let best = self.best_saved.filter(|_| self.best.load_at_end);
        if let Err(error) = plan.retention.apply(&plan.root, best) {
            warn!("old checkpoints were not deleted: {error}");
        }
    }
}

/// Deletes the checkpoint of the previous best model, unless a retention plan limits the number of
/// checkpoints. Otherwise a run whose evaluations keep improving would fill the disk.
fn drop_superseded(rank: usize, plan: &CheckpointPlan, previous: &Path) {
    if rank != 0 || plan.retention != Retention::default() {
        return;
    }
    let name = previous.file_name().and_then(|name| name.to_str());
    // The folder was named after a step by this saver, so its name is a tag.
    let Some(Ok(tag)) = name.map(str::parse) else { return };
    if let Err(error) = delete_checkpoint(&plan.root, &tag) {
        warn!("the checkpoint of the previous best model was not deleted: {error}");
    }
}

/// Logs a failed save. Returns only a failure of the engine, which ends the run.
fn log_failed_save(
    rank: usize,
    step: u64,
    error: TrainingCheckpointError,
) -> Result<(), EngineError> {
    match error {
        TrainingCheckpointError::Engine(error) => Err(error),
        error => {
            if rank == 0 {
                warn!("step {step}: no checkpoint was saved, training continues: {error}");
            }
            Ok(())
        }
    }
}

/// A request to end the run after the current step, for example from a signal handler. Clones share
/// the request.
#[derive(Debug, Clone, Default)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Returns an interrupt that is requested by setting `flag`.
    pub fn from_flag(flag: Arc<AtomicBool>) -> Self {
        Self(flag)
    }

    /// Requests the end of the run.
    pub fn ask(&self) {
        self.0.store(true, Relaxed);
    }

    /// Returns true if the end of the run was requested.
    pub fn is_asked(&self) -> bool {
        self.0.load(Relaxed)
    }
}

/// The result of a training run.
#[derive(Debug, Clone, PartialEq)]
#[must_use = "an interrupted run has not trained to its end"]
pub enum Outcome {
    /// All steps were taken, or early stopping ended the run.
    Finished(TrainingEnd),
    /// The run was interrupted before its last step.
    Interrupted {
        /// The checkpoint to resume from. `None` without a checkpoint plan, or if the save failed.
        checkpoint: Option<PathBuf>,
    },
}
