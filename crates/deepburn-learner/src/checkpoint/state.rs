//! What a checkpoint says besides tensors: the engine's own state, and each rank's.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::best::LoopState;
use crate::engine::Progress;
use crate::loss_scale::ScalerState;
use crate::source::StepSize;

/// What all ranks agree on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct EngineState {
    pub(super) progress: Progress,
    /// Optimizer steps taken, by which moments are corrected.
    pub(super) optimizer_steps: u64,
    /// The quantity of which the checkpoint has compression errors; `None` without compression.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) compressed_quantity: Option<String>,
    /// The bits of the sum of learning rates since ranks of 0/1 Adam last had the same parameters; `None` where they
    /// have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) local_rates_bits: Option<u64>,
    /// `None` where the loss is not scaled dynamically.
    pub(super) loss_scale: Option<ScalerState>,
    /// Position of the schedule.
    pub(super) schedule: i64,
    pub(super) batch: Batch,
    /// How the step in progress differs from others.
    pub(super) next_size: Option<StepSize>,
    /// The optimizer's scalars, by path and name, as the bits of an `f64`; most optimizers have none.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) scalars: BTreeMap<String, BTreeMap<String, u64>>,
    /// Of the training loop; older checkpoints have none.
    #[serde(default)]
    pub(super) training_loop: LoopState,
    /// The caller's.
    pub(super) client: Value,
}

/// The batch triple that a step in progress was begun with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Batch {
    pub(super) micro_batch_size: usize,
    pub(super) gradient_accumulation_steps: usize,
    pub(super) world_size: usize,
}

/// What a rank alone knows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RankState {
    pub(super) random: Random,
    /// About the accumulated gradients, by path.
    pub(super) gradients: BTreeMap<String, GradientRecord>,
    /// The caller's.
    pub(super) client: Value,
}

/// A random stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Random {
    pub(super) seed: u64,
    /// The number of the model among those of a rank; 0 in checkpoints of programs with one.
    #[serde(default)]
    pub(super) model: u32,
    /// The stream of draws outside of the engine's calls; older checkpoints have none.
    #[serde(default)]
    pub(super) between_calls: Option<Stream>,
    /// JSON has no integers of 128 bits.
    #[serde(with = "decimal")]
    pub(super) position: u128,
}

/// Where a stream stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Stream {
    pub(super) seed: u64,
    #[serde(with = "decimal")]
    pub(super) position: u128,
}

/// An accumulated gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct GradientRecord {
    pub(super) micro_batches: usize,
    /// The bits of its largest magnitude on its way: JSON has no infinity.
    pub(super) peak_bits: Option<u32>,
}

mod decimal {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(number: &u128, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&number.to_string())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<u128, D::Error> {
        String::deserialize(from)?.parse().map_err(D::Error::custom)
    }
}
