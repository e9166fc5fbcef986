//! The keys of two jobs whose values differ, and which of them a resumed run may change.

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
    // Up to the value "turns", `true` had its meaning. Where both are valid, they find the same answers.
    if path == "data.kind.chat.assistant_only_loss"
        && [before.as_ref(), now].into_iter().all(|it| it.is_some_and(|it| *it != false))
    {
        return;
    }
    if before.as_ref() != now {
        let then = before;
        found.push(Difference { path: path.to_owned(), then, now: now.cloned() });
    }
}

/// Keys that determine the tokens of the data, apart from the files of the data and of the tokenizer, and their places in
/// `job.json`.
pub(super) const TOKEN_KEYS: [(&str, &str); 17] = [
    ("data.text_field", "/data/kind/chat/text_field"),
    ("data.messages_field", "/data/kind/chat/messages_field"),
    ("data.chat_template", "/data/kind/chat/chat_template"),
    ("data.assistant_only_loss", "/data/kind/chat/assistant_only_loss"),
    ("data.completion_only_loss", "/data/kind/chat/completion_only_loss"),
    ("data.packing", "/data/kind/chat/packing"),
    ("data.skip_invalid_rows", "/data/kind/chat/skip_invalid_rows"),
    ("data.chat_template", "/data/kind/preference/chat_template"),
    ("data.skip_invalid_rows", "/data/kind/preference/skip_invalid_rows"),
    ("data.text_field", "/data/kind/text/text_field"),
    ("data.text_field", "/data/kind/classification/text_field"),
    ("data.label_field", "/data/kind/classification/label_field"),
    ("data.sequence_length", "/data/sequence_length"),
    ("data.vocab_size", "/data/vocab_size"),
    ("data.join", "/data/kind/text/join"),
    ("data.eos_token", "/data/eos_token"),
    ("data.new_vocabulary", "/data/new_vocabulary"),
];

/// Returns the keys of the data's and the tokenizer's places whose values differ, as they are in a job file. They may
/// change if the tokens stay the same.
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

/// Keys that determine the model, the data, the sample order and the optimizer type. A run cannot resume after one of
/// them changed.
///
/// Entries are prefixes of paths in `job.json`.
pub(super) const DECISIVE: [&str; 4] =
    ["model.", "data.", "training.seed", "deepspeed.optimizer.type"];

/// Exceptions from [`DECISIVE`]: the paths and names of files and data sets, and how files are cached.
pub(super) const MAY_DIFFER: [&str; 6] = [
    "model.pretrained",
    "data.path",
    "data.tokenizer",
    "data.token_cache",
    "data.name",
    // The samples are compared.
    "data.chat_template",
];

/// Keys without effect on the numbers of later steps. A change of any other key is logged as a warning.
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
    let is_file = path.starts_with("data.") && path.ends_with(".path");
    !is_file && !starts_with_any(path, &MAY_DIFFER) && starts_with_any(path, &DECISIVE)
}

/// Returns whether `path` starts with one of `prefixes`.
pub(super) fn starts_with_any(path: &str, prefixes: &[&str]) -> bool {
    prefixes.iter().any(|prefix| path.starts_with(prefix))
}
