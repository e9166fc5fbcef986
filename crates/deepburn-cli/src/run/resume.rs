//! Resumes a job from one of its own checkpoints, or from a DeepSpeed checkpoint.
//!
//! Three rules determine the checkpoint that a run resumes from:
//!
//! - No checkpoint is ever overwritten. A run without `--resume` fails if the output folder has
//!   checkpoints of an earlier run. A run that resumes from an older checkpoint keeps the newer
//!   ones, and saves under names such as `step-00001000.2`.
//! - Resuming fails if the model, the training data, the sample order or the optimizer type differ
//!   from the checkpoint's ([`JobState::compare`]). Other settings may change. A change that
//!   affects later steps, such as another learning rate, is logged as a warning. DeepSpeed
//!   checkpoints do not record the job, so only the model and the optimizer states are compared.
//! - A restart by the launcher resumes from the newest intact checkpoint of the same launch, whose
//!   start time is in the checkpoint. Checkpoints of earlier runs in the folder may belong to a
//!   branch that the user has abandoned. They are only used if `--resume` names them ([`select`]).
//!
//! | Command | Checkpoint |
//! |---|---|
//! | `--resume` | the latest checkpoint in the output folder |
//! | `--resume step-00001000`, or its path | this checkpoint in the output folder |
//! | `--resume path/to/deepspeed` | the checkpoint that DeepSpeed's file `latest` names |
//! | restart by `deepburn launch` | the newest intact checkpoint of this launch, or else the one of the command |

use std::fmt::Display;
use std::fs;
use std::path::{Path, PathBuf};

use burn::module::AutodiffModule;
use deepburn::checkpoint::{BaseValues, Checkpoint, ElementType, Retention, Tag};
use deepburn::deepspeed::DeepSpeedCheckpoint;
use deepburn::metrics::{MetricsRow, read_metrics};
use deepburn::ops::OptimizerOps;
use deepburn::zero::Training;
use deepburn::{
    BatchSource, BoxError, CheckpointPlan, ClientStates, Engine, LoadPlan, LoopState, NextStep,
    check_deepspeed_checkpoint, check_optimizer_states,
};
use deepburn_chat::Day;
use deepburn_config::{Job, Precision};
use serde_json::json;

use crate::failure::Failure;
use crate::job::param_groups::parameter_updates;
use crate::run::base_model::set_base;
use crate::run::job_state::JobState;
use crate::run::launcher_env::restarts;
use crate::run::output_folder::refuse_running;
use crate::run::preparation::{Preparation, Resumed};
use crate::run::training_length::Progress;

/// Returns the checkpoint folder of the output folder `output`.
pub(crate) fn folder(output: &Path) -> PathBuf {
    output.join("checkpoints")
}

/// A checkpoint that a run resumes from.
///
/// The checkpoint is open and verified, so that a damaged file is reported before training starts.
pub(crate) enum ResumedCheckpoint {
    /// A checkpoint that this program saved.
    Own(Box<Checkpoint>),
    /// A checkpoint that DeepSpeed saved.
    DeepSpeed(Box<DeepSpeedCheckpoint>),
}

impl ResumedCheckpoint {
    /// Returns the number of optimizer steps up to the checkpoint.
    pub(crate) fn step(&self) -> u64 {
        match self {
            Self::Own(checkpoint) => checkpoint.run().step,
            Self::DeepSpeed(checkpoint) => checkpoint.counters().global_steps,
        }
    }

    /// Returns whether the checkpoint omits parameters of the pretrained model.
    pub(crate) fn omits_parameters(&self) -> bool {
        matches!(self, Self::Own(checkpoint) if checkpoint.omitted().next().is_some())
    }

    /// Returns the number of samples up to the checkpoint, over all ranks.
    ///
    /// The x axis of monitors continues at this number.
    pub(crate) fn samples(&self) -> u64 {
        match self {
            Self::Own(checkpoint) => {
                ClientStates::read(checkpoint).map_or(0, |states| states.global_samples)
            }
            Self::DeepSpeed(checkpoint) => checkpoint.counters().global_samples,
        }
    }
}

