//! The job file of `finetune`: what is trained, on what, for how long.
//!
//! ```json
//! { "model":     { "architecture": "gpt2", "pretrained": null, "config": { "n_layer": 12 } },
//!   "data":      { "kind": "text", "path": "corpus.txt", "splits": { "train": "90%", "eval": "10%" } },
//!   "training":  { "max_steps": 100, "ranks": 2, "output_dir": "output" },
//!   "deepspeed": "ds_zero3.json" }
//! ```
//! Everything has a default, so `{}` is a job once its DeepSpeed part gives a batch size. [`Job::load`]
//! reads the file, applies the command line's values, and returns the job and the DeepSpeed
//! configuration beside it; [`Job::facts`] is what the latter is resolved with. Paths are made
//! findable from the current folder; what does not exist must have the form of a repository on the
//! Hub.

use std::path::{Path, PathBuf};

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use serde_json::{Map, Value as Json};

use crate::check::check;
use crate::diagnosis::{ConfigError, Diagnosis, Findings};
use crate::job_sections::{
    Places, check_best, check_pair, check_saving, read_data, read_model, read_training,
};
use crate::keys::DEEPSPEED;
use crate::keys::job::JOB;
use crate::lightning::looks_like_a_strategy;
use crate::lookup::find;
use crate::node::{Node, Value};
use crate::overrides::{Override, TypedKey};
use crate::place::Place;
use crate::plan::ParamGroups;
use crate::resolve::{Facts, Resolved};
use crate::section::Section;
use crate::source::{Origin, parse_json, read_text};
use crate::splits::SplitPlan;
use crate::written::Written;

/// Folder in which configurations are looked for after the place that was given.
pub const CONFIG_FOLDER: &str = "configs";

/// What a command line asks for. Options come after `sets`, so an option wins.
#[derive(Debug, Clone, Default)]
pub struct JobRequest {
    /// The job file, looked for as given and then in `configs/`.
    pub config: PathBuf,
    /// `path.to.key=VALUE`, in order.
    pub sets: Vec<String>,
    /// A DeepSpeed configuration that takes the place of the job file's.
    pub deepspeed: Option<PathBuf>,
    /// Takes the place of `training.ranks`.
    pub ranks: Option<usize>,
    /// Processes that a launcher started, each of them a rank: the default of `training.ranks`, which
    /// may not say another number.
    pub launched: Option<usize>,
    /// Takes the place of `training.backend`.
    pub backend: Option<String>,
    /// Takes the place of `training.output_dir`.
    pub output_dir: Option<PathBuf>,
}

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
    /// Hugging Face's config fields, which override those of the checkpoint.
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
    /// Whether training goes on while a checkpoint is written.
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
    /// Parameters that are updated in another way than the optimizer says; `no_decay` and `param_groups` of the
    /// job file.
    #[serde(flatten, serialize_with = "param_groups")]
    pub param_groups: ParamGroups,
}

/// Under the names that the job file has for it.
fn param_groups<S: Serializer>(groups: &ParamGroups, serializer: S) -> Result<S::Ok, S::Error> {
    let mut map = serializer.serialize_map(Some(2))?;
    map.serialize_entry("no_decay", &groups.no_decay)?;
    map.serialize_entry("param_groups", &groups.groups)?;
    map.end()
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

impl Backend {
    /// The name in a job file, which is also the name of the cargo feature.
    pub fn name(self) -> &'static str {
        match self {
            Self::Flex => "flex",
            Self::Wgpu => "wgpu",
            Self::Cuda => "cuda",
            Self::Tch => "tch",
        }
    }

    /// Whether its device is the host.
    pub fn is_host(self) -> bool {
        matches!(self, Self::Flex | Self::Tch)
    }
}

impl Job {
    /// Whether `path` is a job file rather than a DeepSpeed configuration: it has one of the sections `model`,
    /// `data` and `training`. A file that cannot be read is none, and neither is a pipe, which can be read only
    /// once.
    pub fn is_job_file(path: &Path) -> bool {
        if !path.is_file() {
            return false;
        }
        let name = path.display().to_string();
        let origin = Origin { document: "job file", name: &name };
        let root = read_text(path).and_then(|text| parse_json(&text, origin));
        root.is_ok_and(|root| {
            let top = Section::new(JOB, Some(&root), "");
            ["model", "data", "training"].iter().any(|name| top.given(name).is_some())
        })
    }

