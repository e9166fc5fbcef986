//! Recipes: the differences between kinds of jobs, in their model, their data and their task.
//!
//! A [`Recipe`] has everything that [`train_rank`](crate::run::rank) needs: model, task, data loader, test split,
//! export and tokenizer. It is generic over the backend, so that one implementation trains on all of them.

use std::path::{Path, PathBuf};

use burn::module::AutodiffModule;
use burn::tensor::backend::Backend;
use deepburn::ops::{FusedOps, OptimizerOps};
use deepburn::zero::Training;
use deepburn::{BatchSource, EvaluationStream, Task};
use deepburn_config::{DynamicBatchingPlan, Plan};
use deepburn_datasets::{BudgetSampler, DataError, DataShard, StepShape, Tokenizer};
use deepburn_models::hf::{ModelFolderError, ModelFolderWriter};
use deepburn_models::{Architecture, BuildModel};

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
    ///
    /// # Errors
    /// A user's mistake: weights that do not fit the configuration.
    fn model(&self, weights: InitialWeights, device: &B::Device) -> Result<Self::Model, Failure>;

    /// Reads the pretrained weights once, so that an invalid file is found before anything is written.
    ///
    /// # Errors
    /// A user's mistake: weights that do not fit or are not finite.
    fn check_weights(&self) -> Result<(), Failure>;

    /// Returns the task of a rank whose tensors are on `device`.
    fn task(&self, device: B::Device) -> Self::Task;

    /// Starts the data loader of `shard` with the batches of `plan`.
    fn source(&self, shard: DataShard, plan: &Plan) -> Result<Self::Source, DataError>;

    /// Returns the batches of `shard` in the test split; `None` without one.
    fn test(
        &self,
        shard: DataShard,
        plan: &Plan,
    ) -> Result<Option<EvaluationStream<'_, BatchOf<B, Self>>>, DataError>;

    /// Starts to export the model to `folder`.
    fn writer(&self, folder: &Path) -> Result<ModelFolderWriter, ModelFolderError>;

    /// Returns the tokenizer to export with the model.
    fn tokenizer(&self) -> Option<&Tokenizer>;
}

/// The model and the data of a job, apart from the backend.
pub(crate) trait SubjectInfo {
    /// Returns the configuration of the model, which determines its parameters and activations.
    fn architecture(&self) -> &dyn Architecture;

    /// Returns the number of tokens of the longest sequence, at most `limit`.
    fn longest(&self, limit: usize) -> usize;

    /// Returns the number of samples of a rank in an epoch.
    fn samples_per_epoch(&self, shard: DataShard) -> Result<usize, DataError>;

    /// Returns a hash of the tokenized training data.
    fn data_fingerprint(&self) -> Result<String, DataError>;

    /// Returns a hash of the tokenized evaluation data, if there is some.
    fn evaluation_fingerprint(&self) -> Result<Option<String>, DataError>;

    /// Returns the sampler of dynamic batching.
    ///
    /// # Errors
    /// A user's mistake: packed sequences of one length, or a text that exceeds the budget.
    fn budget_sampler(
        &self,
        shape: StepShape,
        dynamic: &DynamicBatchingPlan,
    ) -> Result<BudgetSampler, Failure>;
}

/// The source of a model's initial weights: the folder of a pretrained model, or else the seed.
pub(crate) struct WeightOrigin {
    /// Folder of the pretrained model.
    pub(crate) pretrained: Option<PathBuf>,
    /// Seed of weights that are drawn: all of them, or the new ones of a task.
    pub(crate) seed: u64,
}

impl WeightOrigin {
    /// Builds the model of `config`.
    ///
    /// # Errors
    /// A user's mistake: weights that do not fit.
    pub(crate) fn model<B: Backend, C: BuildModel<B>>(
        &self,
        config: &C,
        weights: InitialWeights,
        device: &B::Device,
    ) -> Result<C::Model, Failure> {
        match (weights, &self.pretrained) {
            (InitialWeights::Zeros, _) => config.zeros(device).map_err(Failure::mistake),
            (InitialWeights::OfJob, Some(folder)) => {
                config.load_lazily(folder, self.seed, device).map_err(Failure::mistake)
            }
            (InitialWeights::OfJob, None) => {
                config.init(self.seed, device).map_err(Failure::mistake)
            }
        }
    }

    /// Reads the pretrained weights once.
    ///
    /// # Errors
    /// A user's mistake: weights that do not fit or are not finite.
    pub(crate) fn check(&self, config: &dyn Architecture) -> Result<(), Failure> {
        let Some(folder) = &self.pretrained else { return Ok(()) };
        config.check_weights(folder).map_err(Failure::mistake)
    }
}
