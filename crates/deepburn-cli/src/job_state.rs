//! What a checkpoint knows of its job, and whether another job may go on from it.

use deepburn::ClientStates;
use deepburn::checkpoint::Checkpoint;
use deepburn_datasets::Shard;
use deepburn_models::Publication;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::failure::Failure;
use crate::preparation::Preparation;
use crate::results::STARTED;

/// What a checkpoint knows of its job.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct JobState {
    /// The content of `job.json`.
    job: Value,
    /// Samples of an epoch.
    samples: usize,
    /// What the model is called elsewhere.
    pub(crate) publication: Publication,
    /// Of this program.
    version: String,
    /// The launch in which it was saved; `None` without a launcher that restarts jobs.
    #[serde(default)]
    launch: Option<String>,
}

impl JobState {
    pub(crate) fn of(preparation: &Preparation) -> Result<Self, Failure> {
        let whole = Shard { rank: 0, num_ranks: 1 };
        Ok(Self {
            job: preparation.record.clone(),
            samples: preparation.subject.samples_per_epoch(whole).map_err(Failure::run)?,
            publication: preparation.subject.publication(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            launch: launch(),
        })
    }

    /// Whether the checkpoint was saved by this job, before it was restarted.
    pub(crate) fn is_of_this_launch(&self) -> bool {
        self.launch.is_some() && self.launch == launch()
    }

    /// What the job told `checkpoint`; `None` where another program saved it.
    pub(crate) fn read(checkpoint: &Checkpoint) -> Option<Self> {
        Self::deserialize(&ClientStates::read(checkpoint).ok()?.client_state).ok()
    }

    /// Refuses a job whose data or model is another, and tells of what else decides the numbers.
    pub(crate) fn compare(&self, now: &Self) -> Result<(), String> {
        if self.samples != now.samples {
            return Err(format!(
                "it was saved in {} samples of training data and the job has {}: a place in the one is \
                 none in the other; give the data it was saved with",
                self.samples, now.samples
            ));
        }
        self.compare_models(now)?;
        let mut differences = Vec::new();
        for section in ["model", "data", "training", "deepspeed"] {
            differ(section, &self.job[section], &now.job[section], &mut differences);
        }
        for Difference { path, then, now } in differences {
            if is_refused(&path) {
                return Err(format!(
                    "{path} was {then} when it was saved and is {now} now: set it back, or start anew \
                     from other weights with model.pretrained"
                ));
            }
            if decides(&path) {
                tracing::warn!("{path} was {then} in the checkpoint and is {now} from now on");
            }
        }
        Ok(())
    }
}

impl JobState {
    /// Refuses a model with other classes or another vocabulary, which the data decide where the job file
    /// does not.
    fn compare_models(&self, now: &Self) -> Result<(), String> {
        let config = |state: &Self, name: &str| {
            let document = state.publication.documents.get("config.json");
            document.and_then(|fields| fields.get(name)).cloned()
        };
        for (name, remedy) in [
            (
                "id2label",
                "give the data it was saved with, or these names as model.config.id2label",
            ),
            ("vocab_size", "set model.config.vocab_size to that"),
        ] {
            let (then, now) = (config(self, name), config(now, name));
            // Before classes had names, an encoder's configuration did not list them.
            if let (Some(then), Some(now)) = (then, now)
                && then != now
            {
                return Err(format!(
                    "the model's {name} was {then} when it was saved and is {now} now; {remedy}"
                ));
            }
        }
        Ok(())
    }
}

/// The launch that this process belongs to: when it began, which restarts leave as it is.
fn launch() -> Option<String> {
    std::env::var(STARTED).ok()
}

/// A value of the job file that is another now.
struct Difference {
    path: String,
    then: Value,
    now: Value,
}

fn differ(path: &str, then: &Value, now: &Value, found: &mut Vec<Difference>) {
    if let (Value::Object(left), Value::Object(right)) = (then, now) {
        let added = right.keys().filter(|name| !left.contains_key(*name));
        for name in left.keys().chain(added) {
            differ(&format!("{path}.{name}"), &then[name], &now[name], found);
        }
    } else if then != now {
        found.push(Difference { path: path.to_owned(), then: then.clone(), now: now.clone() });
    }
}

/// Without the same model, data and draws there is nothing to go on with. Where they lie may change.
fn is_refused(path: &str) -> bool {
    let places = ["model.pretrained", "data.path", "data.tokenizer"];
    let is_path = path.starts_with("data.") && path.ends_with(".path");
    let is_place = is_path || places.iter().any(|place| path.starts_with(place));
    let parts = ["model.", "data.", "training.seed", "deepspeed.optimizer.type"];
    !is_place && parts.iter().any(|part| path.starts_with(part))
}

/// Whether a value has a part in the numbers of later steps.
fn decides(path: &str) -> bool {
    let aside = [
        "training.output_dir",
        "training.logging_steps",
        "training.eval_steps",
        "training.save_",
        "training.async_save",
        "deepspeed.steps_per_print",
        "deepspeed.wall_clock_breakdown",
    ];
    !aside.iter().any(|it| path.starts_with(it))
}
