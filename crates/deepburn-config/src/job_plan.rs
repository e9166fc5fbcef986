//! A checked job with all defaults: the content of `job.json`.

use std::path::PathBuf;

use serde::{Serialize, Serializer};
use serde_json::{Map, Value as Json, json};

use crate::choice::choices;
use crate::diagnosis::Diagnosis;
use crate::place::Place;
use crate::plan::{
    LrSchedulerParameters, LrSchedulerType, NoDecay, ParamGroup, PipelineSchedule, QuantizedFormat,
    is_default,
};
use crate::reporter::Reporter;
use crate::splits::SplitPlan;
use crate::step_count::StepCount;

/// A checked job with all defaults.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Job {
    /// The model.
    pub model: ModelJob,
    /// The data.
    pub data: DataJob,
    /// Duration, ranks, outputs and other training settings.
    pub training: TrainingJob,
    /// Warnings and notes about the job file.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<Diagnosis>,
}

/// The model of a job.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ModelJob {
    /// The architecture; `None` if it follows from the `model_type` of the checkpoint.
    pub architecture: Option<Architecture>,
    /// A checkpoint in Hugging Face's layout; `None` for random weights, initialized with the seed.
    pub pretrained: Option<Place>,
    /// Hugging Face's config fields, which override the checkpoint's.
    pub config: Map<String, Json>,
    /// The fields of a new adapter, with the names and values of PEFT.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lora: Option<Map<String, Json>>,
    /// The folder of an adapter that is trained further.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub adapter: Option<PathBuf>,
    /// The storage of the frozen base model in 8 or 4 bits.
    #[serde(rename = "quantization_config", skip_serializing_if = "Option::is_none")]
    pub quantization: Option<QuantizationJob>,
}

/// The quantization of a frozen base model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QuantizationJob {
    /// The format of the frozen matrices.
    pub format: QuantizedFormat,
    /// The modules that are not quantized: complete names, their beginnings up to a dot, or their
    /// ends.
    pub skip_modules: Vec<String>,
}

/// Writes the fields of transformers' `BitsAndBytesConfig`.
impl Serialize for QuantizationJob {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = match self.format {
            QuantizedFormat::Int8 => json!({ "load_in_8bit": true }),
            format => json!({
                "load_in_4bit": true,
                "bnb_4bit_quant_type": "nf4",
                "bnb_4bit_use_double_quant": format == QuantizedFormat::Nf4Double,
            }),
        };
        if !self.skip_modules.is_empty() {
            fields["llm_int8_skip_modules"] = json!(self.skip_modules);
        }
        fields.serialize(serializer)
    }
}

impl ModelJob {
    /// Returns whether an adapter is trained instead of the weights.
    pub fn has_adapter(&self) -> bool {
        self.lora.is_some() || self.adapter.is_some()
    }
}

/// Supported model architectures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Architecture {
    /// GPT-2.
    Gpt2,
    /// Llama 2 and 3, and SmolLM2.
    Llama,
    /// Qwen 2 and 2.5.
    Qwen2,
    /// Qwen 3.
    Qwen3,
    /// Mistral.
    Mistral,
    /// Phi 3 and 4.
    Phi3,
    /// Gemma 2.
    Gemma2,
    /// The text model of Gemma 3.
    Gemma3,
    /// A transformer encoder with a classification head.
    Encoder,
}

