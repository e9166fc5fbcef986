//! The job file of `finetune`: the model, the data and the training settings.
//!
//! ```json
//! { "model":     { "architecture": "gpt2", "pretrained": null, "config": { "n_layer": 12 } },
//!   "data":      { "kind": "text", "path": "corpus.txt", "splits": { "train": "90%", "eval": "10%" } },
//!   "training":  { "max_steps": 100, "ranks": 2, "output_dir": "output" },
//!   "deepspeed": "ds_zero3.json" }
//! ```
//! All keys have defaults, except the batch size in the DeepSpeed configuration. [`Job::load`]
//! reads the file, applies the values of the command line, and returns the job and its DeepSpeed
//! configuration, which is resolved with [`Job::run_context`]. Paths are resolved to be valid from
//! the current folder. A path that does not exist must have the form of a repository on the Hub.

use std::path::{Path, PathBuf};

use crate::check::check;
use crate::choice::Choice;
use crate::context::RunContext;
use crate::diagnosis::{ConfigError, Findings, KeyLocation, note, refuse};
use crate::job_plan::{Cadence, DataKind, Job};
use crate::job_rules::JobReader;
use crate::key::Key;
use crate::keys::DeepSpeed;
use crate::keys::job::JobFile;
use crate::lightning::looks_like_a_strategy;
use crate::node::{Node, Value};
use crate::overrides::Override;
use crate::place::find;
use crate::plan::{LrScheduler, ParamGroups, QuantizationPlan};
use crate::raw_config::RawConfig;
use crate::remedy::free_section;
use crate::reporter::Reporter;
use crate::section::{ConfigEntry, FromEntry, Section};
use crate::source::{SourceName, parse_json, read_text};

/// The folder in which configurations are searched for after the given location.
pub const CONFIG_FOLDER: &str = "configs";

/// The command-line arguments of a job. Options are applied after `sets` and take precedence. Only
/// values that `sets` changes inside of `deepspeed` are applied after the option `deepspeed`.
#[derive(Debug, Clone, Default)]
pub struct JobRequest {
    /// The job file, searched for as given and then in `configs/`.
    pub config: PathBuf,
    /// `path.to.key=VALUE`, in order.
    pub sets: Vec<String>,
    /// A DeepSpeed configuration that replaces the job file's.
    pub deepspeed: Option<PathBuf>,
    /// Overrides `training.ranks`.
    pub ranks: Option<usize>,
    /// Number of processes that a launcher started, one per rank. It is the default of
    /// `training.ranks`, which must not differ.
    pub launched: Option<usize>,
    /// Overrides `training.backend`.
    pub backend: Option<String>,
    /// Overrides `training.output_dir`.
    pub output_dir: Option<PathBuf>,
}

impl Job {
    /// Returns whether `path` is a job file rather than a DeepSpeed configuration: a job file has
    /// one of the sections `model`, `data` and `training`. Returns false for a file that cannot be
    /// read, and for a pipe, which can be read only once.
    pub fn is_job_file(path: &Path) -> bool {
        if !path.is_file() {
            return false;
        }
        let name = path.display().to_string();
        let origin = SourceName { document: "job file", name: &name };
        let root = read_text(path).and_then(|text| parse_json(&text, origin));
        root.is_ok_and(|root| {
            let top = JobFile::read(&ConfigEntry::document(&root));
            top.model.is_given() || top.data.is_given() || top.training.is_given()
        })
    }

    /// Reads a job file and applies the values of `--set` and the other options.
    ///
    /// # Errors
    /// Returns a [`ConfigError`]; all invalid values of the job file are in one
    /// [`crate::ConfigReport`]. The DeepSpeed configuration is only parsed here, and checked by
    /// [`crate::resolve()`].
    pub fn load(request: &JobRequest) -> Result<(Self, RawConfig), ConfigError> {
        let configs = [PathBuf::new(), PathBuf::from(CONFIG_FOLDER)];
        let path = find(&request.config, &configs, "file")?;
        let text = read_text(&path)?;
        let folder = path.parent().unwrap_or(Path::new("")).to_path_buf();
        Self::parse(&text, &path.display().to_string(), &folder, request)
    }

