//! Recipes, which combine the model, the data and the task of a job.
//!
//! A [`Recipe`] provides everything that [`train_rank`](crate::run::rank) needs: model, task, data
//! loader, test split, export and tokenizer. It is generic over the backend, so that one
//! implementation trains on all backends.

use std::path::{Path, PathBuf};

use burn::module::AutodiffModule;
use deepburn::ops::{FusedOps, OptimizerOps};
use deepburn::zero::Training;
use deepburn::{
    BatchSource, BoxError, Engine, EvaluationStream, Forecast, ForecastError, Interrupt, Meta,
    MetaDevice, Task,
};
use deepburn_chat::Day;
use deepburn_config::{BatchPlan, DynamicBatchingPlan, EvaluationPlan, Job, Plan};
use deepburn_datasets::{BudgetSampler, DataError, DataShard, Order, StepShape, Tokenizer};
use deepburn_models::decoder::AnyDecoder;
use deepburn_models::hf::{HfExport, ModelFolderError, TensorProblem};
use deepburn_models::{Architecture, BatchShape, BuildModel};

use crate::data::companions::Companions;
use crate::data::places::Places;
use crate::failure::Failure;

/// A micro-batch of the recipe `R` on backend `B`.
pub(crate) type BatchOf<B, R> = <<R as Recipe<B>>::Task as Task<B, <R as Recipe<B>>::Model>>::Batch;

/// The weights of a model before training.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum InitialWeights {
    /// Random weights from the seed of the job, or the weights of its pretrained model.
    OfJob,
    /// Zeros, which a training checkpoint then replaces.
    Zeros,
}

/// The model, the data and the task of a job on backend `B`. All ranks of a process share it.
pub(crate) trait Recipe<B: FusedOps + OptimizerOps>: SubjectInfo + Sync {
    /// The configuration of the model.
    type Config: BuildModel<Training<B>, Model = Self::Model>;
    /// The model.
    type Model: AutodiffModule<Training<B>>;
    /// The training task.
    type Task: Task<B, Self::Model>;
    /// The data loader of one rank.
    type Source: BatchSource<BatchOf<B, Self>>;

    /// Returns the configuration of the model.
    fn config(&self) -> &Self::Config;

    /// Builds the model. Its weights are initialized or read when they are first used.
    ///
    /// # Errors
    /// Returns a user's mistake if the weights do not fit the configuration.
    fn model(&self, weights: InitialWeights, device: &B::Device) -> Result<Self::Model, Failure> {
        let WeightOrigin { pretrained, seed } = &self.settings().origin;
        let config = self.config();
        match (weights, pretrained) {
            (InitialWeights::Zeros, _) => config.zeros(device).map_err(Failure::mistake),
            (InitialWeights::OfJob, Some(folder)) => {
                // Each weight is read when it is sharded, so that no rank ever holds all of them.
                config.load_lazily(folder, *seed, device).map_err(Failure::mistake)
            }
            (InitialWeights::OfJob, None) => config.init(*seed, device).map_err(Failure::mistake),
        }
    }

    /// Returns the task of a rank whose tensors are on `device`.
    fn task(&self, device: B::Device) -> Self::Task;

    /// Starts the data loader of `shard` with the batches of `plan`, and with the evaluation
    /// settings of the job.
    fn source(&self, shard: DataShard, plan: &Plan) -> Result<Self::Source, DataError>;

    /// Returns the batches of `shard` in the whole test split, which `eval_max_samples` does not
    /// limit; `None` without one.
    fn test(
        &self,
        shard: DataShard,
        plan: &Plan,
    ) -> Result<Option<EvaluationStream<'_, BatchOf<B, Self>>>, DataError>;