/// Returns the schedule of saves and the retention of checkpoints.
///
/// The client state of a checkpoint is the [`JobState`]. A run that resumes compares it with its
/// own.
pub(crate) fn plan(preparation: &Preparation) -> CheckpointPlan {
    let training = &preparation.job.training;
    CheckpointPlan {
        root: folder(&training.output_dir),
        save_steps: preparation.interval(training.saving.save_steps),
        asynchronous: training.saving.async_save,
        retention: Retention {
            keep_last: training.saving.save_total_limit.and_then(|limit| limit.try_into().ok()),
            keep_best: training.saving.save_best_limit.unwrap_or(0),
        },
        job: preparation.subject.info().architecture().name().to_owned(),
        client_state: json!(JobState::of(preparation)),
    }
}

/// A checkpoint that a run resumes from, before it is compared with the job.
pub(crate) struct Selected {
    /// The checkpoint.
    checkpoint: ResumedCheckpoint,
    /// Why it was selected.
    reason: SelectionReason,
}

/// Why a checkpoint was selected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SelectionReason {
    /// It is the newest checkpoint of this launch.
    Restart,
    /// It is the latest checkpoint in the output folder.
    Latest,
    /// `--resume` names it.
    Named,
}

impl Selected {
    /// Returns what the data and the length of the run take from the checkpoint.
    ///
    /// # Errors
    /// Returns a user's mistake if the checkpoint does not identify its job.
    pub(crate) fn resumed(&self) -> Result<Resumed, Failure> {
        let day = match &self.checkpoint {
            ResumedCheckpoint::Own(checkpoint) => {
                let day = JobState::read(checkpoint).and_then(|state| state.day());
                day.map_err(|error| mistake(format!("{}: {error}", checkpoint.path().display())))?
            }
            ResumedCheckpoint::DeepSpeed(_) => None,
        };
        Ok(Resumed { progress: self.progress(), day })
    }

    /// Returns the steps and samples of the checkpoint; `None` if it does not record them.
    fn progress(&self) -> Option<Progress> {
        let (samples, position) = match &self.checkpoint {
            ResumedCheckpoint::Own(checkpoint) => {
                let states = ClientStates::read(checkpoint).ok()?;
                // All ranks have the same position. It has another form for data whose steps do not
                // end with the epochs, and is `None` here.
                let position = states.rank_states.into_iter().next();
                let position = position.and_then(|it| serde_json::from_value(it).ok());
                (states.global_samples, position)
            }
            ResumedCheckpoint::DeepSpeed(checkpoint) => {
                (checkpoint.counters().global_samples, None)
            }
        };
        let samples = usize::try_from(samples).ok().filter(|samples| *samples > 0)?;
        Some(Progress { step: usize::try_from(self.checkpoint.step()).ok()?, samples, position })
    }

    /// Returns the checkpoint after comparing it with the job.
    ///
    /// # Errors
    /// Returns a user's mistake if another job saved the checkpoint, or if its step is beyond the
    /// end of the job.
    pub(crate) fn checked(self, preparation: &Preparation) -> Result<ResumedCheckpoint, Failure> {
        let Self { mut checkpoint, reason } = self;
        match &mut checkpoint {
            // This launch saved it, so it is of the same job.
            _ if reason == SelectionReason::Restart => return Ok(checkpoint),
            ResumedCheckpoint::Own(checkpoint) => check_own(preparation, checkpoint, reason)?,
            ResumedCheckpoint::DeepSpeed(checkpoint) => check_deepspeed(preparation, checkpoint)?,
        }
        // A checkpoint beyond the end of the job is an error. A run without steps would export a
        // model that the job file does not describe.
        let (step, max_steps) = (checkpoint.step(), preparation.length.max_steps);
        if step > max_steps {
            return Err(mistake(format!(
                "the checkpoint is from step {step}, but the job ends after step {max_steps}; raise \
                 training.max_steps or training.epochs"
            )));
        }
        Ok(checkpoint)
    }
}