    /// Reads a job from a text. `folder` is the folder of the job file.
    ///
    /// ```
    /// use std::path::Path;
    ///
    /// use deepburn_config::{Job, JobRequest};
    ///
    /// let text = r#"{
    ///     "training": { "max_steps": 100, "ranks": 2 },
    ///     "deepspeed": { "train_micro_batch_size_per_gpu": 4 },
    /// }"#;
    /// // The command line takes precedence.
    /// let request = JobRequest { sets: vec!["training.max_steps=10".into()], ..Default::default() };
    /// let (job, deepspeed) = Job::parse(text, "job.json", Path::new(""), &request)?;
    /// assert_eq!((job.training.length.max_steps, job.training.placement.ranks), (Some(10), 2));
    /// assert_eq!(deepspeed.to_json()["train_micro_batch_size_per_gpu"], 4);
    /// # Ok::<(), deepburn_config::ConfigError>(())
    /// ```
    ///
    /// # Errors
    /// Returns the errors of [`Job::load`].
    pub fn parse(
        text: &str,
        name: &str,
        folder: &Path,
        request: &JobRequest,
    ) -> Result<(Self, RawConfig), ConfigError> {
        let mut root = parse_json(text, SourceName { document: "job file", name })?;
        // Before the options are applied: they would add keys of a job to the other kind of file.
        refuse_deepspeed(&root, name)?;
        let overrides = overrides(request)?;
        // Values inside of `deepspeed` have to wait until the file that it may name has been read.
        let of_job = overrides.iter().filter(|set| set.inside("deepspeed").is_none());
        let mut typed = Vec::new();
        for set in of_job.clone() {
            set.apply(JobFile::KEYS, &mut root)?;
            typed.push(set.typed(JobFile::KEYS));
        }
        // After the options, which may set such a default too.
        remove_trainer_defaults(&mut root);
        let (here, configs) = (PathBuf::new(), PathBuf::from(CONFIG_FOLDER));
        // A path on the command line is relative to the current folder.
        let folders = match request.deepspeed {
            Some(_) => [here, folder.to_path_buf(), configs],
            None => [folder.to_path_buf(), here, configs],
        };
        let mut written = take_deepspeed(&mut root, name, &folders)?;
        written.typed = of_job.filter_map(|set| set.typed_document("deepspeed")).collect();
        for set in overrides.iter().filter_map(|set| set.inside("deepspeed")) {
            set.apply(DeepSpeed::KEYS, &mut written.root)?;
            written.typed.push(set.typed(DeepSpeed::KEYS));
        }
        use_typed_rate(&overrides, &mut written.root);
        // After the options, which may name the programs or change their sections.
        enable_reporters(&root, &mut written.root);
        let deepspeed = DeepSpeed::read(&ConfigEntry::document(&written.root));
        let findings = Findings::default();
        let ranks = [written.processes(), request.launched];
        let deepspeed = &deepspeed;
        let mut reader = JobReader { folder, deepspeed, ranks, findings, is_misread: false };
        let mut job = Self::read(&root, &mut reader);
        reader.findings.attribute(&typed);
        job.notes = reader.findings.verdict(name)?;
        Ok((job, written))
    }

    /// Returns the run context for [`crate::resolve()`]. The caller adds the hidden size of the
    /// model and the number of steps once the model and the data are known. Until then,
    /// `total_steps` is `max_steps`.
    pub fn run_context(&self) -> RunContext {
        let training = &self.training;
        let (placement, defaults) = (&training.placement, &training.deepspeed_defaults);
        let groups = training.param_groups.clone();
        // Parameters are only read for a given type, so there are both or none.
        let scheduler = defaults.lr_scheduler_type.zip(defaults.lr_scheduler_kwargs);
        let lr_scheduler = scheduler.map(|(kind, parameters)| LrScheduler { kind, parameters });
        RunContext {
            world_size: placement.ranks,
            pipeline: placement.pipeline,
            host_device: placement.backend.is_host(),
            total_steps: training.length.max_steps,
            warmup_steps: defaults.warmup_steps,
            lr_scheduler,
            learning_rate: defaults.learning_rate,
            micro_batch_size: defaults.micro_batch_size,
            gradient_checkpointing: defaults.gradient_checkpointing,
            param_groups: ParamGroups { groups, no_decay: training.no_decay },
            // Names of modules become paths of parameters when the model is known.
            quantization: self
                .model
                .quantization
                .as_ref()
                .map(|it| QuantizationPlan { format: it.format, skipped: Vec::new() }),
            ..RunContext::default()
        }
    }

