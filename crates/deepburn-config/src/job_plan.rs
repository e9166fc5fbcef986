//! A job, checked and with every default: the content of `job.json`.

use std::path::PathBuf;

use serde::Serialize;
use serde_json::{Map, Value as Json};

use crate::choice::{Choice, choices};
use crate::context::RunContext;
use crate::diagnosis::Diagnosis;
use crate::place::Place;
use crate::plan::{NoDecay, ParamGroup, ParamGroups};
use crate::raw_config::RawConfig;
use crate::resolve::Resolved;
use crate::splits::SplitPlan;

/// A job, checked and with every default.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Job {
    /// What is trained.
    pub model: ModelJob,
    /// What it is trained on.
    pub data: DataJob,
    /// For how long, on how many ranks, and where the results go.
    pub training: TrainingJob,
    /// Warnings and notes about the job file.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<Diagnosis>,
}

/// The model of a job.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ModelJob {
    /// What is trained.
    pub architecture: Architecture,
    /// A checkpoint in Hugging Face's layout; `None` draws weights from the seed.
    pub pretrained: Option<Place>,
    /// Hugging Face's config fields, which override the checkpoint's.
    pub config: Map<String, Json>,
}

/// Models that can be trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Architecture {
    /// GPT-2.
    Gpt2,
    /// A transformer encoder that classifies texts.
    ImdbEncoder,
}

/// The data of a job.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DataJob {
    /// What the data is.
    pub kind: DataKind,
    /// Where it comes from, and which part trains.
    pub splits: SplitPlan,
    /// Configuration of a data set that has several.
    pub name: Option<String>,
    /// Whether the tokens of text are kept on disk for the next run.
    pub token_cache: bool,
    /// Folder, repository or `tokenizer.json`; `None` leaves it to the checkpoint or trains one.
    pub tokenizer: Option<Place>,
    /// Entries of a tokenizer that is trained, at most.
    pub vocab_size: usize,
    /// Tokens of a sample.
    pub sequence_length: usize,
    /// Draw samples in a new order every epoch.
    pub shuffle: bool,
    /// Drop the samples that do not fill a last global batch.
    pub drop_last: bool,
}

/// Kinds of data.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DataKind {
    /// Text files and tables, tokenized when they are read.
    Text {
        /// Field of the text, in tables.
        text_field: String,
        /// What stands between documents.
        join: Join,
    },
    /// Raw little-endian tokens.
    Tokens,
    /// The embedded synthetic corpus.
    Synthetic,
    /// Texts with a class each: tables, or the embedded synthetic reviews.
    Classification {
        /// Field of the text.
        text_field: String,
        /// Field of the class.
        label_field: String,
    },
}

/// What stands between the documents of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Join {
    /// The end-of-text token.
    EndOfText,
    /// A blank line.
    BlankLine,
    /// Nothing.
    Nothing,
}

