//! Checkpoints of a job: where they are, what they know of it, and going on from one.

use std::path::{Path, PathBuf};

use deepburn::checkpoint::{Checkpoint, Retention, Tag};
use deepburn::{CheckpointPlan, ClientStates};
use deepburn_datasets::Shard;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::failure::Failure;
use crate::preparation::Preparation;

/// The folder of a job's checkpoints.
pub(crate) fn folder(output: &Path) -> PathBuf {
    output.join("checkpoints")
}

/// What a checkpoint knows of its job.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct JobState {
    /// The content of `job.json`.
    job: Value,
    /// Samples of an epoch.
    samples: usize,
    /// What the model is called elsewhere.
    pub(crate) publication: deepburn_models::Publication,
    /// Of this program.
    version: String,
}

impl JobState {
    fn of(preparation: &Preparation) -> Result<Self, Failure> {
        let whole = Shard { rank: 0, num_ranks: 1 };
        Ok(Self {
            job: preparation.record.clone(),
            samples: preparation.subject.samples_per_epoch(whole).map_err(Failure::run)?,
            publication: preparation.subject.publication(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
        })
    }

    /// What the job told `checkpoint`; `None` where another program saved it.
    pub(crate) fn read(checkpoint: &Checkpoint) -> Option<Self> {
        Self::deserialize(&ClientStates::read(checkpoint).ok()?.client_state).ok()
    }
}

/// When the job saves, and which checkpoints it keeps.
pub(crate) fn plan(preparation: &Preparation) -> Result<CheckpointPlan, Failure> {
    let training = &preparation.job.training;
    Ok(CheckpointPlan {
        root: folder(&training.output_dir),
        save_steps: training.save_steps.map(|steps| steps as u64),
        asynchronous: training.async_save,
        retention: Retention {
            keep_last: training.save_total_limit.and_then(|limit| limit.try_into().ok()),
            keep_best: training.save_best_limit.unwrap_or(0),
        },
        job: preparation.subject.name().to_owned(),
        client_state: json!(JobState::of(preparation)?),
    })
}

/// Opens the checkpoint that the job goes on from: the one called `tag`, or the latest.
///
/// # Errors
/// Always a user's mistake: there is none, it is damaged, or it is of another job.
pub(crate) fn open(preparation: &Preparation, tag: Option<&str>) -> Result<Checkpoint, Failure> {
    let named = |error: &dyn std::fmt::Display| Failure::mistake(format!("--resume: {error}"));
    let tag = tag.filter(|tag| *tag != "latest").map(str::parse::<Tag>);
    let tag = tag.transpose().map_err(|error| named(&error))?;
    let root = folder(&preparation.job.training.output_dir);
    let checkpoint = Checkpoint::open_intact(&root, tag.as_ref()).map_err(|error| named(&error))?;
    let Some(saved) = JobState::read(&checkpoint) else {
        return Err(named(&format!(
            "{}: it was not saved by finetune; load it with Engine::load_checkpoint",
            checkpoint.path().display()
        )));
    };
    compare(&saved, &JobState::of(preparation)?)
        .map_err(|reason| named(&format!("{}: {reason}", checkpoint.path().display())))?;
    note_newer(&root, &checkpoint);
    Ok(checkpoint)
}

/// A run that starts from the beginning has no place for checkpoints where an earlier one's are:
/// none is ever overwritten.
///
/// # Errors
/// A user's mistake, if there are some.
pub(crate) fn refuse_earlier(preparation: &Preparation) -> Result<(), Failure> {
    let root = folder(&preparation.job.training.output_dir);
    let earlier = match root.is_dir() {
        true => Checkpoint::all(&root).map_err(Failure::mistake)?,
        false => Vec::new(),
    };
    let Some(last) = earlier.last() else { return Ok(()) };
    Err(Failure::mistake(format!(
        "training.output_dir: {} has the checkpoints of an earlier run; go on from the last with \
         --resume, move them away, or give another folder",
        last.path().parent().unwrap_or(&root).display()
    )))
}

/// Refuses a job whose data or model is another, and tells of what else decides the numbers.
fn compare(saved: &JobState, now: &JobState) -> Result<(), String> {
    if saved.samples != now.samples {
        return Err(format!(
            "it was saved in {} samples of training data and the job has {}: a place in the one is \
             none in the other; give the data it was saved with",
            saved.samples, now.samples
        ));
    }
    let mut differences = Vec::new();
    for section in ["model", "data", "training", "deepspeed"] {
        differ(section, &saved.job[section], &now.job[section], &mut differences);
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
    let is_place = places.iter().any(|place| path.starts_with(place));
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

/// Later checkpoints stay; the run that comes by again cannot save under their names.
fn note_newer(root: &Path, checkpoint: &Checkpoint) {
    let step = checkpoint.run().step;
    let newer = Checkpoint::all(root).unwrap_or_default();
    let newer = newer.iter().filter(|other| other.run().step > step).map(|it| it.tag().as_str());
    let newer: Vec<_> = newer.collect();
    if !newer.is_empty() {
        tracing::warn!(
            "there are newer checkpoints, and none is overwritten: move away {} for those steps to \
             be saved",
            newer.join(", ")
        );
    }
}
