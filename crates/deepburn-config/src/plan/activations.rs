//! Activation checkpointing and activation offload.

use serde::Serialize;

use super::SwapFilePlan;

/// How the activations that forward saves for backward are stored.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct ActivationPlan {
    /// The activations that are freed and recomputed.
    pub recompute: RecomputePolicy,
    /// Where the other activations are stored. [`Device`](ActivationOffload::Device) if nothing is
    /// recomputed.
    pub offload: ActivationOffload,
}

/// Activation checkpointing: the activations that forward frees and backward recomputes (Chen et
/// al. 2016).
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
    /// No activations.
    #[default]
    Off,
    /// All activations of every block except its inputs.
    Full,
    /// The cheap activations of every block. Every second product and the block's inputs are kept.
    Selective,
    /// All activations of every n-th block; the other blocks keep theirs.
    EveryNth(usize),
}

/// Where the kept activations of recomputed blocks are stored.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
#[serde(tag = "device", rename_all = "snake_case")]
pub enum ActivationOffload {
    /// On the device.
    #[default]
    Device,
    /// In host memory.
    Host {
        /// Minimum size of an offloaded activation, in bytes.
        threshold: usize,
    },
    /// In a file of each rank on NVMe, which grows as needed.
    Nvme {
        /// The file.
        file: SwapFilePlan,
        /// Minimum size of an offloaded activation, in bytes.
        threshold: usize,
    },
}

impl ActivationOffload {
    /// Returns the file on NVMe, if there is one.
    pub fn swap_file(&self) -> Option<&SwapFilePlan> {
        let Self::Nvme { file, .. } = self else { return None };
        Some(file)
    }
}