/// The data of a job.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DataJob {
    /// The kind of the data.
    pub kind: DataKind,
    /// The source of the data, and its splits.
    pub splits: SplitPlan,
    /// Configuration of a data set with several configurations.
    pub name: Option<String>,
    /// Whether the tokens of text are cached on disk for the next run.
    pub token_cache: bool,
    /// Folder, repository or `tokenizer.json`; `None` to use the checkpoint's tokenizer, or to
    /// train one.
    pub tokenizer: Option<Place>,
    /// The token that ends a text; `None` for the one that the tokenizer or the checkpoint names.
    pub eos_token: Option<String>,
    /// Whether the checkpoint is trained on another vocabulary than its own.
    pub new_vocabulary: bool,
    /// Maximum number of entries of a trained tokenizer.
    pub vocab_size: usize,
    /// Tokens per sample.
    pub sequence_length: usize,
    /// Whether samples are shuffled in each epoch.
    pub shuffle: bool,
    /// Whether samples that do not fill the last global batch are dropped.
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
        /// The separator between documents.
        join: Join,
    },
    /// Conversations, prompts with completions, and other samples that are learned one by one.
    Chat(ChatPlan),
    /// Pairs of a better and a worse completion. The keys that only [`DataKind::Chat`] reads have
    /// their defaults.
    Preference(ChatPlan),
    /// Raw little-endian tokens.
    Tokens,
    /// The embedded synthetic corpus.
    Synthetic,
    /// Texts with one class each, from tables or the embedded synthetic reviews.
    Classification {
        /// Field of the text.
        text_field: String,
        /// Field of the class.
        label_field: String,
    },
}

impl DataKind {
    /// Returns the settings of samples that are learned one by one; `None` for other data.
    pub fn samples(&self) -> Option<&ChatPlan> {
        match self {
            Self::Chat(plan) | Self::Preference(plan) => Some(plan),
            _ => None,
        }
    }

    /// Returns the value of `data.kind`.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Text { .. } => "text",
            Self::Chat(_) => "chat",
            Self::Preference(_) => "preference",
            Self::Tokens => "tokens",
            Self::Synthetic => "synthetic",
            Self::Classification { .. } => "classification",
        }
    }
}

/// Training on conversations, with the meanings and defaults of TRL's `SFTConfig`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ChatPlan {
    /// Field of the text, in rows with a text.
    pub text_field: String,
    /// Field of the messages; `None` for `messages` or `conversations`.
    pub messages_field: Option<String>,
    /// The chat template; `None` for the tokenizer's own.
    pub chat_template: Option<TemplateSource>,
    /// Whether only the answers of the assistant are learned, and how they are found.
    pub assistant_only_loss: AssistantOnlyLoss,
    /// Whether only completions are learned; `None` for the default of each form of row.
    pub completion_only_loss: Option<bool>,
    /// How samples share a sequence.
    pub packing: PackingPlan,
    /// The token that pads samples; `None` for the one that the tokenizer names.
    pub pad_token: Option<String>,
    /// Whether rows that are not valid are left out. Job records of earlier versions do not have
    /// it.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub skip_invalid_rows: bool,
}

/// Whether only the answers of the assistant are learned, and how they are found.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum AssistantOnlyLoss {
    /// All messages are learned (`false`).
    #[default]
    Off,
    /// The chat template marks the answers, or TRL knows it (`true`).
    Marked,
    /// The template marks the answers, or they are found by rendering the turns (`"turns"`).
    Turns,
}

impl AssistantOnlyLoss {
    /// The name of [`Turns`](Self::Turns) in a job file.
    pub const TURNS: &str = "turns";
}

/// Serializes the value as it is in a job file.
impl Serialize for AssistantOnlyLoss {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Off => serializer.serialize_bool(false),
            Self::Marked => serializer.serialize_bool(true),
            Self::Turns => serializer.serialize_str(Self::TURNS),
        }
    }
}

/// The source of a chat template.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum TemplateSource {
    /// The template itself.
    Text(String),
    /// A file that contains it.
    File(PathBuf),
}

/// How samples share a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PackingPlan {
    /// Each sample is a sequence, padded to the longest of its micro-batch.
    Padded,
    /// The samples of a micro-batch are joined, and do not see each other.
    PaddingFree,
    /// Samples are packed into sequences before training.
    Packed(PackingStrategy),
}

/// How samples are packed into sequences of one length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PackingStrategy {
    /// Best fit decreasing, after truncation.
    Bfd,
    /// Best fit decreasing of samples that are divided instead of truncated.
    BfdSplit,
    /// Joined and cut.
    Wrapped,
}

/// The separator between the documents of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Join {
    /// The end-of-text token.
    EndOfText,
    /// A blank line.
    BlankLine,
    /// Nothing.
    Nothing,
}

