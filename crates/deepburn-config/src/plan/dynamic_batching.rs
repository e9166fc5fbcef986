//! Batches of as many samples as a budget of tokens holds, and the learning rate they get.

use serde::Serialize;

use crate::choice::choices;

/// Batches of about equal cost, with as many samples as fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct DynamicBatchingPlan {
    /// Most tokens of a rank's micro-batch, padding included.
    pub max_tokens: usize,
    /// Fewest samples of a micro-batch.
    pub min_batch_size: usize,
    /// Most samples of a micro-batch; `None` leaves it to `max_tokens`.
    pub max_batch_size: Option<usize>,
    /// The order in which samples are taken.
    pub order: PickingOrderPlan,
    /// How the learning rate follows the number of samples of a step. The schedule's rate applies
    /// to a step of `train_batch_size` samples.
    pub lr_scaling: LrScaling,
    /// Print how the samples of an epoch are batched.
    pub verbose: bool,
}

/// The order in which samples are taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum PickingOrderPlan {
    /// As they lie.
    Dataloader,
    /// Another one each epoch.
    Random {
        /// Fixes all epochs.
        seed: u64,
    },
    /// The shortest first.
    Seqlen,
}

/// How the learning rate follows the batch size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LrScaling {
    /// In proportion (Goyal et al. 2017).
    Linear,
    /// With its square root (Krizhevsky 2014), which keeps the variance of an update.
    Sqrt,
    /// Not at all.
    None,
}

choices!(LrScaling { "linear" => Linear, "sqrt" => Sqrt, "none" => None });