/// Selects the checkpoint that the job resumes from, if it resumes, before the data is read. The
/// checkpoint is verified.
///
/// After a restart by the launcher this is the newest intact checkpoint since the launch, because
/// the job has made progress since its command line was written. If there is none yet, or without a
/// launcher, it is the checkpoint that `--resume` names. `resume` is that option with its optional
/// value.
///
/// # Errors
/// Returns the errors of [`check_start`] and [`open`].
pub(crate) fn select(
    job: &Job,
    resume: Option<&Option<String>>,
) -> Result<Option<Selected>, Failure> {
    check_start(job, resume)?;
    let output = &job.training.output_dir;
    if restarts() > 0
        && let Some(checkpoint) = newest_of_launch(output)?
    {
        let checkpoint = ResumedCheckpoint::Own(Box::new(checkpoint));
        return Ok(Some(Selected { checkpoint, reason: SelectionReason::Restart }));
    }
    resume.map(|tag| open(output, tag.as_deref())).transpose()
}

/// Checks the output folder before the data is read.
///
/// # Errors
/// Returns a user's mistake if another run writes to the folder, if it has checkpoints of an
/// earlier run and `--resume` is not given, or if it has no checkpoints and `--resume` is given
/// without a value.
fn check_start(job: &Job, resume: Option<&Option<String>>) -> Result<(), Failure> {
    let output = &job.training.output_dir;
    refuse_running(output)?;
    match resume {
        None if restarts() == 0 => refuse_earlier(output),
        Some(None) if !folder(output).is_dir() => Err(mistake(format!(
            "{} has no checkpoints; remove --resume to start from the beginning",
            output.display()
        ))),
        _ => Ok(()),
    }
}

/// Returns the newest intact checkpoint that this job has saved since its launch. Damaged
/// checkpoints are logged and skipped, because the failure that led to the restart may have
/// interrupted the last save.
///
/// # Errors
/// Returns a user's mistake if the folder of checkpoints cannot be read.
fn newest_of_launch(output: &Path) -> Result<Option<Checkpoint>, Failure> {
    let root = folder(output);
    if !root.is_dir() {
        return Ok(None);
    }
    for checkpoint in Checkpoint::all(&root).map_err(mistake)?.into_iter().rev() {
        // A checkpoint of another program is of no launch.
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

/// Returns the day that chat templates printed in the run that `--resume` would continue; `None` if
/// there is no such run, or if it does not record the day.
pub(crate) fn day_of_latest(output: &Path) -> Option<Day> {
    let checkpoint = Checkpoint::open(&folder(output), None).ok()?;
    JobState::read(&checkpoint).ok()?.day().ok()?
}

/// Opens the checkpoint that `--resume` names: the tag or the path of a checkpoint in the output
/// folder, its latest checkpoint, or a folder that DeepSpeed saved.
///
/// # Errors
/// Returns a user's mistake if there is no such checkpoint, or if it is damaged.
fn open(output: &Path, what: Option<&str>) -> Result<Selected, Failure> {
    // Users of DeepSpeed may name its file.
    let what = what.filter(|tag| *tag != "latest");
    let own = folder(output);
    let what = what.map(|what| tag_of_path(what, &own).unwrap_or(what).trim_end_matches('/'));
    // A tag of this job comes first. Any other value is a folder if it exists or has more than one
    // path component.
    let is_folder = |what: &&str| {
        let path = Path::new(what);
        let is_own = what.parse::<Tag>().is_ok() && own.join(what).is_dir();
        !is_own && (path.exists() || path.components().count() > 1)
    };
    let checkpoint = match what.filter(is_folder) {
        Some(path) => {
            ResumedCheckpoint::DeepSpeed(Box::new(open_deepspeed(output, Path::new(path))?))
        }
        None => {
            // `None` is the latest one.
            let tag = what.map(str::parse::<Tag>).transpose().map_err(mistake)?;
            ResumedCheckpoint::Own(Box::new(
                Checkpoint::open_intact(&own, tag.as_ref()).map_err(mistake)?,
            ))
        }
    };
    let reason = if what.is_some() { SelectionReason::Named } else { SelectionReason::Latest };
    Ok(Selected { checkpoint, reason })
}

/// Returns the tag if `path` is a checkpoint in the folder `own`. Messages show checkpoints as
/// paths, which users copy.
fn tag_of_path<'a>(path: &'a str, own: &Path) -> Option<&'a str> {
    let path = Path::new(path);
    let (parent, tag) = (path.parent()?, path.file_name()?.to_str()?);
    let is_own = fs::canonicalize(parent).ok()? == fs::canonicalize(own).ok()?;
    (is_own && tag.parse::<Tag>().is_ok() && path.join("manifest.json").exists()).then_some(tag)
}

