//! The sections of a job file, read and checked: what must exist exists, what excludes each other
//! is reported.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value as Json};

use crate::devices::read_devices;
use crate::diagnosis::Findings;
use crate::job_plan::{Architecture, DataJob, DataKind, ModelJob, ModelMetric, TrainingJob};
use crate::keys::DeepSpeed;
use crate::keys::job::{Data, Model, ParamGroup as ParamGroupKeys, Training};
use crate::lookup::find;
use crate::place::Place;
use crate::plan::{GroupRate, GroupUpdate, ParamGroup, ParamGroups, PathPattern};
use crate::section::{Entry, Setting};
use crate::splits::SplitPlan;

/// Where the paths in a job file are looked for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Places<'a> {
    /// The job file's folder.
    pub(crate) folder: &'a Path,
}

impl Places<'_> {
    /// The file, folder or repository that a key names. Reports a text that names none.
    fn find(
        self,
        key: &Setting<'_, Option<&str>>,
        remedy: &str,
        findings: &mut Findings,
    ) -> Option<Place> {
        let given = key.value?;
        let place = Place::find(given, &self.folders());
        if place.is_none() {
            let message = format!(
                "\"{given}\": no such file or folder, from the current folder or beside the job file, and it \
                 is not a repository on the Hub (owner/name)"
            );
            findings.error(&*key.path, message, remedy);
        }
        place
    }

    /// Returns the current folder, then the job file's folder.
    fn folders(self) -> [PathBuf; 2] {
        [PathBuf::new(), self.folder.to_path_buf()]
    }

    /// The file or folder `given` for a key. Reports one that does not exist.
    fn existing(self, given: &str, key: &Entry<'_>, findings: &mut Findings) -> Option<PathBuf> {
        let found = match given {
            "" => None,
            path => find(Path::new(path), &self.folders(), "file or folder").ok(),
        };
        if found.is_none() {
            let message = format!(
                "\"{given}\": no such file or folder, from the current folder or beside the job file"
            );
            findings.error(&*key.path, message, "give an existing file or folder");
        }
        found
    }
}

/// What is trained.
pub(crate) fn read_model(
    model: &Model<'_>,
    places: Places<'_>,
    findings: &mut Findings,
) -> ModelJob {
    let remedy = "give the folder of a checkpoint, or a repository: openai-community/gpt2";
    let pretrained = places.find(&model.pretrained, remedy, findings);
    let local = pretrained.as_ref().and_then(Place::local);
    if let Some(path) = local.filter(|path| !path.is_dir()) {
        let message = format!("\"{}\" is a file; must be a folder", path.display());
        let remedy = "give the folder that holds model.safetensors";
        findings.error(&model.pretrained, message, remedy);
    }
    let config = match model.config.given().map(|node| (node, node.to_json())) {
        None => Map::new(),
        Some((_, Json::Object(map))) => map,
        Some((node, _)) => {
            let message = format!("{node} is {}; must be a section of config fields", node.noun());
            findings.error(&model.config, message, "write { \"n_layer\": 12 } for example");
            Map::new()
        }
    };
    let architecture = model.architecture.value;
    if architecture == Architecture::ImdbEncoder && pretrained.is_some() {
        let message = "imdb_encoder starts from weights of its own in this version";
        findings.error("model.pretrained", message, "remove it");
    }
    ModelJob { architecture, pretrained, config }
}

