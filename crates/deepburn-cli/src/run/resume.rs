//! Checkpoints of a job: where they are, when they are saved, and going on from one, its own or
//! DeepSpeed's.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use burn::module::AutodiffModule;
use deepburn::checkpoint::{Checkpoint, Retention, Tag};
use deepburn::deepspeed::DeepSpeedCheckpoint;
use deepburn::metrics::{Row, read_metrics};
use deepburn::ops::OptimizerOps;
use deepburn::zero::Training;
use deepburn::{
    BatchSource, CheckpointPlan, ClientStates, Engine, LoadPlan, LoopState, NextStep, TorchModel,
    check_deepspeed_checkpoint,
};
use deepburn_config::Job;
use deepburn_models::Publication;
use serde_json::json;

use crate::failure::Failure;
use crate::run::finetune::RankError;
use crate::run::job_state::JobState;
use crate::run::preparation::{Preparation, refuse_running};

/// Set by a launcher: how often it has restarted the job.
const RESTARTS: &str = "DEEPBURN_RESTART";

/// The folder of a job's checkpoints.
pub(crate) fn folder(output: &Path) -> PathBuf {
    output.join("checkpoints")
}

/// What a run goes on from.
pub(crate) enum Origin {
    /// A checkpoint of this program.
    Own(Checkpoint),
    /// A checkpoint of DeepSpeed.
    DeepSpeed(DeepSpeedCheckpoint),
}

impl Origin {
    /// Steps taken before.
    pub(crate) fn step(&self) -> u64 {
        match self {
            Self::Own(checkpoint) => checkpoint.run().step,
            Self::DeepSpeed(checkpoint) => checkpoint.counters().global_steps,
        }
    }

    /// Samples seen before, over all ranks.
    pub(crate) fn samples(&self) -> u64 {
        match self {
            Self::Own(checkpoint) => {
                ClientStates::read(checkpoint).map_or(0, |states| states.global_samples)
            }
            Self::DeepSpeed(checkpoint) => checkpoint.counters().global_samples,
        }
    }
}

/// When the job saves, and which checkpoints it keeps.
pub(crate) fn plan(preparation: &Preparation) -> CheckpointPlan {
    let training = &preparation.job.training;
    CheckpointPlan {
        root: folder(&training.output_dir),
        save_steps: training.save_steps.map(|steps| steps as u64),
        asynchronous: training.async_save,
        retention: Retention {
            keep_last: training.save_total_limit.and_then(|limit| limit.try_into().ok()),
            keep_best: training.save_best_limit.unwrap_or(0),
        },
        job: preparation.subject.name().to_owned(),
        client_state: json!(JobState::of(preparation)),
    }
}

/// What the job resumes from, if it does: what `--resume` names, or, where a launcher has restarted the
/// job, the newest intact checkpoint that it has saved since the launch. Checkpoints of earlier runs, such
/// as those after the one that `--resume` names, are not part of it.
///
/// # Errors
/// As [`open`].
pub(crate) fn origin(
    preparation: &Preparation,
    asked: Option<&Option<String>>,
) -> Result<Option<Origin>, Failure> {
    if restarts() > 0
        && let Some(checkpoint) = newest_of_launch(preparation)?
    {
        return Ok(Some(Origin::Own(checkpoint)));
    }
    asked.map(|tag| open(preparation, tag.as_deref())).transpose()
}

/// Refuses an output folder that another run writes to, one with checkpoints of an earlier run if this one starts
/// from the beginning, and one without any if it resumes.
///
/// # Errors
/// A user's mistake.
pub(crate) fn check_start(job: &Job, asked: Option<&Option<String>>) -> Result<(), Failure> {
    let output = &job.training.output_dir;
    refuse_running(output)?;
    match asked {
        None if restarts() == 0 => refuse_earlier(output),
        Some(None) if !folder(output).is_dir() => Err(named(format!(
            "{} has no checkpoints; leave --resume out to start from the beginning",
            output.display()
        ))),
        _ => Ok(()),
    }
}

/// The newest intact checkpoint that this job has saved since it was launched.
fn newest_of_launch(preparation: &Preparation) -> Result<Option<Checkpoint>, Failure> {
    let root = folder(&preparation.job.training.output_dir);
    if !root.is_dir() {
        return Ok(None);
    }
    for checkpoint in Checkpoint::all(&root).map_err(named)?.into_iter().rev() {
        let Ok(saved) = JobState::read(&checkpoint) else { continue };
        if !saved.is_of_this_launch() {
            continue;
        }
        match checkpoint.verify() {
            Ok(()) => return Ok(Some(checkpoint)),
            Err(error) => {
                tracing::warn!("{error}; resuming from an older checkpoint, if there is one");
            }
        }
    }
    Ok(None)
}

