//! The JSON states that a checkpoint contains, of the engine, of its ranks and of the caller.

use deepburn_checkpoint::Checkpoint;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::counters::check_counters;
use super::state::{EngineState, RankState};
use super::{TrainingCheckpointError, unfit};
use crate::best::LoopState;

/// The state that callers added to a checkpoint, and the progress of the run.
#[derive(Debug, Clone, PartialEq)]
pub struct ClientStates {
    /// Samples processed so far on all ranks.
    pub global_samples: u64,
    /// The client state, which is the same for all ranks.
    pub client_state: Value,
    /// One state per rank of the run that saved the checkpoint; of a pipeline, per rank of stage 0.
    /// Ranks of other stages have the same data.
    pub rank_states: Vec<Value>,
    /// The state of the training loop, for [`TrainPlan::resumed`](crate::TrainPlan::resumed).
    pub loop_state: LoopState,
}

impl ClientStates {
    /// Reads the client states of a checkpoint without an engine.
    ///
    /// # Errors
    /// Returns [`TrainingCheckpointError::Unfit`] if a state cannot be parsed or a counter is out
    /// of range.
    pub fn read(checkpoint: &Checkpoint) -> Result<Self, TrainingCheckpointError> {
        Ok(Saved::read(checkpoint)?.into())
    }
}

impl From<Saved> for ClientStates {
    fn from(Saved { engine, ranks }: Saved) -> Self {
        let rank_states = ranks.into_iter().map(|state| state.client).collect();
        let global_samples = engine.progress.global_samples;
        let EngineState { client: client_state, training_loop: loop_state, .. } = engine;
        Self { global_samples, client_state, rank_states, loop_state }
    }
}

/// The JSON states of a checkpoint.
pub(super) struct Saved {
    /// The state that all ranks share.
    pub(super) engine: EngineState,
    /// The state of each rank that saved the checkpoint; of a pipeline, of each rank of stage 0.
    pub(super) ranks: Vec<RankState>,
}

impl Saved {
    /// Parses the states of all ranks and checks the counters.
    pub(super) fn read(checkpoint: &Checkpoint) -> Result<Self, TrainingCheckpointError> {
        // The ranks of stage 0 come first, because the ranks of a stage are consecutive.
        let ranks = 0..checkpoint.layout().stage_ranks();
        let ranks = ranks.filter_map(|rank| checkpoint.rank_state(rank));
        let engine = parse(checkpoint, &checkpoint.run().state)?;
        check_counters(&engine).map_err(|reason| unfit(checkpoint.path(), reason))?;
        Ok(Self {
            engine,
            ranks: ranks.map(|state| parse(checkpoint, state)).collect::<Result<_, _>>()?,
        })
    }
}

/// Parses a JSON state of the checkpoint.
fn parse<T: DeserializeOwned>(
    checkpoint: &Checkpoint,
    state: &Value,
) -> Result<T, TrainingCheckpointError> {
    T::deserialize(state).map_err(|error| {
        let reason = format!(
            "it was not saved by an engine of this version ({error}); use the program that wrote it"
        );
        unfit(checkpoint.path(), reason)
    })
}