/// What it is trained on; `deepspeed` has the default of `drop_last`.
pub(crate) fn read_data(
    data: &Data<'_>,
    deepspeed: &DeepSpeed<'_>,
    places: Places<'_>,
    findings: &mut Findings,
) -> DataJob {
    let remedy = "correct the path, or give the name of a data set: stanfordnlp/imdb";
    let path = places.find(&data.path, remedy, findings);
    let is_file = path.as_ref().and_then(Place::local).is_some_and(|path| !path.is_dir());
    // One message is enough where the path is wrong.
    let is_wrong = path.is_none() && data.path.value.is_some();
    if data.name.is_given() && (is_file || path.is_none()) && !is_wrong {
        let message = "is a configuration of a data set, and data.path is not a data set";
        let remedy = "give the data set's folder or repository as data.path, or remove data.name";
        findings.error("data.name", message, remedy);
    }
    let existing = |given: &str, key: &Entry<'_>, findings: &mut Findings| {
        places.existing(given, key, findings)
    };
    let splits = match is_wrong {
        true => SplitPlan::everything(None),
        false => SplitPlan::read(&data.splits.value, path, existing, findings),
    };
    let kind = data_kind(data);
    check_kind(&kind, data, &splits, findings);
    let remedy = "give the folder of a tokenizer, a tokenizer.json, or a repository that has one";
    let drop_last = &deepspeed.dataloader_drop_last;
    DataJob {
        kind: match kind {
            DataKind::Text { .. } if splits.is_embedded() => DataKind::Synthetic,
            kind => kind,
        },
        splits,
        name: data.name.value.map(str::to_owned),
        token_cache: data.token_cache.value,
        tokenizer: places.find(&data.tokenizer, remedy, findings),
        vocab_size: data.vocab_size.value,
        sequence_length: data.sequence_length.value,
        shuffle: data.shuffle.value,
        drop_last: data.drop_last.value.unwrap_or(drop_last.value),
    }
}

/// The kind of the data, with the keys that belong to it.
fn data_kind(data: &Data<'_>) -> DataKind {
    let text_field = data.text_field.value.to_owned();
    match data.kind.value {
        "tokens" => DataKind::Tokens,
        "synthetic" => DataKind::Synthetic,
        "classification" => {
            let label_field = data.label_field.value.to_owned();
            DataKind::Classification { text_field, label_field }
        }
        _ => DataKind::Text { text_field, join: data.join.value },
    }
}

/// What a kind needs, and what it cannot use.
fn check_kind(kind: &DataKind, data: &Data<'_>, splits: &SplitPlan, findings: &mut Findings) {
    let has_path = data.path.is_given();
    let token_file = "give a .bin file of little-endian u16 tokens, or .u32.bin";
    match kind {
        DataKind::Tokens if splits.is_embedded() && !has_path => {
            let message = "is missing, and kind \"tokens\" needs it";
            findings.error("data.path", message, token_file);
        }
        DataKind::Text { .. } | DataKind::Tokens if splits.holds_out() => {
            let message = "is a share of a split with a path of its own, which only kind \"classification\" can take: \
                           text continues from sample to sample";
            let remedy = "give a file, or shares of data.path for all splits";
            findings.error("data.splits.eval", message, remedy);
        }
        DataKind::Tokens if splits.is_on_the_hub() => {
            let message = "is a repository, and kind \"tokens\" reads a local file";
            findings.error("data.path", message, token_file);
        }
        DataKind::Synthetic if has_path || !splits.is_embedded() => {
            let message = "kind \"synthetic\" is embedded and reads no files";
            findings.error("data.path", message, "remove the path or write kind \"text\"");
        }
        _ => {}
    }
    let classifies = matches!(kind, DataKind::Classification { .. });
    let is_text = matches!(kind, DataKind::Text { .. }) && !splits.is_embedded();
    for (key, is_read, reader) in [
        (&*data.label_field, classifies, "only classification reads it"),
        (
            &data.text_field,
            classifies || is_text,
            "only classification and text from files read it",
        ),
        (&data.join, is_text, "only text from files is joined"),
    ] {
        if key.is_given() && !is_read {
            findings.warning(&*key.path, format!("is ignored: {reader}"), "remove it");
        }
    }
    if *kind == DataKind::Tokens && data.vocab_size.is_given() {
        findings.warning("data.vocab_size", "is ignored: tokens need no tokenizer", "remove it");
    }
}

/// A model and the data it can learn from.
pub(crate) fn check_pair(model: &ModelJob, data: &DataJob, findings: &mut Findings) {
    let classifies = matches!(data.kind, DataKind::Classification { .. });
    if model.architecture == Architecture::ImdbEncoder && !classifies {
        let message = "model.architecture \"imdb_encoder\" learns from texts with a class each";
        findings.error("data.kind", message, "write \"classification\"");
    }
    if let DataKind::Classification { text_field, label_field } = &data.kind
        && text_field == label_field
    {
        let message = format!("{label_field:?} is the column of the texts too");
        findings.error("data.label_field", message, "name the column of the labels");
    }
}

