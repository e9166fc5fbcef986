//! When the training loop saves, and what becomes of older checkpoints.
//!
//! Main type: [`CheckpointPlan`]. A checkpoint that cannot be written, for want of room perhaps, is
//! told of and left out: the run goes on, and earlier checkpoints are as they were.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use burn::module::AutodiffModule;
use deepburn_checkpoint::Retention;
use deepburn_ops::OptimizerOps;
use deepburn_zero::Training;
use serde_json::Value;
use tracing::{info, warn};

use crate::checkpoint::{SaveInProgress, SaveRequest, TrainingCheckpointError};
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
    /// Whether one is to be saved after `step` of `max_steps`.
    fn is_due(&self, step: u64, max_steps: u64) -> bool {
        let due = |every: u64| step.is_multiple_of(every.max(1)) || step == max_steps;
        self.save_steps.is_some_and(due)
    }

    fn request(&self, rank_state: Value, metric: Option<f64>) -> SaveRequest {
        SaveRequest {
            tag: None,
            job: self.job.clone(),
            metric,
            client_state: self.client_state.clone(),
            rank_state,
        }
    }

    /// Tells of a checkpoint and deletes what it makes superfluous.
    fn tell_of<B: OptimizerOps, M: AutodiffModule<Training<B>>>(
        &self,
        engine: &Engine<B, M>,
        path: &Path,
    ) {
        if engine.rank() == 0 {
            info!("saved {}", path.display());
            if let Err(error) = self.retention.apply(&self.root) {
                warn!("old checkpoints were not deleted: {error}");
            }
        }
    }
}

/// Saves as a plan says; at most one checkpoint is on its way.
pub(crate) struct Saver<'a> {
    plan: Option<&'a CheckpointPlan>,
    on_its_way: Option<SaveInProgress>,
}

impl<'a> Saver<'a> {
    pub(crate) fn new(plan: Option<&'a CheckpointPlan>) -> Self {
        Self { plan, on_its_way: None }
    }

    /// Whether this rank has written its part of a checkpoint that is on its way.
    pub(crate) fn has_written(&self) -> bool {
        self.on_its_way.as_ref().is_some_and(SaveInProgress::is_written)
    }

    /// Saves if a checkpoint is due after the step that the engine stands at. All ranks call this
    /// together.
    ///
    /// # Errors
    /// Only those that end the run; what it can go on without is told.
    pub(crate) fn save_if_due<B: OptimizerOps, M: AutodiffModule<Training<B>>>(
        &mut self,
        engine: &Engine<B, M>,
        max_steps: u64,
        rank_state: Value,
        metric: Option<f64>,
    ) -> Result<(), EngineError> {
        let step = engine.global_steps();
        let Some(plan) = self.plan.filter(|plan| plan.is_due(step, max_steps)) else {
            return Ok(());
        };
        self.finish(engine)?;
        match engine.start_save(&plan.root, plan.request(rank_state, metric)) {
            Ok(started) => self.on_its_way = Some(started),
            Err(error) => tolerate(engine, step, error)?,
        }
        if plan.asynchronous { Ok(()) } else { self.finish(engine) }
    }

    /// Waits for the checkpoint that is on its way, if there is one, and deletes what is not to be
    /// kept any more. All ranks call this together.
    ///
    /// # Errors
    /// As [`save_if_due`](Self::save_if_due).
    pub(crate) fn finish<B: OptimizerOps, M: AutodiffModule<Training<B>>>(
        &mut self,
        engine: &Engine<B, M>,
    ) -> Result<(), EngineError> {
        let Some((plan, save)) = self.plan.zip(self.on_its_way.take()) else { return Ok(()) };
        let step = save.step();
        match save.finish(engine.group()) {
            Ok(path) => {
                plan.tell_of(engine, &path);
                Ok(())
            }
            Err(error) => tolerate(engine, step, error),
        }
    }

    /// Saves what a run that is asked to end goes on from, now; `None` without a plan, or where there
    /// is no way to save it.
    ///
    /// # Errors
    /// As [`save_if_due`](Self::save_if_due).
    pub(crate) fn save_last<B: OptimizerOps, M: AutodiffModule<Training<B>>>(
        mut self,
        engine: &Engine<B, M>,
        rank_state: Value,
        metric: Option<f64>,
    ) -> Result<Option<PathBuf>, EngineError> {
        self.finish(engine)?;
        let Some(plan) = self.plan else { return Ok(None) };
        match engine.save_checkpoint(&plan.root, plan.request(rank_state, metric)) {
            Ok(path) => {
                plan.tell_of(engine, &path);
                Ok(Some(path))
            }
            Err(TrainingCheckpointError::Engine(error)) => Err(error),
            Err(error) => {
                if engine.rank() == 0 {
                    warn!("step {}: no checkpoint was saved: {error}", engine.global_steps());
                }
                Ok(None)
            }
        }
    }
}

/// Tells of a checkpoint that there is not; a run whose engine failed ends.
fn tolerate<B: OptimizerOps, M: AutodiffModule<Training<B>>>(
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
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use = "an interrupted run has not trained to its end"]
pub enum Outcome {
    /// All steps were taken.
    Finished,
    /// It was asked to end before.
    Interrupted {
        /// What it goes on from; `None` without a plan for checkpoints, or where it could not be
        /// written.
        checkpoint: Option<PathBuf>,
    },
}
