//! Reads and checks the sections of a job file: files must exist, and keys must not contradict each
//! other.

mod cadence;
mod chat;
mod devices;
mod effects;
mod quantization;
mod reporters;
mod schedule;
mod splits;

use std::path::{Path, PathBuf};

use serde_json::{Map, Value as Json};

use crate::counted::counted;
use crate::diagnosis::{Findings, KeyLocation, note, refuse, report, warning};
use crate::job_plan::{
    Architecture, Backend, CheckpointScope, DataJob, DataKind, DpoPlan, EvaluationPlan, Job,
    LengthPlan, LoggingPlan, ModelJob, ModelMetric, ObjectivePlan, PipelineRequest, PlacementPlan,
    TrainingJob,
};
use crate::key_path::join;
use crate::keys::DeepSpeed;
use crate::keys::job::{Data, JobFile, Model, ParamGroup as Group, Splits, Training};
use crate::node::Node;
use crate::place::{Place, find};
use crate::plan::{GroupRate, GroupUpdate, ParamGroup, PathPattern};
use crate::remedy::free_section;
use crate::request::unused;
use crate::section::{ConfigEntry, Section, Setting, filled};
use crate::splits::SplitPlan;
use crate::step_count::StepCount;

/// The default of `data.sequence_length` for conversations: `max_length` of TRL.
const CHAT_LENGTH: usize = 1024;

/// Reads the sections of a job file, and reports what is wrong with them.
pub(crate) struct JobReader<'a> {
    /// The folder of the job file, in which paths are searched for after the current folder.
    pub(crate) folder: &'a Path,
    /// The DeepSpeed configuration of the job, which provides the defaults of some keys.
    pub(crate) deepspeed: &'a DeepSpeed<'a>,
    /// The numbers of ranks of an Accelerate file and of a launcher.
    pub(crate) ranks: [Option<usize>; 2],
    /// The findings so far.
    pub(crate) findings: Findings,
    /// Whether a key of `data` has an invalid value, which is read as its default.
    pub(crate) is_misread: bool,
}