/// Reads how long training runs and on how many ranks. `deepspeed` has the default of the log. `ranks`
/// come from an Accelerate file and from a launcher.
pub(crate) fn read_training(
    training: &Training<'_>,
    deepspeed: &DeepSpeed<'_>,
    ranks: [Option<usize>; 2],
    findings: &mut Findings,
) -> TrainingJob {
    let (epochs, max_steps) = (&training.epochs, &training.max_steps);
    if !epochs.is_given() && !max_steps.is_given() {
        findings.note("training.epochs", "is 1: neither epochs nor max_steps is given");
    }
    let output_dir = training.output_dir.value;
    if output_dir.trim().is_empty() {
        let remedy = "give a folder, output for example";
        findings.error("training.output_dir", "\"\" names no folder", remedy);
    }
    let backend = training.backend.value;
    let steps_per_print = deepspeed.steps_per_print.value;
    TrainingJob {
        epochs: epochs.value.or(if max_steps.value.is_none() { Some(1) } else { None }),
        max_steps: max_steps.value,
        seed: training.seed.value as u64,
        ranks: read_ranks(training.ranks.value, ranks, findings),
        backend,
        devices: read_devices(&training.devices, backend, findings),
        collective_timeout: training.collective_timeout.value,
        output_dir: PathBuf::from(output_dir),
        eval_steps: training.eval_steps.value,
        eval_max_samples: training.eval_max_samples.value,
        load_best_model_at_end: training.load_best_model_at_end.value,
        metric_for_best_model: training.metric_for_best_model.value,
        early_stopping_patience: training.early_stopping_patience.value,
        early_stopping_threshold: training.early_stopping_threshold.value,
        save_steps: training.save_steps.value,
        async_save: training.async_save.value,
        save_total_limit: training.save_total_limit.value,
        save_best_limit: training.save_best_limit.value,
        batch_size_schedule: batch_size_schedule(training, findings),
        logging_steps: training.logging_steps.value.or(steps_per_print),
        learning_rate: training.learning_rate.value,
        micro_batch_size: training.micro_batch_size.value,
        gradient_checkpointing: training.gradient_checkpointing.value,
        warmup_steps: training.warmup_steps.value,
        param_groups: ParamGroups {
            groups: param_groups(training, findings),
            no_decay: training.no_decay.value,
        },
    }
}

/// Parameters with settings of their own. What needs the optimizer or the model is checked with
/// these.
fn param_groups(training: &Training<'_>, findings: &mut Findings) -> Vec<ParamGroup> {
    training.param_groups.value.iter().map(|section| param_group(section, findings)).collect()
}

