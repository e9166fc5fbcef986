//! The keys of two jobs whose values differ, and which of them a resumed run may change.

use deepburn_config::deepspeed_keys;

use super::*;

/// A key whose value changed. A value is `None` if the key is missing.
pub(super) struct Difference {
    /// Path of the key.
    pub(super) path: String,
    /// Value in the checkpoint.
    pub(super) then: Option<Value>,
    /// Value in this job.
    pub(super) now: Option<Value>,
}

/// Collects the keys below `path` whose values differ.
///
/// A key that only one side has differs, too.
pub(super) fn differ(
    path: &str,
    then: Option<&Value>,
    now: Option<&Value>,
    found: &mut Vec<Difference>,
) {
    // Sections are compared key by key. All other values, including lists, are compared as a whole.
    if let (Some(Value::Object(left)), Some(Value::Object(right))) = (then, now) {
        // Keys of both sides in one list, the checkpoint's first.
        let added = right.keys().filter(|name| !left.contains_key(*name));
        for name in left.keys().chain(added) {
            differ(&format!("{path}.{name}"), left.get(name), right.get(name), found);
        }
        return;
    }
    let before = match then {
        // Versions before this key applied weight decay to all parameters.
        None if path == "training.no_decay" => Some(Value::from("nothing")),
        // They did not smooth labels either.
        None if path == "training.label_smoothing_factor" => Some(Value::from(0.0)),
        Some(name) if path == "model.architecture" && name == Architecture::FORMER_ENCODER => {
            Some(Value::from(Architecture::Encoder.name()))
        }
        then => then.cloned(),
    };
    // Before the value "turns" existed, `true` had its meaning. Where both are valid, they find the
    // same answers.
    if path == "data.assistant_only_loss"
        && [before.as_ref(), now].into_iter().all(|it| it.is_some_and(|it| *it != false))
    {
        return;
    }
    let is_same = match (&before, now) {
        (Some(before), Some(now)) => means(before, now),
        (before, now) => before.is_none() && now.is_none(),
    };
    if !is_same {
        let then = before;
        found.push(Difference { path: path.to_owned(), then, now: now.cloned() });
    }
}

/// Returns whether both values are equal, as 1 and 1.0 are.
fn means(value: &Value, other: &Value) -> bool {
    match (value, other) {
        (Value::Array(values), Value::Array(others)) => {
            let mut pairs = values.iter().zip(others);
            values.len() == others.len() && pairs.all(|(value, other)| means(value, other))
        }
        (Value::Number(value), Value::Number(other)) => value.as_f64() == other.as_f64(),
        _ => value == other,
    }
}

/// Returns a value as messages show it.
pub(super) fn shown(value: &Value) -> String {
    if value.is_null() { "unset".to_owned() } else { value.to_string() }
}

/// Returns whether the DeepSpeed configurations of both jobs, which `job.json` stores as written,
/// have the same meaning.
pub(super) fn resolve_to_same_plan(then: &Value, now: &Value) -> bool {
    let plan = |job: &Value| job.pointer("/resolved/plan").cloned();
    // An older checkpoint does not have every field of a plan.
    plan(then).is_some_and(|then| plan(now) == Some(then))
}

/// Returns the DeepSpeed configurations of two jobs. Each has the defaults of the keys that only
/// the other one has.
pub(super) fn with_deepspeed_defaults(then: &Value, now: &Value) -> (Value, Value) {
    let section = |job: &Value| {
        let mut section =
            job.get("deepspeed").and_then(Value::as_object).cloned().unwrap_or_default();
        remove_nulls(&mut section);
        section
    };
    // Both are taken as written, so that a default of one is only added for a key of the other.
    let (written_then, written_now) = (section(then), section(now));
    let completed = |job: &Value, own: &Map<String, Value>, other: &Map<String, Value>| {
        let mut section = own.clone();
        add_defaults("", &mut section, other, &|path| deepspeed_default(path, job));
        Value::Object(section)
    };
    (completed(then, &written_then, &written_now), completed(now, &written_now, &written_then))
}

/// Removes all null fields, which mean the same as missing ones.
fn remove_nulls(section: &mut Map<String, Value>) {
    section.retain(|_, value| !value.is_null());
    for inner in section.values_mut().filter_map(Value::as_object_mut) {
        remove_nulls(inner);
    }
}

