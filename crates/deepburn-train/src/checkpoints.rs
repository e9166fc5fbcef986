//! Checkpoints at the end of epochs, and resuming from them.
//!
//! A checkpoint of epoch `n` is `epoch-n` in the strategy's folder. It is an engine's checkpoint
//! whose client state is a `LearnerState`. The states of data loaders are not stored. Instead,
//! resuming starts each loader as often as it was started before.

use std::path::Path;

use burn::module::AutodiffModule;
use deepburn::checkpoint::{Checkpoint, CheckpointError, Tag, delete_checkpoint};
use deepburn::ops::OptimizerOps;
use deepburn::zero::Training;
use deepburn::{BoxError, Engine, LoadPlan, SaveRequest, TrainingCheckpointError};
use serde::{Deserialize, Serialize};
use serde_json::json;

/// The Learner's state in a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LearnerState {
    /// The epoch after which the checkpoint was saved.
    pub(crate) epoch: usize,
    /// The number of steps that the Learner's scheduler has taken.
    pub(crate) scheduler_steps: u64,
}

/// Returns the name of the checkpoint of an epoch.
fn tag(epoch: usize) -> Result<Tag, CheckpointError> {
    Ok(format!("epoch-{epoch}").parse()?)
}

/// Saves the checkpoint of an epoch and replaces an earlier one of the same epoch. All ranks call
/// this together.
///
/// # Errors
/// Returns an error if the checkpoint cannot be written; see
/// [`TrainingCheckpointError::is_recoverable`].
pub(crate) fn save<B: OptimizerOps, M: AutodiffModule<Training<B>>>(
    engine: &Engine<B, M>,
    folder: &Path,
    state: LearnerState,
) -> Result<(), TrainingCheckpointError> {
    let tag = tag(state.epoch)?;
    // A run that resumes from an earlier epoch may find the checkpoint of this epoch from an
    // earlier run. If the deletion fails, the save fails on all ranks, because the name is taken.
    if engine.rank() == 0
        && folder.join(tag.as_str()).exists()
        && let Err(error) = delete_checkpoint(folder, &tag)
    {
        tracing::warn!("checkpoint {} could not be replaced: {error}", tag.as_str());
    }
    let request = SaveRequest { tag: Some(tag), client_state: json!(state), ..Default::default() };
    let path = engine.save_checkpoint(folder, request)?;
    if engine.rank() == 0 {
        tracing::info!("saved checkpoint {}", path.display());
    }
    Ok(())
}

/// Deletes the checkpoint of an epoch if it exists.
///
/// # Errors
/// Returns an error if its files cannot be removed.
pub(crate) fn delete(folder: &Path, epoch: usize) -> Result<(), CheckpointError> {
    let tag = tag(epoch)?;
    match folder.join(tag.as_str()).exists() {
        true => delete_checkpoint(folder, &tag),
        false => Ok(()),
    }
}

/// Resumes from the checkpoint of an epoch and returns the Learner's state. All ranks call this
/// together.
///
/// # Errors
/// Returns an error if there is no such checkpoint, if it does not match the model, or if a Learner
/// did not save it.
pub(crate) fn load<B: OptimizerOps, M: AutodiffModule<Training<B>>>(
    engine: &mut Engine<B, M>,
    folder: &Path,
    epoch: usize,
) -> Result<LearnerState, BoxError> {
    let checkpoint = Checkpoint::open(folder, Some(&tag(epoch)?))?;
    let states = engine.load_checkpoint(&checkpoint, LoadPlan::ALL)?;
    let state = serde_json::from_value(states.client_state).map_err(|error| {
        let path = checkpoint.path().display();
        format!("{path}: not saved by a Learner ({error}); resume from a checkpoint of a Learner")
    })?;
    Ok(state)
}
