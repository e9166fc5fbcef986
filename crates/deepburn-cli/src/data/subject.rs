//! The subject of a job: what kind of model it trains, and on which data.

use deepburn_config::DynamicBatchingPlan;
use deepburn_datasets::{BudgetSampler, DataError, Shard, StepShape};
use deepburn_models::Publication;
use deepburn_models::imdb::EncoderConfig;

use crate::data::causal::Causal;
use crate::data::classification::{Classification, OnGpt2};
use crate::failure::Failure;
use crate::job::known_model::KnownModel;

/// The model and the data of a job.
pub(crate) enum Subject {
    /// A language model.
    Causal(Box<Causal>),
    /// Text classification with an encoder.
    Encoder(Box<Classification<EncoderConfig>>),
    /// Text classification with GPT-2.
    Gpt2Classifier(Box<Classification<OnGpt2>>),
}

impl Subject {
    /// Returns the name of the model.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Causal(_) => "Gpt2",
            Self::Encoder(_) => "Encoder",
            Self::Gpt2Classifier(_) => "Gpt2Classifier",
        }
    }

    /// Returns names and configuration of the model in `transformers`.
    pub(crate) fn publication(&self) -> Publication {
        match self {
            Self::Causal(subject) => subject.config.publication(),
            Self::Encoder(subject) => subject.kind.publication(),
            Self::Gpt2Classifier(subject) => subject.kind.config.publication(),
        }
    }

    /// Returns the configuration of the model, which determines its parameters and activations.
    pub(crate) fn model(&self) -> KnownModel {
        match self {
            Self::Causal(subject) => KnownModel::Gpt2(subject.config.clone()),
            Self::Encoder(subject) => KnownModel::Encoder(subject.kind.clone()),
            Self::Gpt2Classifier(subject) => {
                KnownModel::Gpt2Classifier(subject.kind.config.clone())
            }
        }
    }

    /// Returns the number of tokens of the longest sequence, at most `limit`.
    pub(crate) fn longest(&self, limit: usize) -> usize {
        let longest = match self {
            Self::Causal(_) => return limit,
            Self::Encoder(subject) => subject.longest(),
            Self::Gpt2Classifier(subject) => subject.longest(),
        };
        longest.min(limit)
    }

    /// Returns the number of samples of a rank in an epoch.
    pub(crate) fn samples_per_epoch(&self, shard: Shard) -> Result<usize, DataError> {
        match self {
            Self::Causal(subject) => subject.samples_per_epoch(shard),
            Self::Encoder(subject) => subject.samples_per_epoch(shard),
            Self::Gpt2Classifier(subject) => subject.samples_per_epoch(shard),
        }
    }

    /// Returns a hash of the tokenized training data.
    pub(crate) fn data_fingerprint(&self) -> Result<String, DataError> {
        match self {
            Self::Causal(subject) => subject.data_fingerprint(),
            Self::Encoder(subject) => Ok(subject.data_fingerprint()),
            Self::Gpt2Classifier(subject) => Ok(subject.data_fingerprint()),
        }
    }

    /// Returns a hash of the tokenized evaluation data, if there is some.
    pub(crate) fn evaluation_fingerprint(&self) -> Result<Option<String>, DataError> {
        match self {
            Self::Causal(subject) => subject.evaluation_fingerprint(),
            Self::Encoder(subject) => Ok(subject.evaluation_fingerprint()),
            Self::Gpt2Classifier(subject) => Ok(subject.evaluation_fingerprint()),
        }
    }

    /// Returns the sampler of dynamic batching.
    ///
    /// # Errors
    /// A user's mistake: packed sequences of one length, or a text that exceeds the budget.
    pub(crate) fn budget_sampler(
        &self,
        shape: StepShape,
        dynamic: &DynamicBatchingPlan,
    ) -> Result<BudgetSampler, Failure> {
        let sampler = match self {
            Self::Causal(_) => {
                return Err(Failure::mistake(
                    "deepspeed.data_efficiency.data_sampling.dynamic_batching.enabled: supported only for data of kind \
                     \"classification\"; other kinds are packed into sequences of one length; set it to false",
                ));
            }
            Self::Encoder(subject) => subject.budget_sampler(shape, dynamic),
            Self::Gpt2Classifier(subject) => subject.budget_sampler(shape, dynamic),
        };
        sampler.map_err(Failure::mistake)
    }
}
