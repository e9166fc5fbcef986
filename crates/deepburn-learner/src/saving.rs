//! When the training loop saves, and what becomes of older checkpoints.
//!
//! Main type: [`CheckpointPlan`]. A checkpoint that cannot be written, for want of room perhaps, is
//! told of and left out: the run goes on, and earlier checkpoints are as they were.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use burn::module::AutodiffModule;
use deepburn_checkpoint::Retention;
use deepburn_ops::OptimizerOps;
use deepburn_zero::Training;
use serde_json::Value;
use tracing::{info, warn};

use crate::checkpoint::{SaveRequest, TrainingCheckpointError};
use crate::{Engine, EngineError};

/// Where and how often checkpoints are saved.
#[derive(Debug, Clone, PartialEq)]
pub struct CheckpointPlan {
    /// The folder that they lie in.
    pub root: PathBuf,
    /// Optimizer steps between two, of which the last step always has one; `None` saves only what is
    /// interrupted.
    pub save_steps: Option<u64>,
    /// Which are kept.
    pub retention: Retention,
    /// What the run is called.
    pub job: String,
    /// What is saved with them, the same on all ranks.
    pub client_state: Value,
}

impl CheckpointPlan {
    /// Whether one is to be saved after `step` of `max_steps`.
    pub(crate) fn is_due(&self, step: u64, max_steps: u64) -> bool {
        let due = |every: u64| step.is_multiple_of(every.max(1)) || step == max_steps;
        self.save_steps.is_some_and(due)
    }

    /// Saves a checkpoint and deletes what is not to be kept. All ranks call this together.
    pub(crate) fn save<B: OptimizerOps, M: AutodiffModule<Training<B>>>(
        &self,
        engine: &Engine<B, M>,
        rank_state: Value,
        metric: Option<f64>,
    ) -> Result<PathBuf, TrainingCheckpointError> {
        let request = SaveRequest {
            tag: None,
            job: self.job.clone(),
            metric,
            client_state: self.client_state.clone(),
            rank_state,
        };
        let path = engine.save_checkpoint(&self.root, request)?;
        if engine.rank() == 0 {
            info!("saved {}", path.display());
            if let Err(error) = self.retention.apply(&self.root) {
                warn!("old checkpoints were not deleted: {error}");
            }
        }
        Ok(path)
    }

    /// Saves like [`save`](Self::save), where the run can go on without.
    pub(crate) fn try_save<B: OptimizerOps, M: AutodiffModule<Training<B>>>(
        &self,
        engine: &Engine<B, M>,
        rank_state: Value,
        metric: Option<f64>,
    ) -> Result<(), EngineError> {
        match self.save(engine, rank_state, metric) {
            Ok(_) => Ok(()),
            Err(TrainingCheckpointError::Engine(error)) => Err(error),
            Err(error) => {
                if engine.rank() == 0 {
                    let step = engine.global_steps();
                    warn!("step {step}: no checkpoint was saved, and training goes on: {error}");
                }
                Ok(())
            }
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
        /// What it goes on from; `None` without a plan for checkpoints.
        checkpoint: Option<PathBuf>,
    },
}
