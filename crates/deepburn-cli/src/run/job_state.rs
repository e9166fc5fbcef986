//! What a checkpoint knows of its job, and whether another job may go on from it.

use deepburn::ClientStates;
use deepburn::checkpoint::Checkpoint;
use deepburn_models::Publication;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::run::preparation::Preparation;
use crate::run::results::STARTED;

/// The version of [`JobState`] that this program writes. It rises when a field changes its meaning; a field that
/// is only new has a default instead.
const FORMAT: u32 = 1;

/// What a checkpoint knows of its job.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct JobState {
    /// [`FORMAT`] of the program that saved it; 1 in checkpoints that are older than the field.
    #[serde(default = "first_format")]
    format: u32,
    /// The content of `job.json`.
    job: Value,
    /// Samples of an epoch.
    samples: usize,
    /// A hash of the training data, tokenized; `None` in older checkpoints.
    #[serde(default)]
    data: Option<String>,
    /// What the model is called elsewhere.
    pub(crate) publication: Publication,
    /// Of this program.
    #[serde(default)]
    version: String,
    /// The launch in which it was saved; `None` without a launcher that restarts jobs.
    #[serde(default)]
    launch: Option<String>,
}

impl JobState {
    pub(crate) fn of(preparation: &Preparation) -> Self {
        Self {
            format: FORMAT,
            job: preparation.record.clone(),
            samples: preparation.data.samples,
            data: Some(preparation.data.training.clone()),
            publication: preparation.subject.publication(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            launch: launch(),
        }
    }

    /// Whether the checkpoint was saved by this job, before it was restarted.
    pub(crate) fn is_of_this_launch(&self) -> bool {
        self.launch.is_some() && self.launch == launch()
    }

    /// Reads the state of the job that saved `checkpoint`.
    ///
    /// # Errors
    /// Another program saved it, or a later version of this one.
    pub(crate) fn read(checkpoint: &Checkpoint) -> Result<Self, String> {
        let states = ClientStates::read(checkpoint).map_err(|error| error.to_string())?;
        Self::parse(&states.client_state)
    }

    fn parse(state: &Value) -> Result<Self, String> {
        if state.get("job").is_none() {
            let remedy = "load it with Engine::load_checkpoint";
            return Err(format!("it was not saved by finetune; {remedy}"));
        }
        let version = state.get("version").and_then(Value::as_str).unwrap_or("unknown");
        let format = state.get("format").and_then(Value::as_u64).unwrap_or(1);
        if format > u64::from(FORMAT) {
            return Err(format!(
                "it was saved by finetune {version}, whose checkpoints have format {format}; this program \
                 ({}) reads up to format {FORMAT}; use the program that saved it, or a later one",
                env!("CARGO_PKG_VERSION")
            ));
        }
        Self::deserialize(state).map_err(|error| {
            format!(
                "the job state that finetune {version} saved cannot be read: {error}; use the program \
                 that saved it"
            )
        })
    }

    /// Refuses a job whose data or model is another, and tells of what else decides the numbers.
    pub(crate) fn compare(&self, now: &Self) -> Result<(), String> {
        if self.samples != now.samples {
            return Err(format!(
                "it was saved with {} samples of training data and this job has {}, so data-loader \
                 positions are not comparable; give the data that it was saved with",
                self.samples, now.samples
            ));
        }
        self.compare_models(now)?;
        // How a new run can start from what was trained. The encoder cannot start from weights.
        let weights = match self.job["model"]["architecture"].as_str() {
            Some("imdb_encoder") => "",
            _ => " from its weights with model.pretrained",
        };
        if let (Some(then), Some(now)) = (&self.data, &now.data)
            && then != now
        {
            return Err(format!(
                "it was saved with other training data: as many samples, but other tokens or labels; give the \
                 files and the tokenizer that it was saved with, or start a new run{weights}"
            ));
        }
        let mut differences = Vec::new();
        for section in ["model", "data", "training", "deepspeed"] {
            differ(section, self.job.get(section), now.job.get(section), &mut differences);
        }
        // What the fields given in the job file amount to was compared above.
        differences.retain(|difference| !difference.path.starts_with("model.config"));
        // A refusal first: what else has changed matters to a run that resumes.
        differences.sort_by_key(|difference| !self.refuses(&difference.path));
        for Difference { path, then, now } in differences {
            // As the job file calls it: the resolved job keeps the path with its splits.
            let path = if path == "data.splits.path" { "data.path".to_owned() } else { path };
            let decides_numbers = !starts_with_any(&path, &CHANGES_NO_NUMBER);
            match (then, now) {
                (Some(then), now) if self.refuses(&path) => {
                    return Err(format!(
                        "{path} was {then} when it was saved and is {} now; set it back, or start a new \
                         run{weights}",
                        now.unwrap_or(Value::Null)
                    ));
                }
                (Some(then), now) if decides_numbers => {
                    let now = now.unwrap_or(Value::Null);
                    tracing::warn!("{path} was {then} in the checkpoint and is {now} from now on");
                }
                // A key that the program which saved it did not have, or not yet in this place.
                (None, Some(now)) if decides_numbers && !now.is_null() => {
                    tracing::debug!("{path} is {now}; the checkpoint was saved without this key");
                }
                _ => {}
            }
        }
        Ok(())
    }
}

impl JobState {
    /// Whether a run cannot resume with another value of the key `path`. The splits may change if a hash of the
    /// training data says that they are the same texts.
    fn refuses(&self, path: &str) -> bool {
        let is_guarded = path.starts_with("data.splits") && self.data.is_some();
        !is_guarded && is_refused(path)
    }