/// The training settings of a job.
///
/// The fields of the groups are keys of the section `training`, in which `job.json` has them in the
/// order of declaration.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TrainingJob {
    /// When training ends.
    #[serde(flatten)]
    pub length: LengthPlan,
    /// Seed for weights, sample order and dropout.
    pub seed: u64,
    /// The ranks, and the devices that they run on.
    #[serde(flatten)]
    pub placement: PlacementPlan,
    /// Folder for all outputs.
    pub output_dir: PathBuf,
    /// Evaluations during training.
    #[serde(flatten)]
    pub evaluation: EvaluationPlan,
    /// Checkpoints.
    #[serde(flatten)]
    pub saving: SavingPlan,
    /// First step and `train_batch_size` of each change of the batch size, in the order given.
    pub batch_size_schedule: Vec<(usize, usize)>,
    /// Reports of metrics.
    #[serde(flatten)]
    pub logging: LoggingPlan,
    /// Values of settings that the DeepSpeed configuration leaves to the job.
    #[serde(flatten)]
    pub deepspeed_defaults: DeepSpeedDefaults,
    /// The objective.
    #[serde(flatten)]
    pub objective: ObjectivePlan,
    /// The parameters without weight decay.
    pub no_decay: NoDecay,
    /// Parameter groups, whose settings differ from the optimizer's.
    pub param_groups: Vec<ParamGroup>,
}

/// How long a job trains.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LengthPlan {
    /// Passes over the train split; `None` if only `max_steps` ends training.
    #[serde(serialize_with = "number_of_epochs")]
    pub epochs: Option<f64>,
    /// Optimizer steps after which training ends; `None` if only `epochs` ends it.
    pub max_steps: Option<usize>,
}

/// The ranks of a job, and the devices that they run on.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PlacementPlan {
    /// Number of ranks.
    pub ranks: usize,
    /// The pipeline, if the DeepSpeed configuration does not set it.
    #[serde(flatten)]
    pub pipeline: PipelineRequest,
    /// The backend, which determines where tensors are stored and computed.
    pub backend: Backend,
    /// The precision of products of f32 matrices.
    pub float32_matmul_precision: Float32MatmulPrecision,
    /// Indices of the devices for the ranks; `None` for all visible devices.
    pub devices: Option<Vec<usize>>,
    /// Seconds that a rank waits for the other ranks in a collective operation.
    pub collective_timeout: usize,
}

/// The precision of products of f32 matrices on devices with tensor cores, with the names of
/// `torch.set_float32_matmul_precision`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Float32MatmulPrecision {
    /// All bits of f32.
    Highest,
    /// Operands may be rounded to TF32, which has 10 bits of mantissa.
    High,
    /// As `High`. PyTorch may round further, to bf16.
    Medium,
}

impl Float32MatmulPrecision {
    /// Returns whether operands may be rounded to TF32.
    pub fn allows_tf32(self) -> bool {
        self != Self::Highest
    }
}

/// The pipeline that a job asks for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct PipelineRequest {
    /// Number of stages, if the DeepSpeed configuration does not set it.
    #[serde(rename = "pipeline_stages", skip_serializing_if = "Option::is_none")]
    pub stages: Option<usize>,
    /// The order of the passes of a stage.
    #[serde(rename = "pipeline_schedule", skip_serializing_if = "is_default")]
    pub schedule: PipelineSchedule,
}

/// Evaluations during training, and what they decide.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct EvaluationPlan {
    /// How often the model is evaluated; `None` for no evaluation during training.
    pub eval_steps: Option<Cadence>,
    /// Number of samples in an evaluation during training, over all ranks.
    pub eval_max_samples: Option<usize>,
    /// Number of samples of an evaluation batch on each rank; `None` for the micro-batch size.
    pub per_device_eval_batch_size: Option<usize>,
    /// The texts that the model generates after each evaluation; `None` for no texts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub samples: Option<SamplePlan>,
    /// Whether the best model is kept and loaded when training ends.
    pub load_best_model_at_end: bool,
    /// The metric that determines the best model.
    pub metric_for_best_model: ModelMetric,
    /// Number of consecutive evaluations without an improvement after which training stops.
    pub early_stopping_patience: Option<usize>,
    /// Minimum change that counts as an improvement, in units of the metric.
    pub early_stopping_threshold: f64,
}

