//! The JSON states of a checkpoint: one for the engine, and one for each rank.
//!
//! Names of fields are part of the file format and never change. Fields that were added later have
//! a default for older checkpoints. The record of a gradient within a step includes the largest
//! magnitude of its fp16 sum so far, which decides whether the step is skipped.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::best::LoopState;
use crate::engine::EngineCounters;
use crate::loss_scale::ScalerState;
use crate::source::StepSize;
use crate::step_state::{LossWeights, StepState};

/// The state that all ranks share.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct EngineState {
    /// The counters of the engine.
    pub(super) progress: SavedCounters,
    /// Optimizer steps that were applied; bias correction of the moments depends on it.
    pub(super) optimizer_steps: u64,
    /// The quantity whose compression errors the checkpoint stores; `None` without compression.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) compressed_quantity: Option<String>,
    /// The sum of learning rates since the ranks of 0/1 Adam last averaged their parameters, as the
    /// bits of an `f64`. `None` directly after an averaging step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) local_rates_bits: Option<u64>,
    /// The dynamic loss scaler; `None` for a static loss scale.
    pub(super) loss_scale: Option<ScalerState>,
    /// The position of the schedule.
    pub(super) schedule: i64,
    /// The batch sizes, which have to be the same to finish an accumulation.
    pub(super) batch: BatchSizes,
    /// Backward passes since the last call of `step`. Absent in older checkpoints, whose
    /// `progress.accumulated` counts backward passes instead of calls of `step`.
    #[serde(default)]
    pub(super) backward_passes: Option<usize>,
    /// The factor of the losses of an accumulation in progress, dynamic or static, as the bits of
    /// an `f64`; absent in older checkpoints.
    #[serde(default)]
    pub(super) gradient_scale_bits: Option<u64>,
    /// The weights of the losses of an accumulation in progress; absent in older checkpoints.
    #[serde(default)]
    pub(super) loss_weights: LossWeights,
    /// The number of samples and the learning-rate factor of the step in progress, if they differ
    /// from the configuration.
    pub(super) next_size: Option<StepSize>,
    /// The optimizer's scalars by path and name, as the bits of an `f64`. Most optimizers have
    /// none.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) scalars: BTreeMap<String, BTreeMap<String, u64>>,
    /// The number of applied steps before the first step of a parameter with its states, by path.
    /// Only parameters that got new states when a checkpoint was loaded have an entry.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) state_starts: BTreeMap<String, u64>,
    /// The path and a hash of each tensor field of the module that is not a `Param`. Their values
    /// are not stored.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) plain_tensors: Vec<(String, u64)>,
    /// The state of the training loop; absent in older checkpoints.
    #[serde(default)]
    pub(super) training_loop: LoopState,
    /// The client state of the caller.
    pub(super) client: Value,
}

/// The counters of the engine ([`EngineCounters`]), and of the step in progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
// Errors about malformed checkpoints say `struct Progress`.
#[serde(rename = "Progress", deny_unknown_fields)]
pub(super) struct SavedCounters {
    pub(super) micro_steps: u64,
    /// Calls of `step` since the last optimizer step.
    pub(super) accumulated: usize,
    pub(super) global_steps: u64,
    pub(super) skipped_steps: u64,
    pub(super) skipped_in_a_row: u64,
    pub(super) global_samples: u64,
    pub(super) global_tokens: u64,
}

impl SavedCounters {
    /// Returns the counters in the order in which they are stored.
    pub(super) fn new(counters: EngineCounters, accumulated: usize) -> Self {
        Self {
            micro_steps: counters.micro_steps,
            accumulated,
            global_steps: counters.global_steps,
            skipped_steps: counters.skipped_steps,
            skipped_in_a_row: counters.skipped_in_a_row,
            global_samples: counters.global_samples,
            global_tokens: counters.global_tokens,
        }
    }

    /// Returns the counters of the engine.
    pub(super) fn of_engine(self) -> EngineCounters {
        EngineCounters {
            micro_steps: self.micro_steps,
            global_steps: self.global_steps,
            skipped_steps: self.skipped_steps,
            skipped_in_a_row: self.skipped_in_a_row,
            global_samples: self.global_samples,
            global_tokens: self.global_tokens,
        }
    }
}

impl EngineState {
    /// Returns the loss scale of the accumulated gradients; `None` in older checkpoints with a
    /// static scale.
    pub(super) fn gradient_scale(&self) -> Option<f64> {
        let dynamic = self.loss_scale.map(|state| state.scale);
        self.gradient_scale_bits.map(f64::from_bits).or(dynamic)
    }

