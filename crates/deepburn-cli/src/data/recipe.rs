//! Recipes: the differences between kinds of jobs, in their model, their data and their task.

use std::path::Path;

use burn::module::AutodiffModule;
use deepburn::ops::{FusedOps, OptimizerOps};
use deepburn::zero::Training;
use deepburn::{BatchSource, EvaluationStream, Task};
use deepburn_config::Plan;
use deepburn_datasets::{DataError, Shard, Tokenizer};
use deepburn_models::gpt2::{CheckpointError, CheckpointWriter};

use crate::failure::Failure;

/// A micro-batch of the recipe `R` on backend `B`.
pub(crate) type BatchOf<B, R> = <<R as Recipe<B>>::Task as Task<B, <R as Recipe<B>>::Model>>::Batch;

/// The weights of a model before training.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum InitialWeights {
    /// Weights drawn from the seed of the job, or read from its pretrained model.
    OfJob,
    /// Zeros, until a training checkpoint replaces them.
    Zeros,
}

/// A kind of job on backend `B`. All ranks of a process share it.
pub(crate) trait Recipe<B: FusedOps + OptimizerOps>: Sync {
    /// The model.
    type Model: AutodiffModule<Training<B>>;
    /// The training task.
    type Task: Task<B, Self::Model>;
    /// The data loader of one rank.
    type Source: BatchSource<BatchOf<B, Self>>;

    /// Builds the model. Its weights are drawn or read when they are first used.
    fn model(&self, weights: InitialWeights, device: &B::Device) -> Result<Self::Model, Failure>;

    /// Reads the pretrained weights once, so that an invalid file is found before anything is written.
    fn check_weights(&self) -> Result<(), Failure>;

    /// Returns the task of a rank whose tensors are on `device`.
    fn task(&self, device: B::Device) -> Self::Task;

    /// Starts the data loader of `shard` with the batches of `plan`.
    fn source(&self, shard: Shard, plan: &Plan) -> Result<Self::Source, DataError>;

    /// Returns the batches of `shard` in the test split; `None` without one.
    fn test(
        &self,
        shard: Shard,
        plan: &Plan,
    ) -> Result<Option<EvaluationStream<'_, BatchOf<B, Self>>>, DataError>;

    /// Starts to export the model to `folder`.
    fn writer(&self, folder: &Path) -> Result<CheckpointWriter, CheckpointError>;

    /// Returns the tokenizer to export with the model.
    fn tokenizer(&self) -> Option<&Tokenizer>;
}