    /// Measures the reference of preference optimization with the initial weights in `engine`, for
    /// data that has one. All ranks call this together. Returns false if a rank was interrupted.
    ///
    /// # Errors
    /// Returns an error if data cannot be read, or if a collective fails.
    fn measure_reference(
        &self,
        engine: &Engine<B, Self::Model>,
        device: &B::Device,
        plan: &Plan,
        interrupt: &Interrupt,
    ) -> Result<bool, BoxError> {
        // Without preferences there is no reference.
        let _ = (engine, device, plan, interrupt);
        Ok(true)
    }
}

/// A task that can be run without data, on made-up micro-batches: in forecasts, and in measurements
/// of a step.
pub(crate) trait ExampleTask<B: FusedOps + OptimizerOps, M: AutodiffModule<Training<B>>>:
    Task<B, M> + Sync
{
    /// Returns a made-up micro-batch of this shape.
    fn example(&self, shape: BatchShape) -> Self::Batch;
}

/// Forecasts training the model of `build` on `task` with micro-batches of this shape, on a rank of
/// each pipeline stage.
///
/// # Errors
/// Returns the error of `build`, or an error if the plan does not fit the model.
pub(crate) fn forecast_task<M, T>(
    task: &T,
    plan: &Plan,
    shape: BatchShape,
    build: impl Fn(&MetaDevice) -> Result<M, BoxError> + Send + Sync,
) -> Result<Vec<Forecast>, ForecastError>
where
    M: AutodiffModule<Training<Meta>>,
    T: ExampleTask<Meta, M>,
{
    deepburn::forecast_stages(plan, build, |model| task.loss(model, &task.example(shape)))
}

/// The part of a recipe that does not depend on the backend.
pub(crate) trait SubjectInfo {
    /// Returns the configuration of the model, which determines its parameters and activations.
    fn architecture(&self) -> &dyn Architecture;

    /// Returns the model with its adapter, which is trained and exported in place of the weights;
    /// `None` without one.
    fn adapted(&self) -> Option<&AnyDecoder> {
        None
    }

    /// Returns the contents of the exported model folder except the weights, the tokenizer and the
    /// companion files.
    fn hf_export(&self) -> HfExport {
        self.architecture().hf_export()
    }

    /// Returns what recipes have in common.
    fn settings(&self) -> &RecipeSettings;

    /// Returns the tokenizer to export with the model; `None` for token files without one.
    fn tokenizer(&self) -> Option<&Tokenizer>;

    /// Returns a hash of the initial weights, if preference optimization compares the model with
    /// them. A run that resumes has to start from the same ones. `None` for other data.
    ///
    /// # Errors
    /// Returns an error if the files of the pretrained model or of the adapter cannot be read.
    fn reference_fingerprint(&self) -> Result<Option<String>, ModelFolderError> {
        Ok(None)
    }

    /// Returns the number of tokens of the longest sequence, at most `limit`.
    fn longest(&self, limit: usize) -> usize;

    /// Returns the number of tokens that a sample needs in order to have a target.
    fn min_tokens(&self) -> usize {
        1
    }

    /// Returns the number of samples of a rank in an epoch.
    fn samples_per_epoch(&self, shard: DataShard) -> Result<usize, DataError>;

    /// Returns the number of samples of the training data, whatever the batches are.
    fn num_samples(&self) -> Result<usize, DataError> {
        self.samples_per_epoch(DataShard::WHOLE)
    }

    /// Returns a hash of the tokenized training data.
    fn data_fingerprint(&self) -> Result<String, DataError>;

    /// Returns a hash of the tokenized evaluation data, if there is some.
    fn evaluation_fingerprint(&self) -> Result<Option<String>, DataError>;

    /// Returns the sampler of dynamic batching.
    ///
    /// # Errors
    /// Returns a user's mistake if samples are packed sequences of one length, or if a text exceeds
    /// the token budget.
    fn budget_sampler(
        &self,
        shape: StepShape,
        dynamic: &DynamicBatchingPlan,
    ) -> Result<BudgetSampler, Failure>;
}

