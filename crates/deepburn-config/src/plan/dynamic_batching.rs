//! Dynamic batching by a token budget, and the scaling of the learning rate.

use serde::Serialize;

use crate::choice::choices;

/// Batches of about equal cost, with a varying number of samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct DynamicBatchingPlan {
    /// Maximum tokens of a rank's micro-batch, including padding.
    pub max_tokens: usize,
    /// Minimum samples of a micro-batch.
    pub min_batch_size: usize,
    /// Maximum samples of a micro-batch; `None` for no limit other than `max_tokens`.
    pub max_batch_size: Option<usize>,
    /// The order in which samples are taken.
    pub order: PickingOrderPlan,
    /// How the learning rate follows the number of samples of a step. The schedule's rate applies
    /// to a step of `train_batch_size` samples.
    pub lr_scaling: LrScaling,
    /// Whether to print how the samples of an epoch are batched.
    pub verbose: bool,
}

/// The order in which samples are taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum PickingOrderPlan {
    /// The order of the data.
    Dataloader,
    /// A new random order in each epoch.
    Random {
        /// Determines the order of all epochs.
        seed: u64,
    },
    /// The shortest first.
    Seqlen,
}

/// How the learning rate follows the batch size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LrScaling {
    /// In proportion to the batch size (Goyal et al. 2017).
    Linear,
    /// In proportion to its square root (Krizhevsky 2014), which keeps the variance of an update.
    Sqrt,
    /// No scaling.
    None,
}

choices!(LrScaling { "linear" => Linear, "sqrt" => Sqrt, "none" => None });