/// The checkpoints of a job, and what they contain.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SavingPlan {
    /// How often a checkpoint is saved; `None` for no regular checkpoints.
    pub save_steps: Option<Cadence>,
    /// Whether training continues while a checkpoint is written.
    pub async_save: bool,
    /// Number of most recent checkpoints to keep.
    pub save_total_limit: Option<usize>,
    /// Number of additional checkpoints to keep: those with the lowest evaluation loss.
    pub save_best_limit: Option<usize>,
    /// Whether the model with the merged adapter is saved too.
    pub save_merged: bool,
    /// The parameters that checkpoints contain.
    pub checkpoint_scope: CheckpointScope,
}

/// The metrics that a job shows.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LoggingPlan {
    /// The programs for which `report_to` asks; empty for none.
    pub report_to: Vec<Reporter>,
    /// Optimizer steps between two printed lines.
    pub logging_steps: Option<StepCount>,
}

/// Values of settings that the DeepSpeed configuration leaves to the job.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DeepSpeedDefaults {
    /// Learning rate, if the DeepSpeed configuration does not set it.
    pub learning_rate: Option<f64>,
    /// Samples per micro-batch, if the DeepSpeed configuration does not set it.
    pub micro_batch_size: Option<usize>,
    /// Whether activations are recomputed; `None` if the file does not set it.
    pub gradient_checkpointing: Option<bool>,
    /// Length of the warm-up, if the DeepSpeed configuration does not set it.
    pub warmup_steps: Option<StepCount>,
    /// The schedule of transformers, if the DeepSpeed configuration does not have a schedule.
    pub lr_scheduler_type: Option<LrSchedulerType>,
    /// The parameters of this schedule; `None` without one.
    pub lr_scheduler_kwargs: Option<LrSchedulerParameters>,
}

/// What training minimizes.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ObjectivePlan {
    /// Weight of the mean over all classes in the loss; 0 without label smoothing.
    pub label_smoothing_factor: f64,
    /// Preference optimization; `None` for other data than [`DataKind::Preference`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dpo: Option<DpoPlan>,
}

/// Texts that a language model generates after each evaluation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SamplePlan {
    /// Prompts of the job.
    pub prompts: Vec<String>,
    /// The number of samples of the eval split whose prompts are continued.
    pub rows: usize,
    /// Maximum number of tokens of a text.
    pub max_new_tokens: usize,
}

/// Direct preference optimization (Rafailov et al. 2023), with the names of TRL's `DPOConfig`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct DpoPlan {
    /// The strength of the bond to the reference model.
    pub beta: f64,
    /// The loss of a pair.
    pub loss_type: PreferenceLoss,
}

/// The loss of a pair of completions. `d` is the difference between the better and the worse
/// completion, of the log-probability under the model minus that under the reference.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PreferenceLoss {
    /// `-log(sigmoid(beta * d))` (Rafailov et al. 2023, equation 7).
    Sigmoid,
    /// `(d - 1 / (2 * beta))^2`, with means over tokens in `d` (Azar et al. 2023, equation 17).
    Ipo,
}

/// How often something is done during training.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cadence {
    /// In the step that takes the last sample of an epoch.
    Epoch,
    /// Every this many optimizer steps.
    #[serde(untagged)]
    Every(StepCount),
}

impl TrainingJob {
    /// Replaces ratios with numbers of steps, once the number of steps of the run is known.
    pub fn set_total_steps(&mut self, total_steps: usize) {
        let steps = |count: &mut StepCount| *count = StepCount::Steps(count.of(total_steps));
        for cadence in
            [&mut self.evaluation.eval_steps, &mut self.saving.save_steps].into_iter().flatten()
        {
            if let Cadence::Every(count) = cadence {
                steps(count);
            }
        }
        let warmup_steps = &mut self.deepspeed_defaults.warmup_steps;
        self.logging.logging_steps.iter_mut().chain(warmup_steps).for_each(steps);
    }