impl JobReader<'_> {
    /// Returns the file, folder or repository that a key names. Reports a value that is none of
    /// these.
    fn place(&mut self, key: &Setting<'_, Option<&str>>, remedy: &str) -> Option<Place> {
        let given = key.value?;
        let place = Place::find(given, &self.folders());
        refuse!(if place.is_none(); self.findings, &*key.path =>
            "\"{given}\": no such file or folder, relative to the current folder or to the folder of the job file, \
             and it is not a repository on the Hub (owner/name)"; "{remedy}");
        place
    }

    /// Returns the current folder, then the job file's folder.
    fn folders(&self) -> [PathBuf; 2] {
        [PathBuf::new(), self.folder.to_path_buf()]
    }

    /// Returns the file or folder `given` as the value of a key. Reports a path that does not
    /// exist.
    pub(crate) fn existing(&mut self, given: &str, key: &ConfigEntry<'_>) -> Option<PathBuf> {
        let found = find(Path::new(given), &self.folders(), "file or folder");
        let found = found.ok().filter(|_| !given.is_empty());
        refuse!(if found.is_none(); self.findings, &*key.path =>
            "\"{given}\": no such file or folder, relative to the current folder or to the folder of the job file";
            "give an existing file or folder");
        found
    }

    /// Reads the section `model`.
    pub(crate) fn model(&mut self, model: &Model<'_>) -> ModelJob {
        let remedy = "give the folder of a checkpoint, or a repository: openai-community/gpt2";
        let pretrained = self.place(&model.pretrained, remedy);
        let local = pretrained.as_ref().and_then(Place::local);
        if let Some(path) = local.filter(|path| !path.is_dir()) {
            let remedy = match path.extension().is_some_and(|it| it.eq_ignore_ascii_case("gguf")) {
                true => {
                    "a GGUF file can generate but not train; give the folder or the repository of the model that it \
                         was made from"
                }
                false => "give the folder that holds model.safetensors",
            };
            refuse!(self.findings, &model.pretrained => "\"{}\" is a file; must be a folder", path.display();
                "{remedy}");
        }
        let config = self.fields(&model.config, "config fields", "{ \"n_layer\": 12 }");
        let given = model.architecture.value;
        let former = model.architecture.given().and_then(Node::as_text);
        let is_former =
            former.is_some_and(|name| name.eq_ignore_ascii_case(Architecture::FORMER_ENCODER));
        note!(if is_former; self.findings, &model.architecture =>
            "\"{}\" is the former name of \"{}\"", Architecture::FORMER_ENCODER, Architecture::Encoder.name());
        refuse!(if given.is_some_and(|it| !it.takes_pretrained()) && pretrained.is_some();
            self.findings, "model.pretrained" =>
            "{} does not support pretrained weights in this version", given.map_or("", Architecture::name);
            "remove it");
        // The architecture of a checkpoint is only known once it has been read.
        let architecture = given.or((!model.pretrained.is_given()).then_some(Architecture::Gpt2));
        let example = "{ \"r\": 16, \"target_modules\": \"all-linear\" }";
        let lora = self.fields(&model.lora, "PEFT's fields", example);
        let folder = model.adapter.value.and_then(|given| self.existing(given, &model.adapter));
        refuse!(if folder.as_ref().is_some_and(|path| !path.is_dir()); self.findings, &*model.adapter =>
            "is a file; must be a folder"; "give the folder that holds adapter_config.json");
        refuse!(if lora.is_some() && model.adapter.is_given(); self.findings, &*model.adapter =>
            "is given together with model.lora, and an adapter has the settings of its own adapter_config.json";
            "remove one of them");
        let quantization = quantization::read(&model.quantization_config.value, &mut self.findings);
        let config = config.unwrap_or_default();
        ModelJob { architecture, pretrained, config, lora, adapter: folder, quantization }
    }

    /// Reads a section without a key table, whose fields are checked with the model. `noun` says
    /// what they are, and `example` is such a section.
    fn fields(
        &mut self,
        key: &ConfigEntry<'_>,
        noun: &str,
        example: &str,
    ) -> Option<Map<String, Json>> {
        let node = key.given()?;
        if let Json::Object(fields) = node.to_json() {
            return Some(fields);
        }
        refuse!(self.findings, key => "{node} is {}; must be a section of {noun}", node.noun();
            "{}", free_section(node, example));
        None
    }

    /// Returns whether the job names no pretrained model. A name that leads nowhere is an error of
    /// its own, without which other keys would have an effect.
    pub(crate) fn lacks_pretrained(&self, model: &ModelJob) -> bool {
        model.pretrained.is_none() && !self.findings.have_error_in("model.pretrained")
    }

    /// Returns whether the job has no adapter, not even an invalid one.
    pub(crate) fn lacks_adapter(&self, model: &ModelJob) -> bool {
        let is_invalid = |key| self.findings.have_error_in(key);
        !model.has_adapter() && !["model.lora", "model.adapter"].into_iter().any(is_invalid)
    }

    /// Checks that the model of a job with an adapter is a pretrained language model.
    fn check_adapter(&mut self, model: &ModelJob, data: &DataJob) {
        let key = match model {
            ModelJob { adapter: Some(_), .. } => "model.adapter",
            ModelJob { lora: Some(_), .. } => "model.lora",
            _ => return,
        };
        refuse!(if self.lacks_pretrained(model); self.findings, key =>
            "adapts a pretrained model, and this job has none"; "give model.pretrained");
        refuse!(if matches!(data.kind, DataKind::Classification { .. }); self.findings, key =>
            "is supported for language models only"; "remove it, or train on text");
        refuse!(if data.new_vocabulary; self.findings, key =>
            "is not supported with data.new_vocabulary: the adapter would belong to another vocabulary than its base model";
            "remove one of them");
    }

    /// Reads the section `data`.
    pub(crate) fn data(&mut self, data: &Data<'_>) -> DataJob {
        let remedy = "correct the path, or give the name of a data set: stanfordnlp/imdb";
        let path = self.place(&data.path, remedy);
        // If the path is invalid, one message is enough.
        let is_wrong = path.is_none() && data.path.is_given();
        let is_set = path.as_ref().is_some_and(|path| !path.is_file());
        refuse!(if data.name.is_given() && !is_set && !is_wrong;
            self.findings, "data.name" => "is a configuration of a data set, and data.path is not a data set";
            "give the data set's folder or repository as data.path, or remove data.name");
        let splits = match is_wrong {
            true => SplitPlan::everything(None),
            false => self.splits(&data.splits.value, path),
        };
        let kind = self.data_kind(data);
        self.check_kind(&kind, data, &splits);
        let remedy =
            "give the folder of a tokenizer, a tokenizer.json, or a repository that has one";
        let drop_last = &self.deepspeed.dataloader_drop_last;
        filled!(DataJob, data { token_cache, vocab_size, shuffle, new_vocabulary }
            // The table has the default of text. Without the key, samples have TRL's.
            sequence_length: match kind {
                _ if kind.samples().is_some() && !data.sequence_length.is_given() => CHAT_LENGTH,
                _ => data.sequence_length.value,
            },
            // The record of a run says that its text is the embedded one.
            kind: match kind {
                DataKind::Text { .. } if splits.is_embedded() => DataKind::Synthetic,
                kind => kind,
            },
            splits,
            name: data.name.value.map(str::to_owned),
            tokenizer: self.place(&data.tokenizer, remedy),
            eos_token: data.eos_token.value.map(str::to_owned),
            drop_last: data.drop_last.value.unwrap_or(drop_last.value),
        )
    }

    /// Returns the kind of the data, with its keys.
    fn data_kind(&mut self, data: &Data<'_>) -> DataKind {
        let text_field = data.text_field.value.to_owned();
        let label_field = data.label_field.value.to_owned();
        match data.kind.value {
            "tokens" => DataKind::Tokens,
            "synthetic" => DataKind::Synthetic,
            "classification" => DataKind::Classification { text_field, label_field },
            "chat" => DataKind::Chat(self.chat(data)),
            "preference" => DataKind::Preference(self.preference(data)),
            _ => DataKind::Text { text_field, join: data.join.value },
        }
    }

    /// Checks that the keys that a kind of data needs are given.
    fn check_kind(&mut self, kind: &DataKind, data: &Data<'_>, splits: &SplitPlan) {
        let has_path = data.path.is_given();
        let is_tokens = *kind == DataKind::Tokens;
        let token_file = "give a .bin file of little-endian u16 tokens, or .u32.bin";
        // What was misread has already been reported, so nothing is known to be missing.
        let has_none = splits.is_embedded() && !has_path && !self.is_misread;
        if is_tokens && has_none {
            refuse!(self.findings, "data.path" =>
                "is missing, and kind \"tokens\" needs it"; "{token_file}");
        } else if kind.samples().is_some() && has_none {
            refuse!(self.findings, "data.path" =>
                "is missing, and kind \"{}\" needs it", kind.name();
                "give a file of JSON lines, a Parquet file, a folder of them, or a repository of the Hub");
        } else if !matches!(kind, DataKind::Synthetic | DataKind::Classification { .. })
            && splits.holds_out()
        {
            refuse!(self.findings, "data.splits.eval" =>
                "is a fraction of a split with its own path, which only kind \"classification\" supports: other data is \
                 divided by fractions of data.path";
                "give a file, or fractions of data.path for all splits");
        } else if is_tokens && splits.is_on_the_hub() {
            refuse!(self.findings, "data.path" =>
                "is a repository, and kind \"tokens\" reads a local file"; "{token_file}");
        } else if *kind == DataKind::Synthetic && (has_path || !splits.is_embedded()) {
            refuse!(self.findings, "data.path" =>
                "kind \"synthetic\" is embedded and reads no files"; "remove the path or write kind \"text\"");
        }
    }

    /// Checks that the model can be trained on the data.
    pub(crate) fn check_pair(&mut self, model: &ModelJob, data: &DataJob) {
        warning!(if data.new_vocabulary && self.lacks_pretrained(model); self.findings, "data.new_vocabulary" =>
            "has no effect without model.pretrained: a new model has no vocabulary yet"; "remove it");
        warning!(if data.eos_token.is_some() && data.kind == DataKind::Tokens && data.tokenizer.is_none()
                && !self.findings.have_error_in("data.tokenizer");
            self.findings, "data.eos_token" =>
            "has no effect: tokens need no tokenizer, and data.tokenizer is not given"; "remove it");
        self.check_adapter(model, data);
        let is_wrong = self.findings.have_error_in("data.tokenizer");
        let lacks_tokenizer = self.lacks_pretrained(model) && data.tokenizer.is_none() && !is_wrong;
        refuse!(if data.kind.samples().is_some() && lacks_tokenizer; self.findings, "data.tokenizer" =>
            "is missing: kind \"{}\" needs a tokenizer, and this job has no pretrained model that has one", data.kind.name();
            "give model.pretrained or data.tokenizer");
        if let DataKind::Classification { text_field, label_field } = &data.kind {
            refuse!(if text_field == label_field;
                self.findings, "data.label_field" => "{label_field:?} is the column of the texts too";
                "name the column of the labels");
        } else if model.architecture == Some(Architecture::Encoder) {
            refuse!(self.findings, "data.kind" =>
                "model.architecture \"encoder\" learns from texts with a class each"; "write \"classification\"");
        } else {
            self.check_labels_of_language_model(&model.config);
        }
    }

    /// Checks that a language model has no fields about labels, which it does not have.
    fn check_labels_of_language_model(&mut self, config: &Map<String, Json>) {
        let is_given = |name: &str| config.get(name).is_some_and(|value| !value.is_null());
        refuse!(if is_given("problem_type"); self.findings, "model.config.problem_type" =>
            "has no effect on a language model"; "set data.kind to \"classification\", or remove it");
        for name in ["num_labels", "id2label", "label2id"] {
            warning!(if is_given(name); self.findings, format!("model.config.{name}") =>
                "has no effect on a language model"; "remove it");
        }
    }

    /// Reads the section `training`.
    pub(crate) fn training(&mut self, training: &Training<'_>, has_adapter: bool) -> TrainingJob {
        let (epochs, max_steps) = (&training.epochs, &training.max_steps);
        note!(if !epochs.is_given() && !max_steps.is_given();
            self.findings, "training.epochs" => "is 1: neither epochs nor max_steps is given");
        let steps_per_print = self.deepspeed.steps_per_print.value;
        let logging_steps = training.logging_steps.value;
        let groups = training.param_groups.value.iter();
        let output_dir = training.output_dir.value;
        refuse!(if output_dir.trim().is_empty(); self.findings, "training.output_dir" =>
            "\"\" names no folder"; "give a folder, output for example");
        // Parts are read in the order in which their findings are shown.
        let placement = filled!(PlacementPlan, training { backend, float32_matmul_precision, collective_timeout }
            ranks: self.ranks(training.ranks.value),
            pipeline: PipelineRequest {
                stages: training.pipeline_stages.value,
                schedule: training.pipeline_schedule.value,
            },
            devices: self.devices(&training.devices, training.backend.value),
        );
        TrainingJob {
            length: LengthPlan {
                // Without both keys, training would not end.
                epochs: epochs.value.or(if max_steps.value.is_none() { Some(1.0) } else { None }),
                max_steps: max_steps.value,
            },
            seed: training.seed.value as u64,
            placement,
            output_dir: PathBuf::from(output_dir),
            batch_size_schedule: self.batch_size_schedule(training),
            evaluation: self.evaluation(training),
            saving: self.saving(training, has_adapter),
            logging: LoggingPlan {
                report_to: self.reporters(&training.report_to),
                logging_steps: logging_steps.or(steps_per_print.map(StepCount::Steps)),
            },
            deepspeed_defaults: self.deepspeed_defaults(training),
            objective: filled!(ObjectivePlan, training { label_smoothing_factor } dpo: None),
            no_decay: training.no_decay.value,
            param_groups: groups.map(|group| self.param_group(group)).collect(),
        }
    }

    /// Reads a parameter group. Rules that depend on the optimizer or the model are checked later.
    fn param_group(&mut self, section: &Group<'_>) -> ParamGroup {
        let Group { params, lr, lr_factor, weight_decay, betas, muon_matrices, frozen, .. } =
            section;
        let mut patterns = Vec::new();
        for pattern in &params.value {
            match PathPattern::new(pattern) {
                Ok(pattern) => patterns.push(pattern),
                Err(reason) => {
                    refuse!(self.findings, params => "{pattern:?} is not a regular expression: {reason}";
                        "escape literal characters: \"^h\\\\.0\\\\.\" for example");
                }
            }
        }
        let settings: [&ConfigEntry<'_>; 5] = [lr, lr_factor, weight_decay, betas, muon_matrices];
        let given = settings.into_iter().find(|setting| setting.is_given());
        if let Some(setting) = given.filter(|_| frozen.value) {
            refuse!(self.findings, setting => "has no effect in a frozen group"; "remove it, or remove frozen");
        } else if lr.is_given() && lr_factor.is_given() {
            refuse!(self.findings, lr => "is given together with lr_factor, and only one can set the group's learning rate";
                "remove one of them");
        }
        self.check_group(section);
        // Without either key, this is the factor 1.
        let rate = lr.value.map_or(GroupRate::Factor(lr_factor.value), GroupRate::Own);
        let trained =
            filled!(GroupUpdate::Trained, section { weight_decay, betas, muon_matrices } rate);
        let update = if frozen.value { GroupUpdate::Frozen } else { trained };
        let dims = section.dims.value.clone().unwrap_or_default();
        ParamGroup { params: patterns, dims, update }
    }

    /// Returns the number of ranks: the given number, or the number of processes that a launcher
    /// started. Both must be equal.
    fn ranks(&mut self, given: Option<usize>) -> usize {
        let [processes, launched] = self.ranks;
        // What the job says comes before Accelerate's file, and both before the launcher.
        let ranks = given.or(processes).or(launched).unwrap_or(1);
        let other = processes.unwrap_or(ranks);
        note!(if ranks != other; self.findings, "training.ranks" =>
            "is {ranks}: num_processes {other} of the Accelerate file has no effect");
        let launched = launched.unwrap_or(ranks);
        refuse!(if ranks != launched; self.findings, "training.ranks" =>
            "is {ranks}, but the launcher started {}, one for each rank", counted(launched, "process");
            "give --ranks {launched}, or start {}", counted(ranks, "process"));
        ranks
    }

    /// Checks that a job that selects the best model has evaluations during training.
    ///
    /// `has_eval` is true if an eval split is given, even if it is invalid.
    pub(crate) fn check_best(&mut self, job: &Job, strategy: Option<&str>, has_eval: bool) {
        let Job { training: TrainingJob { evaluation, .. }, data, model, .. } = job;
        let asks = match evaluation {
            EvaluationPlan { load_best_model_at_end: true, .. } => Some("load_best_model_at_end"),
            EvaluationPlan { early_stopping_patience: Some(_), .. } => {
                Some("early_stopping_patience")
            }
            _ => None,
        };
        // An invalid split has already been reported.
        let has_split = has_eval || data.splits.has_eval();
        let cadence = match strategy {
            Some("no") => "training.eval_strategy \"steps\" or \"epoch\"",
            _ => "training.eval_steps",
        };
        let both = format!("{cadence} and data.splits.eval");
        let missing = match (evaluation.eval_steps, has_split) {
            (Some(_), true) => None,
            (Some(_), false) => Some("data.splits.eval"),
            (None, true) => Some(cadence),
            (None, false) => Some(both.as_str()),
        };
        if let Some((key, missing)) = asks.zip(missing) {
            refuse!(self.findings, format!("training.{key}") =>
                "models are compared by evaluations while they train, and this job has none: it has no {missing}";
                "add {missing}, or remove it");
        }
        // The last step and the test are evaluated without `eval_steps` too.
        let splits = &data.splits;
        let measures = evaluation.eval_steps.is_some() || splits.has_eval() || splits.has_test();
        warning!(if evaluation.per_device_eval_batch_size.is_some() && !measures;
            self.findings, "training.per_device_eval_batch_size" =>
            "has no effect: this job evaluates nothing"; "add data.splits.eval or data.splits.test, or remove it");
        let classifies = matches!(data.kind, DataKind::Classification { .. });
        let metric = evaluation.metric_for_best_model;
        refuse!(if metric != ModelMetric::Loss && !classifies;
            self.findings, "training.metric_for_best_model" =>
            "is \"{}\", which only a classifier has", metric.name(); "write \"loss\"");
        // Without the field, the data determines the problem type when it is read.
        let problem_type = model.config.get("problem_type").and_then(Json::as_str);
        if let Some(problem_type) = problem_type.filter(|it| classifies && !metric.is_of(it)) {
            refuse!(self.findings, "training.metric_for_best_model" =>
                "is \"{}\", which problem_type \"{problem_type}\" does not have", metric.name();
                "write \"loss\"");
        }
    }

    /// Reads the changes of the batch size: two lists of the same length.
    fn batch_size_schedule(&mut self, training: &Training<'_>) -> Vec<(usize, usize)> {
        let section = &training.batch_size_schedule.value;
        let (from_step, sizes) = (&section.from_step, &section.train_batch_size);
        // An invalid list has already been reported.
        if [from_step, sizes].iter().any(|list| list.is_given() && list.value.is_none()) {
            return Vec::new();
        }
        let [steps, sizes] = [from_step, sizes].map(|list| list.value.clone().unwrap_or_default());
        refuse!(if steps.len() != sizes.len();
            self.findings, from_step => "has {} for {}", counted(steps.len(), "step"), counted(sizes.len(), "batch size");
            "give one step, from 1, for each size");
        if let Some(pair) = steps.windows(2).find(|pair| pair[1] <= pair[0]) {
            refuse!(self.findings, from_step => "{} does not come after {}", pair[1], pair[0];
                "give the changes in the order of their steps");
        }
        steps.into_iter().zip(sizes).collect()
    }
}