    /// Refuses another model. Its configuration is compared field by field as it would be exported, because the
    /// data and a pretrained model decide what the job file leaves out.
    fn compare_models(&self, now: &Self) -> Result<(), String> {
        let config = |state: &Self| state.publication.documents.get("config.json").cloned();
        let Some((then, now)) = config(self).zip(config(now)) else { return Ok(()) };
        // A field that only one of them has is newer than the checkpoint.
        let both = then.iter().filter_map(|(name, then)| Some((name, then, now.get(name)?)));
        // Special tokens and the type of exported weights do not decide what is computed.
        let decides = |name: &str| !name.ends_with("_token_id") && !name.ends_with("dtype");
        let mut changed = both.filter(|(name, then, now)| decides(name) && then != now);
        let Some((name, then, now)) = changed.next() else { return Ok(()) };
        let remedy = match name.as_str() {
            "id2label" | "label2id" => {
                "give the data it was saved with, or these names as model.config.id2label"
                    .to_owned()
            }
            _ => format!("set model.config.{name} to {then}, or start a new run from its weights"),
        };
        Err(format!("the model's {name} was {then} when it was saved and is {now} now; {remedy}"))
    }
}

/// The launch that this process belongs to: when it began, which restarts leave as it is.
fn launch() -> Option<String> {
    std::env::var(STARTED).ok()
}

fn first_format() -> u32 {
    1
}

/// A value of the job file that is another now; `None` where the key is missing.
struct Difference {
    path: String,
    then: Option<Value>,
    now: Option<Value>,
}

fn differ(path: &str, then: Option<&Value>, now: Option<&Value>, found: &mut Vec<Difference>) {
    if let (Some(Value::Object(left)), Some(Value::Object(right))) = (then, now) {
        let added = right.keys().filter(|name| !left.contains_key(*name));
        for name in left.keys().chain(added) {
            differ(&format!("{path}.{name}"), left.get(name), right.get(name), found);
        }
        return;
    }
    let before = match then {
        // A checkpoint from before the key: all parameters decayed.
        None if path == "training.no_decay" => Some(Value::from("nothing")),
        then => then.cloned(),
    };
    if before.as_ref() != now {
        let then = before;
        found.push(Difference { path: path.to_owned(), then, now: now.cloned() });
    }
}

/// What decides the model, the data and the order of samples: a run cannot continue where one of them changed.
const DECISIVE: [&str; 4] = ["model.", "data.", "training.seed", "deepspeed.optimizer.type"];

/// Keys among those that may change all the same: where files lie, and how they are read.
const MAY_DIFFER: [&str; 5] =
    ["model.pretrained", "data.path", "data.tokenizer", "data.token_cache", "data.name"];

/// Keys that later steps do not depend on. A change of any other is logged.
const CHANGES_NO_NUMBER: [&str; 11] = [
    "data.token_cache",
    "training.output_dir",
    "training.logging_steps",
    "training.eval_",
    "training.save_",
    "training.async_save",
    "training.collective_timeout",
    "deepspeed.steps_per_print",
    "deepspeed.wall_clock_breakdown",
    "deepspeed.tensorboard",
    "deepspeed.csv_monitor",
];

fn is_refused(path: &str) -> bool {
    let is_file = path.starts_with("data.") && path.ends_with(".path");
    !is_file && !starts_with_any(path, &MAY_DIFFER) && starts_with_any(path, &DECISIVE)
}

fn starts_with_any(path: &str, prefixes: &[&str]) -> bool {
    prefixes.iter().any(|prefix| path.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn state(job: Value) -> Value {
        let publication =
            serde_json::to_value(deepburn_models::gpt2::Gpt2Config::small().publication());
        json!({ "job": job, "samples": 8, "publication": publication.unwrap() })
    }

    fn compare(then: Value, now: Value) -> Result<(), String> {
        let [then, now] = [then, now].map(|job| JobState::parse(&state(job)).unwrap());
        then.compare(&now)
    }

    #[test]
    fn states_without_the_newer_fields_are_read() {
        let read = JobState::parse(&state(json!({}))).unwrap();
        assert_eq!((read.format, read.launch, &*read.version), (1, None, ""));
    }

    #[test]
    fn a_later_format_and_another_program_are_told_apart() {
        let mut later = state(json!({}));
        later["format"] = json!(FORMAT + 1);
        later["version"] = json!("9.1.0");
        let error = JobState::parse(&later).unwrap_err();
        assert!(error.contains("9.1.0") && error.contains("format 2"), "{error}");
        let error = JobState::parse(&json!({"step": 3})).unwrap_err();
        assert!(error.contains("was not saved by finetune"), "{error}");
    }

    #[test]
    fn keys_that_decide_no_number_may_change() {
        let job = |cache| json!({"data": {"token_cache": cache, "kind": "text"}});
        assert_eq!(compare(job(true), job(false)), Ok(()));
        // A key that is new in this program.
        assert_eq!(compare(json!({"data": {}}), json!({"data": {"new": 3}})), Ok(()));
        assert_eq!(compare(json!({"training": {}}), json!({"training": {"new": 3}})), Ok(()));
    }

    #[test]
    fn weights_of_an_older_checkpoint_all_decayed() {
        let changed = |now: &str| {
            let (then, now) = (json!({}), json!({ "no_decay": now }));
            let mut found = Vec::new();
            differ("training", Some(&then), Some(&now), &mut found);
            found.into_iter().map(|it| (it.path, it.then, it.now)).collect::<Vec<_>>()
        };
        assert_eq!(changed("nothing"), []);
        let path = "training.no_decay".to_owned();
        let expected = (path, Some(json!("nothing")), Some(json!("biases_and_norms")));
        assert_eq!(changed("biases_and_norms"), [expected]);
    }

    #[test]
    fn other_data_of_the_same_size_is_refused() {
        let with = |data: Option<&str>| {
            let state = JobState::parse(&state(json!({}))).unwrap();
            JobState { data: data.map(str::to_owned), ..state }
        };
        assert_eq!(with(Some("a")).compare(&with(Some("a"))), Ok(()));
        // Checkpoints of older programs do not say.
        assert_eq!(with(None).compare(&with(Some("a"))), Ok(()));
        let error = with(Some("a")).compare(&with(Some("b"))).unwrap_err();
        assert!(error.contains("other training data"), "{error}");
    }

    #[test]
    fn another_model_order_or_data_is_refused_with_both_values() {
        for (then, now) in [
            (json!({"data": {"shuffle": true}}), json!({"data": {"shuffle": false}})),
            (json!({"training": {"seed": 1}}), json!({"training": {"seed": 2}})),
        ] {
            let error = compare(then, now).unwrap_err();
            assert!(error.contains("now"), "{error}");
        }
    }

    #[test]
    fn models_are_compared_as_they_are_and_not_as_they_are_written() {
        let state = |config: Value| {
            let mut state = state(json!({ "model": { "config": config } }));
            state["publication"]["documents"]["config.json"]["resid_pdrop"] = json!(0.1);
            JobState::parse(&state).unwrap()
        };
        // The same sizes, given and left out.
        let given = state(json!({"vocab_size": 50257}));
        assert_eq!(state(json!({})).compare(&given), Ok(()));
        let mut other = state(json!({}));
        let config = other.publication.documents.get_mut("config.json").unwrap();
        config.insert("pad_token_id".to_owned(), json!(3));
        assert_eq!(given.compare(&other), Ok(()));
        let config = other.publication.documents.get_mut("config.json").unwrap();
        config.insert("resid_pdrop".to_owned(), json!(0.5));
        let error = given.compare(&other).unwrap_err();
        assert!(error.contains("model.config.resid_pdrop to 0.1"), "{error}");
    }
}