    /// Reads and checks all sections, then checks the rules that involve several sections.
    fn read(root: &Node, reader: &mut JobReader<'_>) -> Self {
        check(JobFile::KEYS, root, &mut reader.findings);
        reader.is_misread = reader.findings.have_error_in("data");
        let top = JobFile::read(&ConfigEntry::document(root));
        let model = &top.model.value;
        let has_adapter = model.lora.is_given() || model.adapter.is_given();
        let mut job = Self {
            model: reader.model(&top.model.value),
            data: reader.data(&top.data.value),
            training: reader.training(&top.training.value, has_adapter),
            notes: Vec::new(),
        };
        // These need the kind of the data, which is only known now.
        job.training.objective.dpo = reader.dpo(&top.training.value, &job.data);
        job.training.evaluation.samples = reader.samples(&top.training.value, &job.data);
        reader.check_pair(&job.model, &job.data);
        reader.check_quantization(&model.quantization_config, &job);
        // An invalid split has already been reported.
        let asks_for_eval = top.data.value.splits.value.eval.is_given();
        let has_eval = asks_for_eval || job.data.splits.has_eval();
        // The finding names the key that asked for evaluations.
        let key = match job.training.evaluation.eval_steps {
            Some(Cadence::Epoch) => "training.eval_strategy",
            _ => "training.eval_steps",
        };
        refuse!(if job.training.evaluation.eval_steps.is_some() && !has_eval; reader.findings, key =>
            "there is nothing to evaluate: data.splits.eval is missing";
            "add data.splits, for example {{\"train\": \"90%\", \"eval\": \"10%\"}}, or remove it");
        reader.check_saving(&job.training);
        reader.check_best(&job, top.training.value.eval_strategy.value, has_eval);
        let has_perplexity =
            !matches!(job.data.kind, DataKind::Classification { .. } | DataKind::Preference(_));
        note!(if job.training.objective.label_smoothing_factor > 0.0 && has_perplexity;
            reader.findings, "training.label_smoothing_factor" =>
            "also applies to evaluations, as in transformers' Trainer: their perplexity is the exponential of the \
             smoothed loss");
        reader.check_effects(&top, &job);
        job
    }
}

/// Reports a DeepSpeed configuration that was given as a job file with one error, instead of one
/// error per unknown key.
fn refuse_deepspeed(root: &Node, name: &str) -> Result<(), ConfigError> {
    // `$schema` is a key of both.
    let is_known = |keys, name: &str| name != "$schema" && Key::find(keys, name).is_some();
    let has_any = |keys| root.entries().iter().any(|(name, _)| is_known(keys, name));
    let mut findings = Findings::default();
    refuse!(if !has_any(JobFile::KEYS) && has_any(DeepSpeed::KEYS);
        findings, "" => "this looks like a DeepSpeed configuration; must be a job file";
        "pass it with --deepspeed together with a job file, or write its path as \"deepspeed\" in one");
    findings.verdict(name)?;
    Ok(())
}

/// Removes defaults of transformers' `TrainingArguments` that have the same meaning as an absent
/// key from the section `training`. Other values of these keys are checked as usual.
fn remove_trainer_defaults(root: &mut Node) {
    let training = root.get_mut("training").and_then(Node::entries_mut);
    let Some(entries) = training else { return };
    let is_default = |name: &str, value: &Node| match name {
        "max_steps" => value.as_integer() == Some(-1),
        "lr_scheduler_kwargs" => matches!(&value.value, Value::Map(entries) if entries.is_empty()),
        _ => false,
    };
    entries.retain(|(name, value)| !is_default(name, value));
}