/// Adds the default of each key that only `other` has.
fn add_defaults(
    above: &str,
    own: &mut Map<String, Value>,
    other: &Map<String, Value>,
    default: &dyn Fn(&str) -> Option<Value>,
) {
    // The type determines the parameters and their defaults.
    let kind = own.get("type").and_then(Value::as_str).map(|kind| format!("[{kind}]"));
    for (name, value) in other {
        let path = format!("{above}{name}");
        let Value::Object(fields) = value else {
            if !own.contains_key(name) {
                own.extend(default(&path).map(|value| (name.clone(), value)));
            }
            continue;
        };
        // A missing optimizer or schedule is named as a whole.
        if fields.contains_key("type") && !own.contains_key(name) {
            continue;
        }
        let kind = kind.as_deref().filter(|_| name == "params").unwrap_or_default();
        let inner = own.entry(name).or_insert_with(|| Map::new().into());
        if let Some(inner) = inner.as_object_mut() {
            add_defaults(&format!("{path}{kind}."), inner, fields, default);
        }
    }
}

/// Returns the default of the key `path` of a DeepSpeed configuration; `None` if a missing key is
/// not the same as any value.
fn deepspeed_default(path: &str, job: &Value) -> Option<Value> {
    let derived = match path {
        "train_batch_size" | "gradient_accumulation_steps" => path,
        "train_micro_batch_size_per_gpu" => "micro_batch_size",
        _ => {
            let keys = deepspeed_keys();
            let entry = keys.iter().find(|entry| entry.path.eq_ignore_ascii_case(path))?;
            return Some(entry.key.default.node().to_json()).filter(|it| !it.is_null());
        }
    };
    job.pointer(&format!("/resolved/plan/batch/{derived}")).cloned()
}

/// Returns the content of `job.json` with the keys of `data` as they are in a job file. The
/// resolved job stores the keys of a kind of data inside of `data.kind`, and some of them resolved.
pub(super) fn written(job: &Value) -> Value {
    let mut job = job.clone();
    if let Some(parameters) = job.pointer_mut("/training/lr_scheduler_kwargs")
        && let Value::Object(fields) = parameters
    {
        remove_nulls(fields);
        if fields.is_empty() {
            *parameters = Value::Null;
        }
    }
    let (path, splits) = (job.pointer("/data/splits/path").cloned(), written_splits(&job));
    let Some(Value::Object(data)) = job.get_mut("data") else { return job };
    if let Some(Value::Object(mut splits)) = splits {
        for name in ["train", "eval", "test"] {
            splits.entry(name).or_insert(Value::Null);
        }
        data.insert("splits".to_owned(), splits.into());
        data.insert("path".to_owned(), path.unwrap_or_default());
    }
    let Some(Value::Object(kind)) = data.get("kind") else { return job };
    let Some((name, Value::Object(fields))) = kind.iter().next() else { return job };
    let (name, mut fields) = (Value::from(name.as_str()), fields.clone());
    if let Some(template) = fields.get_mut("chat_template") {
        let given = ["file", "text"].into_iter().find_map(|source| template.get(source).cloned());
        *template = given.unwrap_or_default();
    }
    if let Some(packing) = fields.remove("packing") {
        let strategy = packing.get("packed").cloned();
        let values = [
            ("skip_invalid_rows", fields.get("skip_invalid_rows").cloned().unwrap_or(false.into())),
            ("packing", strategy.is_some().into()),
            ("padding_free", (packing == "padding_free").into()),
            ("packing_strategy", strategy.unwrap_or_default()),
        ];
        fields.extend(values.map(|(key, value)| (key.to_owned(), value)));
    }
    data.insert("kind".to_owned(), name);
    data.extend(fields);
    job
}

/// Keys of `data` that determine its tokens, apart from the files of the data and of the tokenizer.
pub(super) const TOKEN_KEYS: [&str; 16] = [
    "kind",
    "text_field",
    "messages_field",
    "chat_template",
    "assistant_only_loss",
    "completion_only_loss",
    "packing",
    "padding_free",
    "packing_strategy",
    "skip_invalid_rows",
    "label_field",
    "sequence_length",
    "vocab_size",
    "join",
    "eos_token",
    "new_vocabulary",
];

/// Keys that may change if the training data stays the same: a run may name a default, for example.
const SAME_DATA: [&str; 7] = [
    "data.splits",
    "data.eos_token",
    "data.text_field",
    "data.messages_field",
    "data.completion_only_loss",
    "data.skip_invalid_rows",
    "data.label_field",
];