/// Opens a DeepSpeed checkpoint and verifies its files.
fn open_deepspeed(output: &Path, path: &Path) -> Result<DeepSpeedCheckpoint, Failure> {
    if !path.is_dir() {
        return Err(mistake(format!(
            "no such folder: {}; give a folder that DeepSpeed saved, with its file `latest`, or the name of a \
             checkpoint in the output folder",
            path.display()
        )));
    }
    let is_own = |folder: &Path| folder.join("manifest.json").exists();
    // The file `latest` of both programs begins with the name of a checkpoint.
    let latest = fs::read_to_string(path.join("latest")).unwrap_or_default();
    let holds_own = latest.lines().next().is_some_and(|name| is_own(&path.join(name.trim())));
    if is_own(path) || folder(path).is_dir() || holds_own {
        return Err(mistake(format!(
            "{} is a DeepBurn checkpoint, not a DeepSpeed checkpoint; give its output folder as --output-dir, and \
             --resume alone or with the name of the checkpoint",
            path.display()
        )));
    }
    // A folder with checkpoints of its own resumes from these.
    refuse_earlier(output)?;
    let checkpoint = DeepSpeedCheckpoint::open(path, None).map_err(mistake)?;
    // All files are read once now, because a rank that failed later would end the run.
    checkpoint.verify().map_err(mistake)?;
    Ok(checkpoint)
}

/// Checks that a DeepSpeed checkpoint has the job's model and optimizer states.
fn check_deepspeed(
    preparation: &Preparation,
    checkpoint: &DeepSpeedCheckpoint,
) -> Result<(), Failure> {
    let architecture = preparation.subject.info().architecture();
    let (parameters, updates) =
        (architecture.parameters(), parameter_updates(architecture, &preparation.plan)?);
    let known = parameters.iter().zip(&updates).map(|(own, update)| {
        (own.path.as_str(), &own.shape[..], update.as_ref().map(|update| &update.optimizer))
    });
    let map = architecture.weight_map();
    check_deepspeed_checkpoint(checkpoint, &map, known).map_err(mistake)
}

/// Checks that a checkpoint of this program was saved by the same job.
fn check_own(
    preparation: &Preparation,
    checkpoint: &mut Checkpoint,
    reason: SelectionReason,
) -> Result<(), Failure> {
    let path = checkpoint.path().to_owned();
    let in_checkpoint = |reason| mistake(format!("{}: {reason}", path.display()));
    let saved = JobState::read(checkpoint).map_err(in_checkpoint)?;
    // First, because other data or another model explains all further differences.
    saved.compare(&JobState::of(preparation)).map_err(in_checkpoint)?;
    check_states(preparation, checkpoint)?;
    check_base(preparation, checkpoint).map_err(in_checkpoint)?;
    match reason {
        SelectionReason::Latest => check_record(preparation, checkpoint),
        SelectionReason::Named | SelectionReason::Restart => {
            warn_of_newer(&folder(&preparation.job.training.output_dir), checkpoint);
            Ok(())
        }
    }
}