/// How often a launcher has restarted this job.
pub(crate) fn restarts() -> u32 {
    std::env::var(RESTARTS).ok().and_then(|count| count.parse().ok()).unwrap_or(0)
}

/// Opens what the job goes on from: the checkpoint in its output folder that is called `what`, its
/// latest one, or a folder of DeepSpeed's.
///
/// # Errors
/// Always a user's mistake: there is none, it is damaged, or it is of another job.
pub(crate) fn open(preparation: &Preparation, what: Option<&str>) -> Result<Origin, Failure> {
    let what = what.filter(|tag| *tag != "latest");
    let own = folder(&preparation.job.training.output_dir);
    // A folder is meant by what is there, or can be no tag; a tag of this job's comes first.
    let is_folder = |what: &&str| {
        let path = Path::new(what);
        let is_own = what.parse::<Tag>().is_ok() && own.join(what).is_dir();
        !is_own && (path.exists() || path.components().count() > 1)
    };
    let origin = match what.filter(is_folder) {
        Some(path) => Origin::DeepSpeed(open_deepspeed(preparation, Path::new(path))?),
        None => Origin::Own(open_own(preparation, what)?),
    };
    let (step, max_steps) = (origin.step(), preparation.max_steps);
    if step > max_steps {
        return Err(named(format!(
            "it was saved after step {step}, and the job ends after step {max_steps}; raise \
             training.max_steps or training.epochs, whichever ends it"
        )));
    }
    Ok(origin)
}

fn open_deepspeed(preparation: &Preparation, path: &Path) -> Result<DeepSpeedCheckpoint, Failure> {
    if !path.is_dir() {
        return Err(named(format!(
            "{}: there is no such folder; give one that DeepSpeed saved, with `latest` in it, or the \
             name of a checkpoint in the output folder",
            path.display()
        )));
    }
    if path.join("manifest.json").exists() || folder(path).is_dir() {
        return Err(named(format!(
            "{} is this program's own: give the output folder as --output-dir, and --resume alone or \
             with the checkpoint's name",
            path.display()
        )));
    }
    refuse_earlier(&preparation.job.training.output_dir)?;
    let checkpoint = DeepSpeedCheckpoint::open(path, None).map_err(named)?;
    checkpoint.verify().map_err(named)?;
    let subject = &preparation.subject;
    let parameters = subject.model().parameters();
    let shapes = parameters.iter().map(|own| (own.path.as_str(), &own.shape[..]));
    let model = Published(subject.publication());
    let optimizer = &preparation.plan.optimizer;
    check_deepspeed_checkpoint(&checkpoint, &model, shapes, optimizer).map_err(named)?;
    Ok(checkpoint)
}

fn open_own(preparation: &Preparation, tag: Option<&str>) -> Result<Checkpoint, Failure> {
    let tag = tag.map(str::parse::<Tag>).transpose().map_err(named)?;
    let root = folder(&preparation.job.training.output_dir);
    let checkpoint = Checkpoint::open_intact(&root, tag.as_ref()).map_err(named)?;
    let in_checkpoint = |reason| named(format!("{}: {reason}", checkpoint.path().display()));
    let saved = JobState::read(&checkpoint).map_err(in_checkpoint)?;
    saved.compare(&JobState::of(preparation)).map_err(in_checkpoint)?;
    match tag {
        Some(_) => note_newer(&root, &checkpoint),
        None => check_record(preparation, &checkpoint)?,
    }
    Ok(checkpoint)
}

/// The latest checkpoint is not what a run that went back and was killed before it saved would go on
/// from: its record then ends before that step.
fn check_record(preparation: &Preparation, checkpoint: &Checkpoint) -> Result<(), Failure> {
    let path = preparation.job.training.output_dir.join("metrics.jsonl");
    if !path.exists() {
        return Ok(());
    }
    let last = read_metrics(&path).map_err(named)?.iter().map(Row::step).max().unwrap_or(0);
    let step = checkpoint.run().step;
    if last >= step {
        return Ok(());
    }
    Err(named(format!(
        "the latest checkpoint is of step {step}, and {} ends at step {last}: a run went back and ended \
         before it saved, or its last rows were lost; say which checkpoint to go on from, such as --resume {}",
        path.display(),
        checkpoint.tag()
    )))
}