/// Returns whether the key `path` of the job `written` may change if the training data stays the
/// same. The length of samples may be above the model's limit, but a stream is cut at it.
pub(super) fn is_compared_with_data(path: &str, written: &Value) -> bool {
    let has_samples = ["chat", "preference"].iter().any(|kind| written["data"]["kind"] == *kind);
    starts_with_any(path, &SAME_DATA) || has_samples && path == "data.sequence_length"
}

/// Returns the keys of the data's and the tokenizer's places whose values differ, as they are in a
/// job file. They may change if the tokens stay the same.
pub(super) fn changed_places(then: &Value, now: &Value) -> Vec<Difference> {
    let tokenizer = |job: &Value| job.pointer("/data/tokenizer").cloned();
    let path = |job: &Value| job.pointer("/data/splits/path").cloned();
    let pretrained = |job: &Value| job.pointer("/model/pretrained").cloned();
    let mut found = Vec::new();
    let mut compare = |key: &str, then: Option<Value>, now: Option<Value>| {
        // An older checkpoint does not have every key, and only some splits are of one path.
        let [then, now] = [then, now].map(Option::unwrap_or_default);
        if then != now {
            found.push(Difference { path: key.to_owned(), then: Some(then), now: Some(now) });
        }
    };
    compare("data.tokenizer", tokenizer(then), tokenizer(now));
    compare("data.path", path(then), path(now));
    compare("data.splits", written_splits(then), written_splits(now));
    // The tokenizer of the pretrained model is used if the job names none.
    if [then, now].into_iter().all(|job| tokenizer(job).is_none_or(|it| it.is_null())) {
        compare("model.pretrained", pretrained(then), pretrained(now));
    }
    found
}

/// Returns `data.splits` as it is in a job file: fractions are percentages.
fn written_splits(job: &Value) -> Option<Value> {
    let splits = job.pointer("/data/splits")?;
    // A share of 0 is how a missing split is stored.
    let share = |name: &str| splits.get(name).and_then(Value::as_f64).filter(|it| *it > 0.0);
    let percent = |share: f64| Value::from(format!("{}%", (share * 1e9).round() / 1e7));
    let written = |name: &str| {
        let text = splits.get(name).filter(|it| it.is_string()).cloned();
        let held_out = || share("eval_share").filter(|_| name == "eval").map(percent);
        text.or_else(|| share(name).map(percent)).or_else(held_out)
    };
    let names = ["train", "eval", "test"].into_iter();
    let given = names.filter_map(|name| Some((name.to_owned(), written(name)?)));
    Some(Value::Object(given.collect()))
}

/// Keys that determine the model, the data, the sample order and the optimizer type. A run cannot
/// resume after one of them changed.
///
/// Entries are prefixes of paths in `job.json`.
pub(super) const DECISIVE: [&str; 4] =
    ["model.", "data.", "training.seed", "deepspeed.optimizer.type"];

/// Exceptions from [`DECISIVE`]: the paths and names of files and data sets, how files are cached,
/// and keys that change no sample.
pub(super) const MAY_DIFFER: [&str; 8] = [
    "model.pretrained",
    "data.path",
    "data.tokenizer",
    "data.token_cache",
    "data.name",
    // The samples are compared.
    "data.chat_template",
    // The model does not see padding.
    "data.pad_token",
    // It only determines where training ends.
    "data.drop_last",
];

/// Keys without effect on the numbers of later steps. A change of any other key is logged as a
/// warning.
pub(super) const WITHOUT_EFFECT_ON_NUMBERS: [&str; 16] = [
    "data.token_cache",
    "training.output_dir",
    "training.logging_steps",
    "training.eval_",
    "training.per_device_eval_batch_size",
    "training.samples",
    "training.save_",
    "training.async_save",
    "training.checkpoint_scope",
    "training.collective_timeout",
    "deepspeed.steps_per_print",
    "deepspeed.wall_clock_breakdown",
    "deepspeed.tensorboard",
    "deepspeed.csv_monitor",
    "deepspeed.wandb",
    "training.report_to",
];

/// Returns whether the key `path` is one of the [`DECISIVE`] ones, apart from the exceptions.
pub(super) fn is_refused(path: &str) -> bool {
    // Files may be at another path now. Their contents are compared.
    let is_file = path.starts_with("data.") && path.ends_with(".path");
    !is_file && !starts_with_any(path, &MAY_DIFFER) && starts_with_any(path, &DECISIVE)
}

/// Returns whether `path` starts with one of `prefixes`.
pub(super) fn starts_with_any(path: &str, prefixes: &[&str]) -> bool {
    prefixes.iter().any(|prefix| path.starts_with(prefix))
}
