//! What differs between kinds of jobs: the model, its data, and how the two meet.

use std::path::Path;

use burn::module::AutodiffModule;
use deepburn::ops::{FusedOps, OptimizerOps};
use deepburn::zero::Training;
use deepburn::{BatchSource, Task};
use deepburn_datasets::{DataError, Shard, Tokenizer};
use deepburn_models::gpt2::{CheckpointError, CheckpointWriter};

use crate::causal::Causal;
use crate::classification::Classification;
use crate::failure::Failure;

/// A micro-batch of the recipe `R` on backend `B`.
pub(crate) type BatchOf<B, R> = <<R as Recipe<B>>::Task as Task<B, <R as Recipe<B>>::Model>>::Batch;

/// A kind of job, on backend `B`. Its values are shared by all ranks.
pub(crate) trait Recipe<B: FusedOps + OptimizerOps>: Sync {
    /// What is trained.
    type Model: AutodiffModule<Training<B>>;
    /// What it learns.
    type Task: Task<B, Self::Model>;
    /// One rank's share of the data.
    type Source: BatchSource<BatchOf<B, Self>>;

    /// The model, its weights drawn from the seed or read.
    fn model(&self, device: &B::Device) -> Result<Self::Model, Failure>;

    /// The task of a rank whose tensors are on `device`.
    fn task(&self, device: B::Device) -> Self::Task;

    /// The share of `shard`, in micro-batches of `rows` samples.
    fn source(&self, shard: Shard, rows: usize) -> Result<Self::Source, DataError>;

    /// A share of the data kept for a final test, given out as evaluation data; `None` without.
    fn test(&self, shard: Shard, rows: usize) -> Result<Option<Self::Source>, DataError>;

    /// Starts writing the model.
    fn writer(&self, folder: &Path) -> Result<CheckpointWriter, CheckpointError>;

    /// What goes beside the model.
    fn tokenizer(&self) -> Option<&Tokenizer>;
}

/// What a job is about, with its data.
pub(crate) enum Subject {
    /// A language model.
    Causal(Box<Causal>),
    /// Classes of texts.
    Classification(Box<Classification>),
}

impl Subject {
    /// Values of all parameters.
    pub(crate) fn num_parameters(&self) -> usize {
        match self {
            Self::Causal(subject) => subject.config.num_parameters(),
            Self::Classification(subject) => subject.config.num_parameters(),
        }
    }

    /// Width of the residual stream.
    pub(crate) fn width(&self) -> usize {
        match self {
            Self::Causal(subject) => subject.config.n_embd,
            Self::Classification(subject) => subject.config.embed_dim,
        }
    }

    /// Samples that a rank draws in an epoch.
    pub(crate) fn samples_per_epoch(&self, shard: Shard) -> Result<usize, DataError> {
        match self {
            Self::Causal(subject) => subject.samples_per_epoch(shard),
            Self::Classification(subject) => subject.samples_per_epoch(shard),
        }
    }
}