    /// Returns the state of the optimizer step in progress.
    ///
    /// In an older checkpoint that was saved between backward and step, `accumulated` includes the
    /// micro-batch in progress, and `micro_steps` does not. It is recognized by this difference of
    /// one, if all steps had the same number of micro-batches with one backward pass each. Other
    /// older checkpoints were saved after a call of `step`, where both counters have the same
    /// meaning as today.
    pub(super) fn step_state(&self) -> StepState {
        let SavedCounters { micro_steps, accumulated, global_steps, .. } = self.progress;
        let steps = self.batch.gradient_accumulation_steps as u64;
        let of_complete_steps = global_steps.saturating_mul(steps);
        let (micro_batches, backward_passes) = match self.backward_passes {
            Some(passes) => (accumulated, passes),
            None if accumulated > 0
                && micro_steps.checked_sub(of_complete_steps) == Some(accumulated as u64 - 1) =>
            {
                (accumulated - 1, 1)
            }
            None => (accumulated, 0),
        };
        StepState::new(micro_batches, backward_passes, self.loss_weights)
    }
}

/// The batch sizes of an accumulation in progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
// Errors about malformed checkpoints say `struct Batch`.
#[serde(rename = "Batch", deny_unknown_fields)]
pub(super) struct BatchSizes {
    /// The samples of a micro-batch on one rank.
    pub(super) micro_batch_size: usize,
    /// The micro-batches of an optimizer step.
    pub(super) gradient_accumulation_steps: usize,
    /// The number of ranks.
    pub(super) world_size: usize,
}

/// The state of one rank.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RankState {
    /// The random streams of the rank.
    pub(super) random: Random,
    /// The state of accumulated gradients, by parameter path.
    pub(super) gradients: BTreeMap<String, GradientRecord>,
    /// The rank state of the caller.
    pub(super) client: Value,
}

/// The position of a random stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Random {
    /// The seed that all ranks share.
    pub(super) seed: u64,
    /// The index of the model among the models of a rank; 0 in programs with one model.
    #[serde(default)]
    pub(super) model: u32,
    /// The stream of random ops outside the engine's calls; absent in older checkpoints.
    #[serde(default)]
    pub(super) between_calls: Option<Stream>,
    /// A 128-bit integer, stored as a string because JSON has no such numbers.
    #[serde(with = "decimal")]
    pub(super) position: u128,
}

/// The seed and position of a random stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Stream {
    /// The seed that all ranks share.
    pub(super) seed: u64,
    /// The number of random words generated so far.
    #[serde(with = "decimal")]
    pub(super) position: u128,
}

/// The state of an accumulated gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct GradientRecord {
    /// The number of micro-batches in the sum.
    pub(super) micro_batches: usize,
    /// The bits of the largest magnitude so far. They are stored as an integer because JSON has no
    /// infinity.
    pub(super) peak_bits: Option<u32>,
}

/// 128-bit integers as decimal strings.
mod decimal {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    /// Writes a number as a string.
    pub(super) fn serialize<S: Serializer>(number: &u128, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&number.to_string())
    }

    /// Parses a number from a string.
    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<u128, D::Error> {
        String::deserialize(from)?.parse().map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Returns the state of an engine with 4 micro-batches per step after two steps, as an older
    /// version saved it.
    fn older(micro_steps: u64, accumulated: usize) -> EngineState {
        let state = json!({
            "progress": {
                "micro_steps": micro_steps, "accumulated": accumulated, "global_steps": 2,
                "skipped_steps": 0, "skipped_in_a_row": 0, "global_samples": 16,
                "global_tokens": 0,
            },
            "optimizer_steps": 2, "loss_scale": null, "schedule": 1,
            "batch": {"micro_batch_size": 1, "gradient_accumulation_steps": 4, "world_size": 2},
            "next_size": null, "client": null,
        });
        serde_json::from_value(state).unwrap()
    }

    #[test]
    fn counters_of_older_checkpoints_keep_their_meaning() {
        let state = |ended, passes| StepState::new(ended, passes, LossWeights::Equal);
        // After a call of `step`.
        assert_eq!(older(8, 0).step_state(), state(0, 0));
        assert_eq!(older(9, 1).step_state(), state(1, 0));
        assert_eq!(older(11, 3).step_state(), state(3, 0));
        // Between backward and step, when the backward pass was already counted.
        assert_eq!(older(8, 1).step_state(), state(0, 1));
        assert_eq!(older(10, 3).step_state(), state(2, 1));
        // After a change of the batch size, the difference says nothing.
        assert_eq!(older(3, 1).step_state(), state(1, 0));
        let newer = EngineState { backward_passes: Some(2), ..older(9, 1) };
        assert_eq!(newer.step_state(), state(1, 2));
    }
}
