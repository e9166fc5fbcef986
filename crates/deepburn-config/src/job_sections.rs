//! The sections of a job file, read and checked: what must exist exists, what excludes each other is
//! reported.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value as Json};

use crate::devices::read_devices;
use crate::diagnosis::Findings;
use crate::job::{
    Architecture, Backend, DataJob, DataKind, Join, ModelJob, ModelMetric, TrainingJob,
};
use crate::keys::DEEPSPEED;
use crate::lookup::find;
use crate::place::Place;
use crate::plan::{GroupRate, GroupUpdate, NoDecay, ParamGroup, ParamGroups, PathPattern};
use crate::section::Section;
use crate::splits::SplitPlan;
use crate::written::Written;

/// Where the paths in a job file are looked for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Places<'a> {
    /// The job file's folder.
    pub(crate) folder: &'a Path,
}

impl Places<'_> {
    /// The file, folder or repository that a key names. Reports it where it can be none.
    fn find(
        self,
        section: &Section<'_>,
        key: &str,
        remedy: &str,
        findings: &mut Findings,
    ) -> Option<Place> {
        let given = section.text(key)?;
        let place = Place::find(given, &self.folders());
        if place.is_none() {
            let message = format!(
                "\"{given}\": there is no such file or folder, from the current folder or \
                    beside the job file, and it is no repository on the Hub (owner/name)"
            );
            findings.error(section.path_of(key), message, remedy);
        }
        place
    }

    fn folders(self) -> [PathBuf; 2] {
        [PathBuf::new(), self.folder.to_path_buf()]
    }

    fn existing(
        self,
        given: &str,
        key: String,
        remedy: &str,
        findings: &mut Findings,
    ) -> Option<PathBuf> {
        let found = if given.is_empty() {
            None
        } else {
            find(Path::new(given), &self.folders(), "file or folder").ok()
        };
        if found.is_none() {
            let message = format!(
                "\"{given}\": there is no such file or folder, from the current folder or \
                    beside the job file"
            );
            findings.error(key, message, remedy);
        }
        found
    }
}

/// What is trained.
pub(crate) fn read_model(
    model: &Section<'_>,
    places: Places<'_>,
    findings: &mut Findings,
) -> ModelJob {
    let remedy = "give the folder of a checkpoint, or a repository: openai-community/gpt2";
    let pretrained = places.find(model, "pretrained", remedy, findings);
    let local = pretrained.as_ref().and_then(Place::local);
    if let Some(path) = local.filter(|path| !path.is_dir()) {
        let message = format!("\"{}\" is a file, must be a folder", path.display());
        findings.push(model.error(
            "pretrained",
            message,
            "give the folder that holds model.safetensors",
        ));
    }
    let config = match model.given("config").map(|node| (node, node.to_json())) {
        None => Map::new(),
        Some((_, Json::Object(map))) => map,
        Some((node, _)) => {
            let message = format!("{node} is {}, must be a section of config fields", node.noun());
            findings.push(model.error("config", message, "write { \"n_layer\": 12 } for example"));
            Map::new()
        }
    };
    let architecture = match model.choice("architecture") {
        "imdb_encoder" => Architecture::ImdbEncoder,
        _ => Architecture::Gpt2,
    };
    if architecture == Architecture::ImdbEncoder && pretrained.is_some() {
        findings.error(
            "model.pretrained",
            "imdb_encoder starts from weights of its own in this version",
            "remove it",
        );
    }
    ModelJob { architecture, pretrained, config }
}