fn named(error: impl Display) -> Failure {
    Failure::mistake(format!("--resume: {error}"))
}

/// Brings a rank to where the run was when its checkpoint was saved, and returns what its training loop knew.
///
/// # Errors
/// When the checkpoint is not one of this model, or has a place that the data has not.
pub(crate) fn go_on<B: OptimizerOps, M: AutodiffModule<Training<B>>, T>(
    engine: &mut Engine<B, M>,
    origin: &Origin,
    source: &mut impl BatchSource<T>,
    preparation: &Preparation,
) -> Result<LoopState, RankError> {
    match origin {
        Origin::Own(checkpoint) => go_on_from_own(engine, checkpoint, source),
        Origin::DeepSpeed(checkpoint) => {
            go_on_from_deepspeed(engine, checkpoint, source, preparation)?;
            Ok(LoopState::default())
        }
    }
}

fn go_on_from_own<B: OptimizerOps, M: AutodiffModule<Training<B>>, T>(
    engine: &mut Engine<B, M>,
    checkpoint: &Checkpoint,
    source: &mut impl BatchSource<T>,
) -> Result<LoopState, RankError> {
    let states = engine.load_checkpoint(checkpoint, LoadPlan::ALL)?;
    // A rank that is new goes to where all of them were.
    let place = states.rank_states.get(engine.rank()).or(states.rank_states.first());
    if let Some(place) = place {
        source.seek(place).map_err(|cause| RankError::Place { cause })?;
    }
    if engine.rank() == 0 {
        tracing::info!("resuming from {}", checkpoint.path().display());
    }
    Ok(states.loop_state)
}

/// DeepSpeed does not save the place in the data: it is that of this job after as many steps.
fn go_on_from_deepspeed<B: OptimizerOps, M: AutodiffModule<Training<B>>, T>(
    engine: &mut Engine<B, M>,
    checkpoint: &DeepSpeedCheckpoint,
    source: &mut impl BatchSource<T>,
    preparation: &Preparation,
) -> Result<(), RankError> {
    let model = Published(preparation.subject.publication());
    engine.load_deepspeed_checkpoint(checkpoint, &model, LoadPlan::ALL)?;
    let micro_batch = preparation.plan.batch.micro_batch_size * engine.group().world_size();
    for step in 0..engine.global_steps() {
        let samples = preparation.batch_sizes.at(step as usize).train_batch_size;
        let next = NextStep { micro_batches: samples / micro_batch, applied_steps: step };
        source.next_step(next).map_err(|cause| RankError::Place { cause })?;
    }
    if engine.rank() == 0 {
        tracing::info!(
            "resuming from step {} of {}, saved by DeepSpeed {}; random streams start anew",
            engine.global_steps(),
            checkpoint.path().display(),
            checkpoint.version()
        );
    }
    Ok(())
}

/// The names of a model's parameters in `transformers`.
struct Published(Publication);

impl TorchModel for Published {
    fn name(&self, path: &str) -> String {
        self.0.name(path)
    }
}

/// A run that starts from the beginning has no place for checkpoints where an earlier one's are:
/// none is ever overwritten.
///
/// # Errors
/// A user's mistake, if there are some.
fn refuse_earlier(output: &Path) -> Result<(), Failure> {
    let root = folder(output);
    let earlier = match root.is_dir() {
        true => Checkpoint::all(&root).map_err(Failure::mistake)?,
        false => Vec::new(),
    };
    let Some(last) = earlier.last() else { return Ok(()) };
    Err(Failure::mistake(format!(
        "training.output_dir: {} has the checkpoints of an earlier run; go on from the last with \
         --resume alone, move them away, or give another folder",
        last.path().parent().unwrap_or(&root).display()
    )))
}

/// Later checkpoints stay.
fn note_newer(root: &Path, checkpoint: &Checkpoint) {
    let step = checkpoint.run().step;
    let newer = Checkpoint::all(root).unwrap_or_default();
    let newer = newer.iter().filter(|other| other.run().step > step).map(|it| it.tag().as_str());
    let newer: Vec<_> = newer.collect();
    if !newer.is_empty() {
        tracing::warn!(
            "there are newer checkpoints, and none is overwritten: {} stay, and this run saves under \
             names such as {}",
            newer.join(", "),
            Tag::of_visit(step, 2)
        );
    }
}