    /// Reads a job: the file, then the values of the command line, then its options.
    ///
    /// # Errors
    /// [`ConfigError`]; wrong values of the job file in one [`crate::Report`]. The DeepSpeed
    /// configuration is parsed here and checked by [`crate::resolve()`].
    pub fn load(request: &JobRequest) -> Result<(Self, Written), ConfigError> {
        let configs = [PathBuf::new(), PathBuf::from(CONFIG_FOLDER)];
        let path = find(&request.config, &configs, "file")?;
        let text = read_text(&path)?;
        let folder = path.parent().unwrap_or(Path::new("")).to_path_buf();
        Self::parse(&text, &path.display().to_string(), &folder, request)
    }

    /// The same for a text; `folder` is the one that the file would be in.
    ///
    /// # Errors
    /// As [`Job::load`].
    pub fn parse(
        text: &str,
        name: &str,
        folder: &Path,
        request: &JobRequest,
    ) -> Result<(Self, Written), ConfigError> {
        let mut root = parse_json(text, Origin { document: "job file", name })?;
        let overrides = overrides(request)?;
        let rate = typed_rate(&overrides);
        let (deepspeed, job): (Vec<_>, Vec<_>) =
            overrides.into_iter().partition(|set| set.is_inside("deepspeed"));
        for set in &job {
            set.apply(JOB, &mut root)?;
        }
        let beside = folder.to_path_buf();
        // A path from the command line is meant from where the command is typed.
        let folders = match request.deepspeed {
            Some(_) => [PathBuf::new(), beside, PathBuf::from(CONFIG_FOLDER)],
            None => [beside, PathBuf::new(), PathBuf::from(CONFIG_FOLDER)],
        };
        let mut written = take_deepspeed(&mut root, name, &folders)?;
        let whole = job.iter().filter_map(|set| set.typed_document("deepspeed"));
        let mut typed: Vec<_> = whole.collect();
        for set in deepspeed.iter().map(Override::inner) {
            set.apply(DEEPSPEED, written.node_mut())?;
            typed.push(set.typed(DEEPSPEED));
        }
        if let Some((rate, paths)) = rate {
            use_rate(&rate, &paths, written.node_mut());
        }
        let written = written.with_typed(typed);
        let typed: Vec<_> = job.iter().map(|set| set.typed(JOB)).collect();
        let job = Self::read(&root, name, Places { folder }, &written, request.launched, &typed)?;
        Ok((job, written))
    }

    fn read(
        root: &Node,
        name: &str,
        places: Places<'_>,
        written: &Written,
        launched: Option<usize>,
        typed: &[TypedKey],
    ) -> Result<Self, ConfigError> {
        let mut findings = Findings::default();
        check(JOB, root, &mut findings);
        let top = Section::new(JOB, Some(root), "");
        let mut job = Self {
            model: read_model(&top.section("model"), places, &mut findings),
            data: read_data(&top.section("data"), written, places, &mut findings),
            training: read_training(&top.section("training"), written, launched, &mut findings),
            notes: Vec::new(),
        };
        check_pair(&job.model, &job.data, &mut findings);
        // A split that was given and is wrong has an error of its own.
        let asks_for_eval = top.section("data").section("splits").given("eval").is_some();
        let has_eval = asks_for_eval || job.data.splits.has_eval();
        if job.training.eval_steps.is_some() && !has_eval {
            let remedy = "add data.splits, for example {\"train\": \"90%\", \"eval\": \"10%\"}, \
                or remove it";
            findings.error(
                "training.eval_steps",
                "there is nothing to evaluate: data.splits.eval is missing",
                remedy,
            );
        }
        check_saving(&job.training, &mut findings);
        check_best(&job.training, &job.data, &mut findings);
        findings.attribute(typed);
        job.notes = findings.verdict(name)?;
        Ok(job)
    }