/// What it is trained on; `written` has the default of `drop_last`.
pub(crate) fn read_data(
    data: &Section<'_>,
    written: &Written,
    places: Places<'_>,
    findings: &mut Findings,
) -> DataJob {
    let kind = match data.choice("kind") {
        "tokens" => DataKind::Tokens,
        "synthetic" => DataKind::Synthetic,
        "classification" => {
            let field = |key, default| data.text(key).unwrap_or(default).to_owned();
            DataKind::Classification {
                text_field: field("text_field", "text"),
                label_field: field("label_field", "label"),
            }
        }
        _ => DataKind::Text {
            text_field: data.text("text_field").unwrap_or("text").to_owned(),
            join: match data.choice("join") {
                "blank_line" => Join::BlankLine,
                "nothing" => Join::Nothing,
                _ => Join::EndOfText,
            },
        },
    };
    let give = "give an existing file or folder";
    let path = places.find(
        data,
        "path",
        "correct the path, or give the name of a data set: stanfordnlp/imdb",
        findings,
    );
    let is_file = path.as_ref().and_then(Place::local).is_some_and(|path| !path.is_dir());
    // One message is enough where the path is wrong.
    let is_wrong = path.is_none() && data.text("path").is_some();
    if data.given("name").is_some() && (is_file || path.is_none()) && !is_wrong {
        findings.error(
            "data.name",
            "is a configuration of a data set, and data.path is none",
            "give the data set's folder or repository as data.path, or remove data.name",
        );
    }
    let deepspeed = Section::new(DEEPSPEED, Some(written.node()), "");
    let splits = data.section("splits");
    let existing =
        |given: &str, key, findings: &mut Findings| places.existing(given, key, give, findings);
    let splits = match is_wrong {
        true => SplitPlan::everything(None),
        false => SplitPlan::read(&splits, path, existing, findings),
    };
    check_kind(&kind, data, &splits, findings);
    DataJob {
        kind: match kind {
            DataKind::Text { .. } if splits.is_embedded() => DataKind::Synthetic,
            kind => kind,
        },
        splits,
        name: data.text("name").map(str::to_owned),
        token_cache: data.flag("token_cache"),
        tokenizer: places.find(
            data,
            "tokenizer",
            "give the folder of a tokenizer, a tokenizer.json, or a repository that has one",
            findings,
        ),
        vocab_size: data.count("vocab_size"),
        sequence_length: data.count("sequence_length"),
        shuffle: data.flag("shuffle"),
        drop_last: data
            .optional_flag("drop_last")
            .unwrap_or_else(|| deepspeed.flag("dataloader_drop_last")),
    }
}

/// What a kind needs, and what it cannot use.
fn check_kind(kind: &DataKind, data: &Section<'_>, splits: &SplitPlan, findings: &mut Findings) {
    let has_path = data.given("path").is_some();
    match kind {
        DataKind::Tokens if splits.is_embedded() && !has_path => {
            findings.error(
                "data.path",
                "is missing, and kind \"tokens\" needs it",
                "give a .bin file of little-endian u16 tokens, or .u32.bin",
            );
        }
        DataKind::Text { .. } | DataKind::Tokens if splits.holds_out() => {
            findings.error(
                "data.splits.eval",
                "is a share of a split with a path of its own, which only kind \"classification\" \
                    can take: text goes on from sample to sample",
                "give a file, or shares of data.path for all splits",
            );
        }
        DataKind::Tokens if splits.is_on_the_hub() => {
            findings.error(
                "data.path",
                "is a repository, and kind \"tokens\" reads a local file",
                "give a .bin file of little-endian u16 tokens, or .u32.bin",
            );
        }
        DataKind::Synthetic if has_path || !splits.is_embedded() => {
            findings.error(
                "data.path",
                "kind \"synthetic\" is embedded and reads no files",
                "remove the path or write kind \"text\"",
            );
        }
        _ => {}
    }
    let classifies = matches!(kind, DataKind::Classification { .. });
    let is_text = matches!(kind, DataKind::Text { .. }) && !splits.is_embedded();
    for (key, is_read, reader) in [
        ("label_field", classifies, "only classification reads it"),
        ("text_field", classifies || is_text, "only classification and text from files read it"),
        ("join", is_text, "only text from files is joined"),
    ] {
        if data.given(key).is_some() && !is_read {
            let message = format!("is ignored: {reader}");
            findings.warning(format!("data.{key}"), message, "remove it");
        }
    }
    if *kind == DataKind::Tokens && data.given("vocab_size").is_some() {
        findings.warning("data.vocab_size", "is ignored: tokens need no tokenizer", "remove it");
    }
}

/// A model and the data it can learn from.
pub(crate) fn check_pair(model: &ModelJob, data: &DataJob, findings: &mut Findings) {
    let classifies = matches!(data.kind, DataKind::Classification { .. });
    match model.architecture {
        Architecture::ImdbEncoder if !classifies => findings.error(
            "data.kind",
            "model.architecture \"imdb_encoder\" learns from texts with a class each",
            "write \"classification\"",
        ),
        _ => {}
    }
    if let DataKind::Classification { text_field, label_field } = &data.kind
        && text_field == label_field
    {
        findings.error(
            "data.label_field",
            format!("{label_field:?} is the column of the texts too"),
            "name the column of the labels",
        );
    }
}

