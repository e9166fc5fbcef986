//! Checkpoints of an engine in training: saved whole, loaded at any stage and number of ranks.
//!
//! [`Engine::save_checkpoint`](crate::Engine::save_checkpoint) writes everything that decides the
//! numbers of the steps to come: weights and masters, moments, gradients in mid-accumulation, running
//! statistics, integer and bool parameters, loss scale, schedule, counters, random streams, and what the caller adds (its place in the data).
//! [`Engine::start_save`](crate::Engine::start_save) does so while training goes on.
//! [`Engine::load_checkpoint`](crate::Engine::load_checkpoint) goes on from there, bit for bit where
//! the number of ranks is the same, whatever the stage.
//!
//! [`Engine::load_deepspeed_checkpoint`](crate::Engine::load_deepspeed_checkpoint) goes on from what
//! DeepSpeed saved.
//!
//! Refused: saving between forward and backward or after passes without synchronisation, whose
//! gradients differ from rank to rank; and loading into another model, other moments, or, in
//! mid-accumulation, other batches. Everything is compared before anything is changed.

mod buffers;
mod counters;
mod deepspeed;
pub(crate) mod element;
mod in_progress;
mod load;
mod save;
mod state;

use deepburn_checkpoint::CheckpointError;
use deepburn_deepspeed::DeepSpeedError;
use deepburn_ops::OptimizerOps;
use deepburn_zero::Group;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::path::PathBuf;

use crate::EngineError;
use crate::exchange::SharedFailure;

pub use deepspeed::{TorchModel, check_deepspeed_checkpoint};
pub use in_progress::SaveInProgress;
pub use load::{ClientStates, LoadPlan};
pub use save::SaveRequest;

/// Why a training checkpoint was not saved or loaded. All ranks fail together.
#[derive(Debug, thiserror::Error)]
pub enum TrainingCheckpointError {
    /// The engine failed: the run is over.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The checkpoint cannot be written or read here.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A checkpoint of DeepSpeed cannot be read.
    #[error(transparent)]
    DeepSpeed(#[from] DeepSpeedError),
    /// Another rank cannot write or read its part.
    #[error("rank {rank}: {message}")]
    Elsewhere {
        /// The first such rank.
        rank: usize,
        /// What it said.
        message: String,
    },
    /// The checkpoint is sound, but not one of this engine.
    #[error("{}: {reason}", .path.display())]
    Unfit {
        /// The checkpoint.
        path: PathBuf,
        /// What differs and what to do.
        reason: String,
    },
}

impl TrainingCheckpointError {
    /// Whether the engine can go on: nothing was saved, and nothing of it was changed.
    pub fn is_recoverable(&self) -> bool {
        !matches!(self, Self::Engine(_))
    }
}

impl SharedFailure for TrainingCheckpointError {
    fn elsewhere(rank: usize, message: String) -> Self {
        Self::Elsewhere { rank, message }
    }
}

/// Tells all ranks what some have to say, or that one of them failed.
fn exchange<B: OptimizerOps, T: Serialize + DeserializeOwned>(
    group: &Group<B>,
    purpose: &'static str,
    mine: Option<Result<T, TrainingCheckpointError>>,
) -> Result<Vec<T>, TrainingCheckpointError> {
    crate::exchange::exchange(group, purpose, mine)
}
