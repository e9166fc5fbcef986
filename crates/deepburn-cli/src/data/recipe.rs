//! What differs between kinds of jobs: the model, its data, and how the two meet.

use std::path::Path;

use burn::module::AutodiffModule;
use deepburn::ops::{FusedOps, OptimizerOps};
use deepburn::zero::Training;
use deepburn::{BatchSource, EvaluationStream, Task};
use deepburn_config::{DynamicBatchingPlan, Plan};
use deepburn_datasets::{BudgetSampler, DataError, Shard, StepShape, Tokenizer};
use deepburn_models::Publication;
use deepburn_models::gpt2::{CheckpointError, CheckpointWriter};
use deepburn_models::imdb::EncoderConfig;

use crate::data::causal::Causal;
use crate::data::classification::{Classification, OnGpt2};
use crate::failure::Failure;
use crate::job::known_model::KnownModel;

/// A micro-batch of the recipe `R` on backend `B`.
pub(crate) type BatchOf<B, R> = <<R as Recipe<B>>::Task as Task<B, <R as Recipe<B>>::Model>>::Batch;

/// What a model starts with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum InitialWeights {
    /// Weights drawn from the job's seed, or read from its pretrained model.
    OfJob,
    /// Zeros, which a training checkpoint replaces.
    Zeros,
}

/// A kind of job, on backend `B`. Its values are shared by all ranks.
pub(crate) trait Recipe<B: FusedOps + OptimizerOps>: Sync {
    /// What is trained.
    type Model: AutodiffModule<Training<B>>;
    /// What it learns.
    type Task: Task<B, Self::Model>;
    /// One rank's share of the data.
    type Source: BatchSource<BatchOf<B, Self>>;

    /// The model. Its weights are drawn or read when they are first used.
    fn model(&self, weights: InitialWeights, device: &B::Device) -> Result<Self::Model, Failure>;

    /// Reads a pretrained model's weights once, so that a file that cannot be used is found before
    /// anything is written.
    fn check_weights(&self) -> Result<(), Failure>;

    /// The task of a rank whose tensors are on `device`.
    fn task(&self, device: B::Device) -> Self::Task;

    /// The share of `shard`, in batches as `plan` has them.
    fn source(&self, shard: Shard, plan: &Plan) -> Result<Self::Source, DataError>;

    /// The share of `shard` of the data kept for a final test; `None` without such data.
    fn test(
        &self,
        shard: Shard,
        plan: &Plan,
    ) -> Result<Option<EvaluationStream<'_, BatchOf<B, Self>>>, DataError>;

    /// Starts writing the model.
    fn writer(&self, folder: &Path) -> Result<CheckpointWriter, CheckpointError>;

    /// What goes beside the model.
    fn tokenizer(&self) -> Option<&Tokenizer>;
}

/// What a job is about, with its data.
pub(crate) enum Subject {
    /// A language model.
    Causal(Box<Causal>),
    /// Classes of texts, told by an encoder.
    Encoder(Box<Classification<EncoderConfig>>),
    /// Classes of texts, told by GPT-2.
    Gpt2Classifier(Box<Classification<OnGpt2>>),
}

impl Subject {
    /// What the model is called.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Causal(_) => "Gpt2",
            Self::Encoder(_) => "Encoder",
            Self::Gpt2Classifier(_) => "Gpt2Classifier",
        }
    }

    /// What the model is called elsewhere.
    pub(crate) fn publication(&self) -> Publication {
        match self {
            Self::Causal(subject) => subject.config.publication(),
            Self::Encoder(subject) => subject.kind.publication(),
            Self::Gpt2Classifier(subject) => subject.kind.config.publication(),
        }
    }

    /// The model's configuration, which tells its parameters and activations.
    pub(crate) fn model(&self) -> KnownModel {
        match self {
            Self::Causal(subject) => KnownModel::Gpt2(subject.config.clone()),
            Self::Encoder(subject) => KnownModel::Encoder(subject.kind.clone()),
            Self::Gpt2Classifier(subject) => {
                KnownModel::Gpt2Classifier(subject.kind.config.clone())
            }
        }
    }

    /// Tokens of the longest sequence, of which none has more than `limit`.
    pub(crate) fn longest(&self, limit: usize) -> usize {
        let longest = match self {
            Self::Causal(_) => return limit,
            Self::Encoder(subject) => subject.longest(),
            Self::Gpt2Classifier(subject) => subject.longest(),
        };
        longest.min(limit)
    }

    /// Samples that a rank draws in an epoch.
    pub(crate) fn samples_per_epoch(&self, shard: Shard) -> Result<usize, DataError> {
        match self {
            Self::Causal(subject) => subject.samples_per_epoch(shard),
            Self::Encoder(subject) => subject.samples_per_epoch(shard),
            Self::Gpt2Classifier(subject) => subject.samples_per_epoch(shard),
        }
    }

    /// A hash of the training data, tokenized.
    pub(crate) fn data_fingerprint(&self) -> Result<String, DataError> {
        match self {
            Self::Causal(subject) => subject.data_fingerprint(),
            Self::Encoder(subject) => Ok(subject.data_fingerprint()),
            Self::Gpt2Classifier(subject) => Ok(subject.data_fingerprint()),
        }
    }

    /// A hash of the evaluation data, tokenized, if there is some.
    pub(crate) fn evaluation_fingerprint(&self) -> Result<Option<String>, DataError> {
        match self {
            Self::Causal(subject) => subject.evaluation_fingerprint(),
            Self::Encoder(subject) => Ok(subject.evaluation_fingerprint()),
            Self::Gpt2Classifier(subject) => Ok(subject.evaluation_fingerprint()),
        }
    }

    /// The batches under a budget of tokens.
    ///
    /// # Errors
    /// A user's mistake: data that is not ragged, or that the budget does not fit.
    pub(crate) fn budget_sampler(
        &self,
        shape: StepShape,
        dynamic: &DynamicBatchingPlan,
    ) -> Result<BudgetSampler, Failure> {
        let sampler = match self {
            Self::Causal(_) => {
                return Err(Failure::mistake(
                    "deepspeed.data_efficiency.data_sampling.dynamic_batching.enabled: true asks \
                     for batches of texts of different lengths, but all other kinds of data than \
                     \"classification\" are packed into sequences of one length, without padding; \
                     set it to false",
                ));
            }
            Self::Encoder(subject) => subject.budget_sampler(shape, dynamic),
            Self::Gpt2Classifier(subject) => subject.budget_sampler(shape, dynamic),
        };
        sampler.map_err(Failure::mistake)
    }
}