/// For how long, on how many ranks; `written` has defaults of ranks and log.
pub(crate) fn read_training(
    training: &Section<'_>,
    written: &Written,
    launched: Option<usize>,
    findings: &mut Findings,
) -> TrainingJob {
    let (epochs, max_steps) =
        (training.optional_count("epochs"), training.optional_count("max_steps"));
    let is_given = |name| training.given(name).is_some();
    if !is_given("epochs") && !is_given("max_steps") {
        findings.note("training.epochs", "is 1: neither epochs nor max_steps is given");
    }
    if training.text("output_dir").is_some_and(|folder| folder.trim().is_empty()) {
        findings.error(
            "training.output_dir",
            "\"\" names no folder",
            "give a folder, output for example",
        );
    }
    let deepspeed = Section::new(DEEPSPEED, Some(written.node()), "");
    let backend = match training.choice("backend") {
        "wgpu" => Backend::Wgpu,
        "cuda" => Backend::Cuda,
        "tch" => Backend::Tch,
        _ => Backend::Flex,
    };
    TrainingJob {
        epochs: epochs.or(if max_steps.is_none() { Some(1) } else { None }),
        max_steps,
        seed: training.count("seed") as u64,
        ranks: read_ranks(training, written, launched, findings),
        backend,
        devices: read_devices(training, backend, findings),
        collective_timeout: training.count("collective_timeout"),
        output_dir: PathBuf::from(training.text("output_dir").unwrap_or("output")),
        eval_steps: training.optional_count("eval_steps"),
        eval_max_samples: training.optional_count("eval_max_samples"),
        load_best_model_at_end: training.flag("load_best_model_at_end"),
        metric_for_best_model: match training.choice("metric_for_best_model") {
            "accuracy" | "eval_accuracy" => ModelMetric::Accuracy,
            _ => ModelMetric::Loss,
        },
        early_stopping_patience: training.optional_count("early_stopping_patience"),
        early_stopping_threshold: training.real("early_stopping_threshold"),
        save_steps: training.optional_count("save_steps"),
        async_save: training.flag("async_save"),
        save_total_limit: training.optional_count("save_total_limit"),
        save_best_limit: training.optional_count("save_best_limit"),
        batch_size_schedule: batch_size_schedule(training, findings),
        logging_steps: training
            .optional_count("logging_steps")
            .or(deepspeed.optional_count("steps_per_print")),
        learning_rate: training.optional_real("learning_rate"),
        micro_batch_size: training.optional_count("micro_batch_size"),
        gradient_checkpointing: training.optional_flag("gradient_checkpointing"),
        warmup_steps: training.optional_count("warmup_steps"),
        param_groups: ParamGroups {
            groups: param_groups(training, findings),
            no_decay: match training.choice("no_decay") {
                "nothing" => NoDecay::Nothing,
                _ => NoDecay::BiasesAndNorms,
            },
        },
    }
}

/// Parameters with settings of their own. What needs the optimizer or the model is checked with these.
fn param_groups(training: &Section<'_>, findings: &mut Findings) -> Vec<ParamGroup> {
    let sections = training.sections("param_groups");
    sections.iter().map(|section| param_group(section, findings)).collect()
}

fn param_group(section: &Section<'_>, findings: &mut Findings) -> ParamGroup {
    let mut params = Vec::new();
    for pattern in section.texts("params") {
        match PathPattern::new(pattern) {
            Ok(pattern) => params.push(pattern),
            Err(reason) => findings.push(section.error(
                "params",
                format!("{pattern:?} is no regular expression: {reason}"),
                "escape what is meant as it stands: \"^h\\\\.0\\\\.\" for example",
            )),
        }
    }
    let settings = ["lr", "lr_factor", "weight_decay", "betas", "muon_matrices"];
    let given = settings.into_iter().find(|name| section.given(name).is_some());
    let update = match (section.flag("frozen"), given) {
        (true, Some(name)) => {
            let message = "is of no use to a group that is frozen";
            findings.push(section.error(name, message, "remove it, or frozen"));
            GroupUpdate::Frozen
        }
        (true, None) => GroupUpdate::Frozen,
        (false, _) => GroupUpdate::Trained {
            rate: group_rate(section, findings),
            weight_decay: section.optional_real("weight_decay"),
            betas: section.optional_pair("betas"),
            muon_matrices: section.optional_count("muon_matrices"),
        },
    };
    let dims = section.counts("dims").unwrap_or_default();
    ParamGroup { params, dims, update }
}