/// One group: what it selects and how its parameters are updated.
fn param_group(section: &ParamGroupKeys<'_>, findings: &mut Findings) -> ParamGroup {
    let ParamGroupKeys { params, dims, lr, lr_factor, weight_decay, betas, muon_matrices, frozen } =
        section;
    let mut patterns = Vec::new();
    for pattern in &params.value {
        match PathPattern::new(pattern) {
            Ok(pattern) => patterns.push(pattern),
            Err(reason) => {
                let message = format!("{pattern:?} is not a regular expression: {reason}");
                let remedy = "escape literal characters: \"^h\\\\.0\\\\.\" for example";
                findings.error(params, message, remedy);
            }
        }
    }
    let settings: [&Entry<'_>; 5] = [lr, lr_factor, weight_decay, betas, muon_matrices];
    let given = settings.into_iter().find(|setting| setting.is_given());
    let update = match (frozen.value, given) {
        (true, given) => {
            if let Some(setting) = given {
                let message = "is of no use to a group that is frozen";
                findings.error(setting, message, "remove it, or frozen");
            }
            GroupUpdate::Frozen
        }
        (false, _) => GroupUpdate::Trained {
            rate: group_rate(lr, lr_factor, findings),
            weight_decay: weight_decay.value,
            betas: betas.value,
            muon_matrices: muon_matrices.value,
        },
    };
    ParamGroup { params: patterns, dims: dims.value.clone().unwrap_or_default(), update }
}

/// The learning rate of a group: its own, or a factor of the schedule's.
fn group_rate(
    lr: &Setting<'_, Option<f64>>,
    factor: &Setting<'_, f64>,
    findings: &mut Findings,
) -> GroupRate {
    if lr.is_given() && factor.is_given() {
        let message = "stands beside lr_factor, and both say how fast the group learns";
        findings.error(lr, message, "keep one of them");
    }
    match lr.value {
        Some(lr) => GroupRate::Own(lr),
        None => GroupRate::Factor(factor.value),
    }
}

/// Ranks: as given, or as many as a launcher started; both must agree.
fn read_ranks(
    given: Option<usize>,
    [processes, launched]: [Option<usize>; 2],
    findings: &mut Findings,
) -> usize {
    let given = given.or(processes);
    if let (Some(ranks), Some(launched)) = (given, launched)
        && ranks != launched
    {
        let message =
            format!("is {ranks}, but the launcher started {launched} processes, one for each rank");
        let remedy = format!("give --ranks {launched}, or start {ranks} processes");
        findings.error("training.ranks", message, remedy);
    }
    given.or(launched).unwrap_or(1)
}

/// What is kept can be said only of what is saved, and the best of what is evaluated.
pub(crate) fn check_saving(training: &TrainingJob, findings: &mut Findings) {
    let saves = training.save_steps.is_some() || training.load_best_model_at_end;
    let best = training.save_best_limit.is_some();
    let evaluated = training.save_steps.zip(training.eval_steps);
    let is_judged = evaluated.is_some_and(|(save, eval)| save.is_multiple_of(eval));
    let none_saved = ("no checkpoints are saved", "add training.save_steps, or remove it");
    let all_kept = ("all checkpoints are kept", "add training.save_total_limit, or remove it");
    let not_judged = (
        "checkpoints are judged by an evaluation in the step that they are saved in",
        "add training.eval_steps, and training.save_steps as a multiple of it",
    );
    let limits = training.save_total_limit.is_some();
    for (is_wrong, key, (message, remedy)) in [
        (limits && !saves, "training.save_total_limit", none_saved),
        (training.async_save && !saves, "training.async_save", none_saved),
        (best && !limits, "training.save_best_limit", all_kept),
        (best && !is_judged, "training.save_best_limit", not_judged),
    ] {
        if is_wrong {
            findings.error(key, message, remedy);
        }
    }
}

/// The best model is known where models are evaluated while they train.
pub(crate) fn check_best(training: &TrainingJob, data: &DataJob, findings: &mut Findings) {
    let asks = match training {
        TrainingJob { load_best_model_at_end: true, .. } => Some("load_best_model_at_end"),
        TrainingJob { early_stopping_patience: Some(_), .. } => Some("early_stopping_patience"),
        _ => None,
    };
    let evaluates = training.eval_steps.is_some() && data.splits.has_eval();
    if let Some(key) = asks.filter(|_| !evaluates) {
        let message = "models are compared by evaluations while they train, and this job has none";
        let remedy = "add training.eval_steps and data.splits.eval, or remove it";
        findings.error(format!("training.{key}"), message, remedy);
    }
    let classifies = matches!(data.kind, DataKind::Classification { .. });
    if training.metric_for_best_model == ModelMetric::Accuracy && !classifies {
        let message = "is \"accuracy\", which only a classifier has";
        findings.error("training.metric_for_best_model", message, "write \"loss\"");
    }
    if training.early_stopping_threshold > 0.0 && training.early_stopping_patience.is_none() {
        let message = "has no effect without training.early_stopping_patience";
        let remedy = "add training.early_stopping_patience, or remove it";
        findings.warning("training.early_stopping_threshold", message, remedy);
    }
}

/// The changes of the batch size: two lists of one length.
fn batch_size_schedule(training: &Training<'_>, findings: &mut Findings) -> Vec<(usize, usize)> {
    let section = &training.batch_size_schedule.value;
    let (from_step, sizes) = (&section.from_step, &section.train_batch_size);
    // A list that is wrong has been reported.
    if [from_step, sizes].iter().any(|list| list.is_given() && list.value.is_none()) {
        return Vec::new();
    }
    let steps = from_step.value.clone().unwrap_or_default();
    let sizes = sizes.value.clone().unwrap_or_default();
    if steps.len() != sizes.len() {
        let message = format!("has {} steps for {} batch sizes", steps.len(), sizes.len());
        findings.error(from_step, message, "give one step, from 1, for each size");
    }
    if let Some(pair) = steps.windows(2).find(|pair| pair[1] <= pair[0]) {
        let message = format!("{} does not come after {}", pair[1], pair[0]);
        findings.error(from_step, message, "give the changes in the order of their steps");
    }
    steps.into_iter().zip(sizes).collect()
}