    /// What the job knows for [`crate::resolve()`]; the width of the model and the number of steps are
    /// left for the caller to add once the model and the data are known. `total_steps` is
    /// `max_steps` until then.
    pub fn facts(&self) -> Facts {
        Facts {
            world_size: self.training.ranks,
            host_device: self.training.backend.is_host(),
            hidden_size: None,
            total_steps: self.training.max_steps,
            warmup_steps: self.training.warmup_steps,
            learning_rate: self.training.learning_rate,
            micro_batch_size: self.training.micro_batch_size,
            gradient_checkpointing: self.training.gradient_checkpointing,
            param_groups: self.training.param_groups.clone(),
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
    pub fn new(job: Job, written: &Written, resolved: Resolved) -> Self {
        Self { job, deepspeed: written.to_json(), resolved }
    }
}

fn overrides(request: &JobRequest) -> Result<Vec<Override>, ConfigError> {
    let text = |path: &Path| Node::text(path.to_string_lossy());
    let mut overrides: Vec<_> =
        request.sets.iter().map(|set| Override::parse(set)).collect::<Result<_, _>>()?;
    let number = |ranks: usize| Node::new(Value::Number(ranks.to_string()));
    let options = [
        ("--ranks", "ranks", request.ranks.map(number)),
        ("--backend", "backend", request.backend.as_deref().map(Node::text)),
        ("--output-dir", "output_dir", request.output_dir.as_deref().map(text)),
    ];
    for (option, name, value) in options {
        overrides.extend(value.map(|value| Override::of(option, &["training", name], value)));
    }
    let deepspeed = request.deepspeed.as_deref().map(text);
    overrides.extend(deepspeed.map(|path| Override::of("--deepspeed", &["deepspeed"], path)));
    Ok(overrides)
}

/// The keys of a DeepSpeed configuration that a typed `training.learning_rate` decides.
const RATES: [&[&str]; 2] = [
    &["deepspeed", "optimizer", "params", "lr"],
    &["deepspeed", "scheduler", "params", "warmup_max_lr"],
];

/// The learning rate of `--set training.learning_rate`, and the keys of [`RATES`] that no later option sets.
fn typed_rate(overrides: &[Override]) -> Option<(Node, Vec<&'static [&'static str]>)> {
    let at = overrides.iter().rposition(|set| set.sets(&["training", "learning_rate"]))?;
    let value = overrides[at].value();
    value.as_real()?;
    // The file that --deepspeed names is a file: what was typed for one value wins over it.
    let is_last = |path: &&[&str]| {
        let sets = |set: &Override| set.sets(path) && set.value().as_text().is_none();
        overrides.iter().rposition(sets).is_none_or(|later| later < at)
    };
    Some((value.clone(), RATES.into_iter().filter(is_last).collect()))
}

/// Puts the learning rate that was typed in the place of the file's, where the file has one.
fn use_rate(rate: &Node, paths: &[&[&str]], root: &mut Node) {
    for path in paths {
        // `root` is the section that the first name stands for.
        let place = path[1..].iter().try_fold(&mut *root, |node, name| {
            let entries = node.entries_mut()?;
            entries.iter_mut().find(|(key, _)| key == name).map(|(_, node)| node)
        });
        if let Some(lr) = place.filter(|lr| lr.as_real().is_some()) {
            *lr = rate.clone();
        }
    }
}

/// Takes the DeepSpeed part out of the job: a section, or the file that it names.
fn take_deepspeed(
    root: &mut Node,
    name: &str,
    folders: &[PathBuf],
) -> Result<Written, ConfigError> {
    let part = root.entries_mut().and_then(|entries| {
        entries.iter().position(|(key, _)| key == "deepspeed").map(|at| entries.remove(at).1)
    });
    match part {
        None => Ok(Written::empty()),
        Some(Node { value: Value::Null, .. }) => Ok(Written::empty()),
        Some(Node { value: Value::Text(path), .. }) => {
            match find(Path::new(&path), folders, "file") {
                Err(_) if looks_like_a_strategy(&path) => Written::from_strategy(&path),
                found => Written::from_file(&found?),
            }
        }
        Some(section) => Ok(Written::new(section, &format!("deepspeed section of {name}"))),
    }
}