fn group_rate(section: &Section<'_>, findings: &mut Findings) -> GroupRate {
    if section.given("lr").is_some() && section.given("lr_factor").is_some() {
        let message = "stands beside lr_factor, and both say how fast the group learns";
        findings.push(section.error("lr", message, "keep one of them"));
    }
    match section.optional_real("lr") {
        Some(lr) => GroupRate::Own(lr),
        None => GroupRate::Factor(section.real("lr_factor")),
    }
}

/// Ranks: as given, or as many as a launcher started; both must agree.
fn read_ranks(
    training: &Section<'_>,
    written: &Written,
    launched: Option<usize>,
    findings: &mut Findings,
) -> usize {
    let given = training.optional_count("ranks").or(written.processes());
    if let (Some(ranks), Some(launched)) = (given, launched)
        && ranks != launched
    {
        findings.error(
            "training.ranks",
            format!("is {ranks}, but the launcher started {launched} processes, one for each rank"),
            format!("give --ranks {launched}, or start {ranks} processes"),
        );
    }
    given.or(launched).unwrap_or(1)
}

/// What is kept can be said only of what is saved, and the best of what is evaluated.
pub(crate) fn check_saving(training: &TrainingJob, findings: &mut Findings) {
    let saves = training.save_steps.is_some() || training.load_best_model_at_end;
    if training.save_total_limit.is_some() && !saves {
        findings.error(
            "training.save_total_limit",
            "no checkpoints are saved",
            "add training.save_steps, or remove it",
        );
    }
    if training.async_save && !saves {
        findings.error(
            "training.async_save",
            "no checkpoints are saved",
            "add training.save_steps, or remove it",
        );
    }
    if training.save_best_limit.is_some() {
        if training.save_total_limit.is_none() {
            findings.error(
                "training.save_best_limit",
                "all checkpoints are kept",
                "add training.save_total_limit, or remove it",
            );
        }
        let evaluated = training.save_steps.zip(training.eval_steps);
        if !evaluated.is_some_and(|(save, eval)| save.is_multiple_of(eval)) {
            findings.error(
                "training.save_best_limit",
                "checkpoints are judged by an evaluation in the step that they are saved in",
                "add training.eval_steps, and training.save_steps as a multiple of it",
            );
        }
    }
}

/// The best model is known where models are evaluated while they train.
pub(crate) fn check_best(training: &TrainingJob, data: &DataJob, findings: &mut Findings) {
    let given = [
        ("load_best_model_at_end", training.load_best_model_at_end),
        ("early_stopping_patience", training.early_stopping_patience.is_some()),
    ];
    let asks = given.into_iter().find_map(|(key, is_given)| is_given.then_some(key));
    if let Some(key) = asks
        && (training.eval_steps.is_none() || !data.splits.has_eval())
    {
        findings.error(
            format!("training.{key}"),
            "models are compared by evaluations while they train, and this job has none",
            "add training.eval_steps and data.splits.eval, or remove it",
        );
    }
    if training.metric_for_best_model == ModelMetric::Accuracy
        && !matches!(data.kind, DataKind::Classification { .. })
    {
        findings.error(
            "training.metric_for_best_model",
            "is \"accuracy\", which only a classifier has",
            "write \"loss\"",
        );
    }
    if training.early_stopping_threshold > 0.0 && training.early_stopping_patience.is_none() {
        findings.warning(
            "training.early_stopping_threshold",
            "has no effect without training.early_stopping_patience",
            "add training.early_stopping_patience, or remove it",
        );
    }
}

/// The changes of the batch size: two lists of one length.
fn batch_size_schedule(training: &Section<'_>, findings: &mut Findings) -> Vec<(usize, usize)> {
    let section = training.section("batch_size_schedule");
    let lists = ["from_step", "train_batch_size"].map(|name| section.counts(name));
    let given = ["from_step", "train_batch_size"].map(|name| section.given(name).is_some());
    if (lists[0].is_none() && given[0]) || (lists[1].is_none() && given[1]) {
        // What is wrong with it was said.
        return Vec::new();
    }
    let [steps, sizes] = lists.map(Option::unwrap_or_default);
    if steps.len() != sizes.len() {
        let message = format!("has {} steps for {} batch sizes", steps.len(), sizes.len());
        let remedy = "give one step, from 1, for each size";
        findings.push(section.error("from_step", message, remedy));
    }
    if let Some(pair) = steps.windows(2).find(|pair| pair[1] <= pair[0]) {
        let message = format!("{} does not come after {}", pair[1], pair[0]);
        let remedy = "give the changes in the order of their steps";
        findings.push(section.error("from_step", message, remedy));
    }
    steps.into_iter().zip(sizes).collect()
}