    /// Returns whether every checkpoint of `save_steps` has an evaluation in its step; `None` if
    /// this depends on the number of steps of the run.
    pub fn evaluates_checkpoints(&self) -> Option<bool> {
        match (self.saving.save_steps, self.evaluation.eval_steps) {
            (Some(Cadence::Epoch), Some(Cadence::Epoch)) => Some(true),
            (Some(Cadence::Every(save)), Some(Cadence::Every(eval))) => match (save, eval) {
                (StepCount::Steps(save), StepCount::Steps(eval)) => Some(save.is_multiple_of(eval)),
                _ => None,
            },
            _ => Some(false),
        }
    }
}

/// Serializes a number of epochs, as an integer if it is one.
fn number_of_epochs<S: Serializer>(epochs: &Option<f64>, serializer: S) -> Result<S::Ok, S::Error> {
    match epochs {
        Some(epochs) if epochs.fract() == 0.0 => serializer.serialize_some(&(*epochs as u64)),
        epochs => epochs.serialize(serializer),
    }
}

/// An evaluation metric for the comparison of models.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ModelMetric {
    /// The mean loss; the lowest is best.
    #[default]
    Loss,
    /// The accuracy of a classifier; the highest is best.
    Accuracy,
    /// The micro-averaged F1 score of a classifier with several labels for each text; the highest
    /// is best.
    F1,
    /// The mean absolute error of a regression; the lowest is best.
    Mae,
}

/// The parameters that checkpoints contain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CheckpointScope {
    /// All parameters.
    All,
    /// All parameters except frozen ones with the values of the pretrained model.
    Trained,
}

/// The backend, which determines where tensors are stored and computed. Its name is also the name
/// of the cargo feature.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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

choices!(Architecture {
    "gpt2" => Gpt2, "llama" => Llama, "qwen2" => Qwen2, "qwen3" => Qwen3, "mistral" => Mistral, "phi3" => Phi3,
    "gemma2" => Gemma2, "gemma3_text" => Gemma3, "encoder" => Encoder, "imdb_encoder" => Encoder,
});
choices!(PackingStrategy { "bfd" => Bfd, "bfd_split" => BfdSplit, "wrapped" => Wrapped });
choices!(PreferenceLoss { "sigmoid" => Sigmoid, "ipo" => Ipo });
choices!(Join { "end_of_text" => EndOfText, "blank_line" => BlankLine, "nothing" => Nothing });
choices!(ModelMetric {
    "loss" => Loss, "eval_loss" => Loss, "accuracy" => Accuracy, "eval_accuracy" => Accuracy,
    "f1" => F1, "eval_f1" => F1, "mae" => Mae, "eval_mae" => Mae,
});
choices!(CheckpointScope { "all" => All, "trained" => Trained });
choices!(Float32MatmulPrecision { "highest" => Highest, "high" => High, "medium" => Medium });
choices!(Backend { "flex" => Flex, "wgpu" => Wgpu, "cuda" => Cuda, "tch" => Tch });

impl ModelMetric {
    /// Returns whether evaluations of a classifier with this `problem_type` have the metric.
    pub fn is_of(self, problem_type: &str) -> bool {
        match self {
            Self::Loss => true,
            Self::Accuracy => problem_type != "regression",
            Self::F1 => problem_type == "multi_label_classification",
            Self::Mae => problem_type == "regression",
        }
    }
}

impl Architecture {
    /// The former name of [`Architecture::Encoder`] in job files.
    pub const FORMER_ENCODER: &'static str = "imdb_encoder";

    /// Returns whether a model can start from the weights of a checkpoint.
    pub fn takes_pretrained(self) -> bool {
        self != Self::Encoder
    }
}

impl Backend {
    /// Returns whether tensors are in host memory.
    pub fn is_host(self) -> bool {
        matches!(self, Self::Flex | Self::Tch)
    }
}