/// The run of a job.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TrainingJob {
    /// Passes over the train split; `None` where only `max_steps` ends training.
    pub epochs: Option<usize>,
    /// Optimizer steps after which training ends; `None` where only `epochs` does.
    pub max_steps: Option<usize>,
    /// Seed of weights, order and dropout.
    pub seed: u64,
    /// Ranks.
    pub ranks: usize,
    /// Where tensors live.
    pub backend: Backend,
    /// Indices of the devices that ranks are placed on; `None` takes all that are visible.
    pub devices: Option<Vec<usize>>,
    /// Seconds that a rank waits for the others in a collective.
    pub collective_timeout: usize,
    /// Folder of everything that is written.
    pub output_dir: PathBuf,
    /// Optimizer steps between two evaluations.
    pub eval_steps: Option<usize>,
    /// Samples that an evaluation during training takes, over all ranks.
    pub eval_max_samples: Option<usize>,
    /// Whether the best model is kept and loaded when training ends.
    pub load_best_model_at_end: bool,
    /// What models are compared by.
    pub metric_for_best_model: ModelMetric,
    /// Evaluations in a row without a better one after which training stops.
    pub early_stopping_patience: Option<usize>,
    /// By how much an evaluation has to be better to count, in units of the metric.
    pub early_stopping_threshold: f64,
    /// Optimizer steps between two checkpoints.
    pub save_steps: Option<usize>,
    /// Whether training continues while a checkpoint is written.
    pub async_save: bool,
    /// Newest checkpoints that are kept.
    pub save_total_limit: Option<usize>,
    /// Checkpoints that are kept besides because their evaluation loss is the least.
    pub save_best_limit: Option<usize>,
    /// First step and `train_batch_size` of each change of the batch size, in the order given.
    pub batch_size_schedule: Vec<(usize, usize)>,
    /// Optimizer steps between two printed lines.
    pub logging_steps: Option<usize>,
    /// Learning rate for a DeepSpeed configuration that leaves it open.
    pub learning_rate: Option<f64>,
    /// Micro-batch for a DeepSpeed configuration that leaves it open, in samples.
    pub micro_batch_size: Option<usize>,
    /// Whether activations are recomputed, where the file says so.
    pub gradient_checkpointing: Option<bool>,
    /// Steps of the warm-up for a DeepSpeed configuration that leaves them open.
    pub warmup_steps: Option<usize>,
    /// What weight decay leaves alone.
    pub no_decay: NoDecay,
    /// Parameters that are updated in another way than the optimizer says.
    pub param_groups: Vec<ParamGroup>,
}

/// A number of an evaluation that models are compared by.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ModelMetric {
    /// The mean loss; the lowest is best.
    #[default]
    Loss,
    /// The share of right answers of a classifier; the highest is best.
    Accuracy,
}

/// Where tensors live.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Backend {
    /// The CPU, in plain Rust.
    Flex,
    /// Any GPU through WebGPU.
    Wgpu,
    /// NVIDIA GPUs.
    Cuda,
    /// libtorch.
    Tch,
}

choices!(Architecture { "gpt2" => Gpt2, "imdb_encoder" => ImdbEncoder });
choices!(Join { "end_of_text" => EndOfText, "blank_line" => BlankLine, "nothing" => Nothing });
choices!(ModelMetric {
    "loss" => Loss, "eval_loss" => Loss, "accuracy" => Accuracy, "eval_accuracy" => Accuracy,
});
choices!(Backend { "flex" => Flex, "wgpu" => Wgpu, "cuda" => Cuda, "tch" => Tch });

impl Backend {
    /// The name in a job file, which is also the name of the cargo feature.
    pub fn name(self) -> &'static str {
        self.first_name()
    }

    /// Whether its device is the host.
    pub fn is_host(self) -> bool {
        matches!(self, Self::Flex | Self::Tch)
    }
}

impl Job {
    /// What the job knows for [`crate::resolve()`]; the width of the model and the number of steps
    /// are left for the caller to add once the model and the data are known. `total_steps` is
    /// `max_steps` until then.
    pub fn run_context(&self) -> RunContext {
        let training = &self.training;
        let groups = training.param_groups.clone();
        RunContext {
            world_size: training.ranks,
            host_device: training.backend.is_host(),
            total_steps: training.max_steps,
            warmup_steps: training.warmup_steps,
            learning_rate: training.learning_rate,
            micro_batch_size: training.micro_batch_size,
            gradient_checkpointing: training.gradient_checkpointing,
            param_groups: ParamGroups { groups, no_decay: training.no_decay },
            ..RunContext::default()
        }
    }
}

/// A job with its plan: the content of `job.json`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ResolvedJob {
    /// The job.
    #[serde(flatten)]
    pub job: Job,
    /// The DeepSpeed configuration as it was written, overrides included.
    pub deepspeed: Json,
    /// What it means, what every `"auto"` became, and what was noted about it.
    pub resolved: Resolved,
}

impl ResolvedJob {
    /// Puts the three together.
    pub fn new(job: Job, written: &RawConfig, resolved: Resolved) -> Self {
        Self { job, deepspeed: written.to_json(), resolved }
    }
}