/// Checks that the optimizer states of the checkpoint can be loaded with the parameter groups of
/// the job.
///
/// # Errors
/// Returns a user's mistake that names the first parameter whose states cannot be loaded.
fn check_states(preparation: &Preparation, checkpoint: &Checkpoint) -> Result<(), Failure> {
    let architecture = preparation.subject.info().architecture();
    let (parameters, updates) =
        (architecture.parameters(), parameter_updates(architecture, &preparation.plan)?);
    let known = parameters
        .iter()
        .zip(&updates)
        .map(|(own, update)| (own.path.as_str(), update.as_ref().map(|update| &update.optimizer)));
    check_optimizer_states(checkpoint, known).map_err(mistake)
}

/// Checks that the pretrained model of the job has the parameters that `checkpoint` omits, with the
/// same values.
///
/// # Errors
/// Returns the first difference, as the reason in an error message.
fn check_base(preparation: &Preparation, checkpoint: &mut Checkpoint) -> Result<(), String> {
    let Some((entry, base)) = checkpoint.omitted().next() else { return Ok(()) };
    let Some(folder) = &preparation.pretrained else {
        return Err(format!(
            "it omits the frozen parameter {}, which is in the pretrained model of the run; set model.pretrained to this \
             model",
            entry.path
        ));
    };
    let element = match preparation.plan.precision.compute {
        Precision::Fp32 => ElementType::F32,
        Precision::Fp16 => ElementType::F16,
        Precision::Bf16 => ElementType::Bf16,
    };
    // Hashes are of the values as a run holds them, which depends on its precision.
    let held = BaseValues { element, ..base.clone() };
    base.check(&entry.path, &held).map_err(|error| error.to_string())?;
    let of_key = |reason: String| format!("{reason} (model.pretrained is {})", folder.display());
    let opened = preparation.subject.info().architecture().base_model(folder);
    set_base(checkpoint, opened.map_err(|error| of_key(error.to_string()))?);
    checkpoint.verify_base().map_err(|error| of_key(error.to_string()))
}

/// Refuses the latest checkpoint if `metrics.jsonl` ends before its step.
///
/// A run that resumes from an older checkpoint removes later rows from `metrics.jsonl`. If it is
/// killed before it saves, the latest checkpoint in the folder is from the run before it. The user
/// has to choose which run to continue.
fn check_record(preparation: &Preparation, checkpoint: &Checkpoint) -> Result<(), Failure> {
    let path = preparation.job.training.output_dir.join("metrics.jsonl");
    if !path.exists() {
        return Ok(());
    }
    let last =
        read_metrics(&path).map_err(mistake)?.iter().map(MetricsRow::step).max().unwrap_or(0);
    let step = checkpoint.run().step;
    if last >= step {
        return Ok(());
    }
    Err(mistake(format!(
        "the latest checkpoint is from step {step}, but {} ends at step {last}: a run that resumed from an older \
         checkpoint ended before it saved, or the last rows were lost; name the checkpoint to resume from, such as \
         --resume {}",
        path.display(),
        checkpoint.tag()
    )))
}

/// Returns the failure of a wrong `--resume`.
///
/// Every message starts with the option, because most causes are in the command line rather than in
/// the job file.
fn mistake(error: impl Display) -> Failure {
    Failure::mistake(format!("--resume: {error}"))
}