/// The inputs from which the model and the data of a job are prepared.
#[derive(Clone, Copy)]
pub(crate) struct JobInputs<'a> {
    /// The job.
    pub(crate) job: &'a Job,
    /// Resolves the names in the job to files.
    pub(crate) places: &'a Places,
    /// Folder of the pretrained model; `None` for random initial weights.
    pub(crate) pretrained: Option<&'a Path>,
    /// The largest batch of the run.
    pub(crate) batch: BatchPlan,
    /// The day that chat templates print as the current one.
    pub(crate) day: Day,
}

/// What the recipes of language models and of classifiers have in common.
pub(crate) struct RecipeSettings {
    /// The order of training samples.
    pub(crate) order: Order,
    /// The source of the initial weights.
    pub(crate) origin: WeightOrigin,
    /// The files that are exported unchanged.
    pub(crate) companions: Companions,
    /// How the job evaluates.
    pub(crate) evaluation: EvaluationPlan,
}

impl RecipeSettings {
    /// Returns the settings of a job, whose model is exported with these files.
    pub(crate) fn new(inputs: &JobInputs<'_>, companions: Companions) -> Self {
        let training = &inputs.job.training;
        let pretrained = inputs.pretrained.map(Path::to_owned);
        Self {
            order: match inputs.job.data.shuffle {
                true => Order::Shuffled { seed: training.seed },
                false => Order::Sequential,
            },
            origin: WeightOrigin { pretrained, seed: training.seed },
            companions,
            evaluation: training.evaluation.clone(),
        }
    }

    /// Returns the number of samples of an evaluation batch on each rank.
    pub(crate) fn eval_batch_size(&self, plan: &Plan) -> usize {
        self.evaluation.per_device_eval_batch_size.unwrap_or(plan.batch.micro_batch_size)
    }
}

/// The source of a model's initial weights: a pretrained model, or random initialization from a
/// seed.
pub(crate) struct WeightOrigin {
    /// Folder of the pretrained model.
    pub(crate) pretrained: Option<PathBuf>,
    /// Seed of randomly initialized weights: all weights, or only the new head of a pretrained
    /// model.
    pub(crate) seed: u64,
}

impl WeightOrigin {
    /// Reads and checks the pretrained weights, if there are some, so that an invalid file is
    /// reported before anything is written.
    ///
    /// # Errors
    /// Returns a user's mistake if the weights do not fit the configuration or are not finite.
    pub(crate) fn check(&self, config: &dyn Architecture) -> Result<(), Failure> {
        let Some(folder) = &self.pretrained else { return Ok(()) };
        config.check_weights(folder).map_err(|error| {
            // The weights of an adapter are checked too, and their sizes were before.
            let is_adapter =
                error.path().is_some_and(|path| path.ends_with("adapter_model.safetensors"));
            let (key, remedy) = match is_adapter {
                true => ("model.adapter", ""),
                false => ("model.pretrained", remedy_of_misfit(&error)),
            };
            Failure::mistake(format!("{key}: {error}{remedy}"))
        })
    }
}

/// Returns the remedy if pretrained weights do not fit the configuration of the job; empty for
/// other errors.
fn remedy_of_misfit(error: &ModelFolderError) -> &'static str {
    let ModelFolderError::Tensors { problems, .. } = error else { return "" };
    // Other problems are tensors that the model does not have, and values that are not finite.
    let is_size = |problem: &TensorProblem| problem.expected.starts_with('[');
    // Wrong sizes first: they explain a head that does not fit, too.
    match problems.iter().find(|problem| problem.name == HEAD) {
        _ if problems.iter().any(is_size) => {
            "; remove the fields of model.config that set other sizes, or use other weights"
        }
        Some(_) => {
            "; these are the weights of a classifier; set data.kind to \"classification\", or use a language model"
        }
        None => "",
    }
}

/// The name of a classifier's head in `transformers`.
const HEAD: &str = "score.weight";
