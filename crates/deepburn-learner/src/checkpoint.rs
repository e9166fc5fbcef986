//! Training checkpoints, which load at any stage and number of ranks.
//!
//! [`Engine::save_checkpoint`](crate::Engine::save_checkpoint) writes the complete training state:
//! weights and f32 masters, moments, accumulated gradients, running statistics, integer and bool
//! parameters, loss scale, schedule, counters and random streams. The caller adds its own state,
//! such as the position of the data loader. [`Engine::start_save`](crate::Engine::start_save)
//! writes in the background while training continues.
//!
//! [`Engine::load_checkpoint`](crate::Engine::load_checkpoint) resumes from a checkpoint. With the
//! same number of ranks the resumed run is bit-identical to an uninterrupted one, even at a
//! different ZeRO stage.
//! [`Engine::load_deepspeed_checkpoint`](crate::Engine::load_deepspeed_checkpoint) resumes from a
//! checkpoint that DeepSpeed saved. [`Engine::omit_base`](crate::Engine::omit_base) omits the
//! frozen parameters of a base model from checkpoints.
//!
//! Saving fails between forward and backward, and while gradients differ between ranks, which no
//! other number of ranks could load: after `no_sync` passes, and within a step of 1-bit optimizers
//! or hybrid sharding. Loading fails if the model or the moments differ. In the middle of an
//! accumulation it also fails if the batch sizes, the element type, the loss scale or the trained
//! parameters differ, because the gradients of the micro-batches so far would not fit; this holds
//! without optimizer states too. Parameters that were frozen when the checkpoint was saved get new
//! moments (`optimizer_states.rs`). Everything is checked before the engine is changed.

mod buffers;
mod counters;
mod deepspeed;
pub(crate) mod element;
mod in_progress;
mod load;
mod optimizer_states;
mod save;
mod saved_states;
mod scope;
mod state;

use deepburn_checkpoint::{Checkpoint, CheckpointError, ParamEntry};
use deepburn_deepspeed::DeepSpeedError;
use std::path::{Path, PathBuf};

use crate::EngineError;
use crate::exchange::FailureElsewhere;

pub use deepspeed::check_deepspeed_checkpoint;
pub use in_progress::SaveInProgress;
pub use load::LoadPlan;
pub use optimizer_states::check_optimizer_states;
pub use save::SaveRequest;
pub use saved_states::ClientStates;

/// The reason why a training checkpoint was not saved or loaded. All ranks return an error
/// together.
#[derive(Debug, thiserror::Error)]
pub enum TrainingCheckpointError {
    /// The engine failed, and the run is over.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The checkpoint cannot be written or read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A DeepSpeed checkpoint cannot be read.
    #[error(transparent)]
    DeepSpeed(#[from] DeepSpeedError),
    /// Another rank cannot write or read its part of the checkpoint.
    #[error(transparent)]
    Elsewhere(#[from] FailureElsewhere),
    /// The checkpoint is intact, but does not match this engine.
    #[error("{}: {reason}", .path.display())]
    Unfit {
        /// The folder of the checkpoint.
        path: PathBuf,
        /// What differs, and how to fix it.
        reason: String,
    },
}

impl TrainingCheckpointError {
    /// Returns true if training can continue: nothing was saved, and the engine is unchanged.
    pub fn is_recoverable(&self) -> bool {
        !matches!(self, Self::Engine(_))
    }
}

/// Returns the error for a checkpoint that does not match the engine or the model.
fn unfit(path: &Path, reason: String) -> TrainingCheckpointError {
    TrainingCheckpointError::Unfit { path: path.to_owned(), reason }
}

/// Returns the entry of the parameter or buffer at a module path.
fn entry_of<'c>(checkpoint: &'c Checkpoint, path: &str) -> Option<&'c ParamEntry> {
    let layout = checkpoint.layout();
    layout.find(path).map(|index| &layout.entries()[index])
}
