//! Activation checkpointing and activation offload.

use serde::Serialize;

use super::SwapFilePlan;

/// What happens to the activations that forward saves for backward.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct ActivationPlan {
    /// Which of them are freed.
    pub recompute: RecomputePolicy,
    /// Where the others are kept. [`Device`](ActivationOffload::Device) where nothing is
    /// recomputed.
    pub offload: ActivationOffload,
}

/// Activation checkpointing: which activations forward frees, for backward to compute again.
///
/// | Policy | Memory of a block | Work that is repeated |
/// |---|---|---|
/// | `Off` | all its activations | none |
/// | `Selective` | its inputs and every second product | element-wise ops and the other products |
/// | `Full` | its inputs | the whole forward pass |
/// | `EveryNth(n)` | as with `Full`, in one block of n | a share of 1 / n of the forward pass |
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RecomputePolicy {
    /// None.
    #[default]
    Off,
    /// All activations of every block; the block's inputs stay.
    Full,
    /// The cheap activations of every block; every second product and the block's inputs stay.
    Selective,
    /// All activations of every n-th block; the other blocks keep theirs.
    EveryNth(usize),
}

/// Where the activations of recomputed blocks are kept that are not recomputed.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
#[serde(tag = "device", rename_all = "snake_case")]
pub enum ActivationOffload {
    /// On the device.
    #[default]
    Device,
    /// In host memory, beside the device.
    Host {
        /// Bytes from which on an activation is offloaded.
        threshold: usize,
    },
    /// In a file of each rank on NVMe, which grows as they need it.
    Nvme {
        /// The file.
        file: SwapFilePlan,
        /// Bytes from which on an activation is offloaded.
        threshold: usize,
    },
}

impl ActivationOffload {
    /// The file on NVMe, where there is one.
    pub fn swap_file(&self) -> Option<&SwapFilePlan> {
        let Self::Nvme { file, .. } = self else { return None };
        Some(file)
    }
}