/// Restores the engine and the data loader of a rank from `checkpoint`, and returns the state of
/// its training loop.
///
/// All ranks call it together. Each of them restores its own shard of the states. From a checkpoint
/// of this program, weights, optimizer states, schedule, loss scale, random-number streams,
/// data-loader position and loop state are restored, so that the run continues bit for bit. The
/// number of ranks and the ZeRO stage may differ from the checkpoint's.
///
/// # Errors
/// Returns an error if the checkpoint is from another model, or if its data-loader position does
/// not exist in this data.
pub(crate) fn restore<B: OptimizerOps, M: AutodiffModule<Training<B>>, T>(
    engine: &mut Engine<B, M>,
    checkpoint: &ResumedCheckpoint,
    source: &mut impl BatchSource<T>,
    preparation: &Preparation,
) -> Result<LoopState, BoxError> {
    let checkpoint = match checkpoint {
        ResumedCheckpoint::Own(checkpoint) => checkpoint,
        ResumedCheckpoint::DeepSpeed(checkpoint) => {
            restore_deepspeed(engine, checkpoint, source, preparation)?;
            return Ok(LoopState::default());
        }
    };
    let states = engine.load_checkpoint(checkpoint, LoadPlan::ALL)?;
    // All ranks have the same data-loader position, so an additional rank uses the first rank's.
    let position = states.rank_states.get(engine.data_rank()).or(states.rank_states.first());
    if let Some(position) = position {
        source.seek(position).map_err(at_position)?;
    }
    if engine.rank() == 0 {
        tracing::info!("resuming from {}", checkpoint.path().display());
    }
    Ok(states.loop_state)
}

/// Restores a rank from a DeepSpeed checkpoint.
///
/// DeepSpeed does not save the data-loader position. The data loader is fast-forwarded by the same
/// number of steps.
fn restore_deepspeed<B: OptimizerOps, M: AutodiffModule<Training<B>>, T>(
    engine: &mut Engine<B, M>,
    checkpoint: &DeepSpeedCheckpoint,
    source: &mut impl BatchSource<T>,
    preparation: &Preparation,
) -> Result<(), BoxError> {
    let map = preparation.subject.info().architecture().weight_map();
    engine.load_deepspeed_checkpoint(checkpoint, &map, LoadPlan::ALL)?;
    // A schedule of batch sizes gives steps different numbers of micro-batches.
    let micro_batch = preparation.plan.batch.micro_batch_size * engine.data_ranks();
    for step in 0..engine.global_steps() {
        let samples = preparation.length.batch_sizes.at(step as usize).train_batch_size;
        let next = NextStep { micro_batches: samples / micro_batch, applied_steps: step };
        source.next_step(next).map_err(at_position)?;
    }
    if engine.rank() == 0 {
        tracing::info!(
            "resuming from step {} of {}, saved by DeepSpeed {}; random-number streams are new",
            engine.global_steps(),
            checkpoint.path().display(),
            checkpoint.version()
        );
    }
    Ok(())
}

/// Returns the error of a data loader that cannot seek to its position.
fn at_position(cause: BoxError) -> String {
    format!("--resume: data-loader position: {cause}")
}

/// Refuses an output folder with checkpoints of an earlier run, which a new run would overwrite.
///
/// # Errors
/// Returns a user's mistake if there are such checkpoints, or if the folder cannot be read.
fn refuse_earlier(output: &Path) -> Result<(), Failure> {
    let root = folder(output);
    let earlier = match root.is_dir() {
        true => Checkpoint::all(&root).map_err(Failure::mistake)?,
        false => Vec::new(),
    };
    let Some(last) = earlier.last() else { return Ok(()) };
    Err(Failure::mistake(format!(
        "training.output_dir: {} has the checkpoints of an earlier run; resume from the last with --resume, move \
         them away, or give another folder",
        last.path().parent().unwrap_or(&root).display()
    )))
}

/// Warns of checkpoints that are newer than the one to resume from. They are kept.
fn warn_of_newer(root: &Path, checkpoint: &Checkpoint) {
    let step = checkpoint.run().step;
    // Only a warning depends on it, so an unreadable folder is not an error here.
    let newer = Checkpoint::all(root).unwrap_or_default();
    let newer = newer.iter().filter(|other| other.run().step > step).map(|it| it.tag().as_str());
    let newer: Vec<_> = newer.collect();
    if !newer.is_empty() {
        tracing::warn!(
            "newer checkpoints are not overwritten: {} stay, and this run saves under names such as {}",
            newer.join(", "),
            Tag::numbered(step, 2)
        );
    }
}