/// Returns the values of the command line in the order in which they are applied: `--set` first,
/// then the options. Values inside of the DeepSpeed section are applied to it afterwards.
fn overrides(request: &JobRequest) -> Result<Vec<Override>, ConfigError> {
    let text = |path: &Path| Node::text(path.to_string_lossy());
    let mut overrides: Vec<_> = request
        .sets
        .iter()
        .map(|set| Override::parse(set, JobFile::KEYS))
        .collect::<Result<_, _>>()?;
    let number = |ranks: usize| Node::new(Value::Number(ranks.to_string()));
    // Options come last and so take precedence over `--set`.
    let options = [
        ("--ranks", "training.ranks", request.ranks.map(number)),
        ("--backend", "training.backend", request.backend.as_deref().map(Node::text)),
        ("--output-dir", "training.output_dir", request.output_dir.as_deref().map(text)),
        ("--deepspeed", "deepspeed", request.deepspeed.as_deref().map(text)),
    ];
    for (option, path, value) in options {
        overrides.extend(value.map(|value| Override::of(option, path, value)));
    }
    Ok(overrides)
}

/// Enables the sections of the programs that `training.report_to` of the job file `job` names, in
/// the DeepSpeed configuration `deepspeed`. Values of wrong types are left for the checks.
fn enable_reporters(job: &Node, deepspeed: &mut Node) {
    let Some(names) = job.get("training").and_then(|training| training.get("report_to")) else {
        return;
    };
    let names = names.as_list().unwrap_or(std::slice::from_ref(names));
    for reporter in names.iter().filter_map(Node::as_text).filter_map(Reporter::named) {
        if let Some(section) = deepspeed.get_mut(reporter.name()).filter(|it| it.is_auto()) {
            section.value = Value::Null;
        }
        // Also over `false`, because the job asks for this program.
        let path = format!("{}.enabled", reporter.name());
        let enabled = Override::of("report_to", &path, Node::new(Value::Flag(true)));
        let _ = enabled.apply(DeepSpeed::KEYS, deepspeed);
    }
}

/// The keys of a DeepSpeed configuration that `--set training.learning_rate` overrides.
const RATES: [&[&str]; 2] = [
    &["deepspeed", "optimizer", "params", "lr"],
    &["deepspeed", "scheduler", "params", "warmup_max_lr"],
];

/// Replaces the learning rates of the configuration `root` with the value of
/// `--set training.learning_rate`. A rate that `root` does not have, or that a later option sets,
/// is left unchanged.
fn use_typed_rate(overrides: &[Override], root: &mut Node) {
    let typed = overrides.iter().rposition(|set| set.sets(&["training", "learning_rate"]));
    let Some(at) = typed.filter(|at| overrides[*at].value.as_real().is_some()) else { return };
    for path in RATES {
        // A file that --deepspeed names does not override a single value on the command line.
        let sets = |set: &Override| set.sets(path) && set.value.as_text().is_none();
        let is_last = overrides.iter().rposition(sets).is_none_or(|later| later < at);
        // `root` is the section that the first name of the path refers to.
        let place = path[1..].iter().try_fold(&mut *root, |node, name| node.get_mut(name));
        if let Some(lr) = place.filter(|lr| is_last && lr.as_real().is_some()) {
            *lr = overrides[at].value.clone();
        }
    }
}

/// Removes the DeepSpeed configuration from the job and returns it. It is a section, or is read
/// from the file that it names.
fn take_deepspeed(
    root: &mut Node,
    name: &str,
    folders: &[PathBuf],
) -> Result<RawConfig, ConfigError> {
    let part = root.entries_mut().and_then(|entries| {
        entries.iter().position(|(key, _)| key == "deepspeed").map(|at| entries.remove(at).1)
    });
    let part = part.filter(|part| !part.is_null());
    let mut findings = Findings::default();
    // No path starts with a brace.
    if let Some(node) = &part
        && node.as_text().is_some_and(|text| text.trim_start().starts_with('{'))
    {
        refuse!(findings, KeyLocation::at("deepspeed", node) =>
            "{node} is a string; must be a section, {{ ... }}, or the path of a file";
            "{}", free_section(node, "{ \"train_micro_batch_size_per_gpu\": 1 }"));
    }
    findings.verdict(name)?;
    match part {
        Some(Node { value: Value::Text(path), .. }) => {
            match find(Path::new(&path), folders, "file") {
                Err(_) if looks_like_a_strategy(&path) => RawConfig::from_strategy(&path),
                found => RawConfig::from_file(&found?),
            }
        }
        section => Ok(RawConfig::section_of(name, section)),
    }
}
