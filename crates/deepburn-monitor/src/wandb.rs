//! W&B offline runs: a folder that `wandb sync` uploads.
//!
//! Main type: [`WandbRun`]. It writes what W&B's own client writes in its offline mode, and never
//! uses a network:
//!
//! ```text
//! wandb/offline-run-20261126_120000-x3k9q2ab/run-x3k9q2ab.wandb
//! ```
//!
//! The file has a header, the run with its configuration, a history row and the new summary for
//! each step, and the exit status. Times in names are in UTC. Names of metrics follow the W&B
//! integration of `transformers`.
//!
//! W&B has one row for a step, so the row of a step is held until the next one begins: the
//! evaluation after the step belongs to it. A killed run lacks the row that was held, and the exit
//! status; W&B shows such a run as failed.

mod earlier_run;
mod record;
mod transaction_log;

#[cfg(test)]
mod tests;

use std::fs;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::{Instant, SystemTime};

use chrono::{DateTime, TimeDelta, Utc};
use serde_json::Value;

use self::earlier_run::{EarlierRun, folder_name, log_name};
use self::record::{
    ExitRecord, HeaderRecord, HistoryRecord, HistoryStep, RecordKind, RunRecord, Timestamp,
    UpdateRecord, VersionInfo, WandbItem,
};
use self::transaction_log::TransactionLog;
use crate::error::MonitorError;
use crate::metrics::{EvalRow, StepRow};
use crate::tensorboard::{host_name, now};

/// The number of optimizer steps of a row.
const STEP: &str = "_step";
/// The time of a row in seconds since 1970.
const TIMESTAMP: &str = "_timestamp";
/// The seconds from the start of the run to a row.
const RUNTIME: &str = "_runtime";

/// The oldest W&B server that can read the file, as W&B's client writes it.
const MIN_CONSUMER: &str = "0.70.0";

/// The number of characters of a run ID, as in W&B.
const ID_LENGTH: usize = 8;

/// The identity and the configuration of a W&B run.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct WandbOptions {
    /// The project.
    pub project: String,
    /// The team or user; `None` for the default of whoever uploads the run.
    pub team: Option<String>,
    /// The group of the run.
    pub group: Option<String>,
    /// The displayed name of the run.
    pub name: String,
    /// The program that writes the run, with its version.
    pub producer: String,
    /// The configuration, an object.
    pub config: Value,
    /// Whether the loss scale is written (in fp16).
    pub loss_scale: bool,
    /// The number of steps after which the run resumes; 0 for a new run.
    pub resumed_after: u64,
    /// Whether the run continues the newest run in the folder, if there is one.
    pub continues: bool,
}

/// A W&B run that is being written.
#[derive(Debug)]
pub struct WandbRun {
    log: TransactionLog,
    loss_scale: bool,
    start: Instant,
    /// The seconds that earlier parts of the run took.
    earlier_seconds: f64,
    /// The row that is not written yet.
    held: Option<HistoryRecord>,
    /// Whether the exit status is written.
    is_finished: bool,
    /// Whether the run has earlier parts.
    is_continued: bool,
    repeats_uploaded_steps: bool,
}

impl WandbRun {
    /// Creates the folder of a run in `folder`, which is W&B's folder `wandb`.
    ///
    /// If the run continues an earlier one, rows of later steps are removed from the earlier
    /// folders, unless they are uploaded
    /// ([`repeats_uploaded_steps`](Self::repeats_uploaded_steps)).
    ///
    /// # Errors
    /// Returns an error if a folder or a file cannot be created, or if an earlier file cannot be
    /// read or shortened. A full disk is not an error: what does not fit waits for room.
    pub fn create(folder: &Path, options: &WandbOptions) -> Result<Self, MonitorError> {
        let earlier = match options.continues {
            true => EarlierRun::rewind(folder, options.resumed_after)?,
            false => None,
        };
        let time = DateTime::from(SystemTime::now());
        let is_continued = earlier.is_some();
        let earlier = earlier.unwrap_or_else(|| EarlierRun { id: new_id(), ..Default::default() });
        let path = create_folder(folder, time, &earlier.id)?.join(log_name(&earlier.id));
        let log = TransactionLog::create(&path);
        let log = log.map_err(|source| MonitorError::new("create", &path, source))?;
        let mut run = Self {
            log,
            loss_scale: options.loss_scale,
            start: Instant::now(),
            earlier_seconds: earlier.runtime,
            held: None,
            is_finished: false,
            is_continued,
            // Without an uploaded folder, this compares `None`, which is less than any step.
            repeats_uploaded_steps: earlier.uploaded_step > Some(options.resumed_after),
        };
        let header = VersionInfo {
            producer: options.producer.clone(),
            min_consumer: MIN_CONSUMER.to_owned(),
        };
        let records = vec![
            RecordKind::Header(HeaderRecord { version_info: Some(header) }),
            RecordKind::Run(run_record(options, &earlier, is_continued, time)),
        ];
        match run.append(records) {
            Err(error) if error.is_disk_full() => {}
            written => written?,
        }
        run.held = earlier.last_row;
        Ok(run)
    }

    /// Returns the folder of the run.
    pub fn folder(&self) -> &Path {
        self.log.path().parent().unwrap_or(Path::new(""))
    }

    /// Returns the folder to pass to `wandb sync`: the run's own, or the folder of all runs if the
    /// run has earlier parts, which W&B has to upload first.
    pub fn upload_folder(&self) -> &Path {
        let folder = self.folder();
        match self.is_continued {
            true => folder.parent().unwrap_or(folder),
            false => folder,
        }
    }

    /// Returns whether the run resumes before steps that are already uploaded. W&B then has both
    /// rows of each of these steps.
    pub fn repeats_uploaded_steps(&self) -> bool {
        self.repeats_uploaded_steps
    }

    /// Begins the row of a step that ended after `samples` training samples over all ranks, and
    /// writes the row before it.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written. Rows that do not fit on the disk are kept
    /// and written with the next one.
    pub fn step(&mut self, samples: u64, row: &StepRow) -> Result<(), MonitorError> {
        let mut items = vec![
            WandbItem::number("train/loss", row.loss),
            WandbItem::number("train/learning_rate", row.lr),
            WandbItem::number("train/tokens_per_second", row.tokens_per_second),
            WandbItem::count("train/samples", samples),
        ];
        let known = [
            ("loss_scale", self.loss_scale.then_some(row.loss_scale)),
            ("grad_norm", row.grad_norm),
            ("rewards/chosen", row.rewards_chosen),
            ("rewards/rejected", row.rewards_rejected),
            ("rewards/margins", row.rewards_margins),
            ("rewards/accuracies", row.rewards_accuracies),
        ];
        items.extend(known_items("train", &known));
        self.add(row.step, items)
    }

    /// Adds an evaluation to the row of its step.
    ///
    /// # Errors
    /// Returns the same errors as [`step`](Self::step).
    pub fn evaluation(&mut self, row: &EvalRow) -> Result<(), MonitorError> {
        self.add(row.step, evaluation_items("eval", row))
    }

    /// Adds the evaluation on the test split to the summary.
    ///
    /// # Errors
    /// Returns the same errors as [`step`](Self::step).
    pub fn test(&mut self, row: &EvalRow) -> Result<(), MonitorError> {
        self.write_held()?;
        let update = evaluation_items("test", row);
        self.append(vec![RecordKind::Summary(UpdateRecord { update })])
    }

    /// Writes the last row and the exit status of the program. Only the first call has an effect.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn finish(&mut self, exit_code: i32) -> Result<(), MonitorError> {
        if self.is_finished {
            return Ok(());
        }
        // Set first, so that `drop` does not write a second exit status after an error.
        self.is_finished = true;
        // Written together with the end, so that a run that has ended has its last row.
        let held = self.held.take().map(row_records).unwrap_or_default();
        let runtime = self.seconds() as i32;
        let duration = WandbItem {
            key: String::new(),
            nested_key: vec!["_wandb".to_owned(), "runtime".to_owned()],
            value_json: runtime.to_string(),
        };
        let end = [
            RecordKind::Summary(UpdateRecord { update: vec![duration] }),
            RecordKind::Exit(ExitRecord { exit_code, runtime }),
        ];
        self.append(held.into_iter().chain(end).collect())
    }

    /// Adds values to the row of a step. A later step begins a new row.
    fn add(&mut self, step: u64, items: Vec<WandbItem>) -> Result<(), MonitorError> {
        let is_new = self.held.as_ref().is_none_or(|held| held.step() < step);
        // The error is returned at the end, so that the new values are held in any case.
        let written = if is_new { self.write_held() } else { Ok(()) };
        let times =
            [WandbItem::number(TIMESTAMP, now()), WandbItem::number(RUNTIME, self.seconds())];
        let held = self.held.get_or_insert_with(|| HistoryRecord {
            item: vec![WandbItem::count(STEP, step)],
            // No run reaches more steps than the field can hold.
            step: Some(HistoryStep { num: i64::try_from(step).unwrap_or(i64::MAX) }),
        });
        for item in times.into_iter().chain(items) {
            // An evaluation that is repeated replaces its values.
            held.item.retain(|known| known.key != item.key);
            held.item.push(item);
        }
        written
    }

    fn write_held(&mut self) -> Result<(), MonitorError> {
        match self.held.take() {
            Some(row) => self.append(row_records(row)),
            None => Ok(()),
        }
    }

    /// Returns the seconds from the start of the run.
    fn seconds(&self) -> f64 {
        self.start.elapsed().as_secs_f64() + self.earlier_seconds
    }

    fn append(&mut self, records: Vec<RecordKind>) -> Result<(), MonitorError> {
        let written = self.log.append(records);
        written.map_err(|source| MonitorError::new("write", self.log.path(), source))
    }
}

impl Drop for WandbRun {
    /// Records a run that was not finished as failed, with W&B's exit code for a run without one.
    fn drop(&mut self) {
        // An error of the disk cannot be returned here, and the run has already failed for another
        // reason.
        _ = self.finish(1);
    }
}

/// Returns the row of a step and the summary after it, which W&B does not compute. One write has
/// both, so a killed run has the summary of its last row.
fn row_records(row: HistoryRecord) -> Vec<RecordKind> {
    let summary = UpdateRecord { update: row.item.clone() };
    vec![RecordKind::History(row), RecordKind::Summary(summary)]
}

/// Returns the record of the run.
fn run_record(
    options: &WandbOptions,
    earlier: &EarlierRun,
    is_continued: bool,
    time: DateTime<Utc>,
) -> RunRecord {
    let config = options.config.as_object().into_iter().flatten();
    // The row of the resumed step is in this folder if it could be moved here.
    let next = match (options.resumed_after, &earlier.last_row) {
        (0, _) => 0,
        (step, Some(_)) => step,
        (step, None) => step + 1,
    };
    RunRecord {
        run_id: earlier.id.clone(),
        entity: options.team.clone().unwrap_or_default(),
        project: options.project.clone(),
        config: Some(UpdateRecord {
            update: config.map(|(key, value)| WandbItem::json(key, value)).collect(),
        }),
        run_group: options.group.clone().unwrap_or_default(),
        display_name: options.name.clone(),
        host: host_name(),
        starting_step: i64::try_from(next).unwrap_or(i64::MAX),
        start_time: Some(Timestamp {
            seconds: time.timestamp(),
            nanos: time.timestamp_subsec_nanos() as i32,
        }),
        runtime: earlier.runtime as i32,
        // An upload that resumes renumbers steps that are not greater than the last uploaded one;
        // the first step may be `resumed_after`, if its evaluation is repeated. Without the field,
        // it appends rows unchanged.
        resume: is_continued && earlier.uploaded_step < Some(options.resumed_after),
    }
}

/// Returns the values of an evaluation, with names that begin with the name of its split.
fn evaluation_items(split: &str, row: &EvalRow) -> Vec<WandbItem> {
    // Without `..`, so that no metric of evaluations is forgotten here.
    let &EvalRow {
        step: _,
        eval_loss,
        eval_accuracy,
        eval_f1,
        eval_mae,
        token_accuracy,
        rewards_chosen,
        rewards_rejected,
        rewards_margins,
        rewards_accuracies,
    } = row;
    let known = [
        ("loss", Some(eval_loss)),
        ("accuracy", eval_accuracy),
        ("f1", eval_f1),
        ("mae", eval_mae),
        ("mean_token_accuracy", token_accuracy),
        ("rewards/chosen", rewards_chosen),
        ("rewards/rejected", rewards_rejected),
        ("rewards/margins", rewards_margins),
        ("rewards/accuracies", rewards_accuracies),
    ];
    known_items(split, &known)
}

/// Returns the values that a row has, with names that begin with the name of its split.
fn known_items(split: &str, values: &[(&str, Option<f64>)]) -> Vec<WandbItem> {
    let item = |(name, value): &(&str, Option<f64>)| {
        Some(WandbItem::number(&format!("{split}/{name}"), (*value)?))
    };
    values.iter().filter_map(item).collect()
}

/// Creates the folder of a run. A run that is resumed within a second gets a later time in its
/// name, so that no folder has two parts of a run.
fn create_folder(folder: &Path, time: DateTime<Utc>, id: &str) -> Result<PathBuf, MonitorError> {
    let mut time = time.naive_utc();
    let failed = |path: &Path, source| MonitorError::new("create", path, source);
    fs::create_dir_all(folder).map_err(|source| failed(folder, source))?;
    loop {
        let path = folder.join(folder_name(time, id));
        match fs::create_dir(&path) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                time = time
                    .checked_add_signed(TimeDelta::seconds(1))
                    .ok_or_else(|| failed(&path, io::Error::from(ErrorKind::AlreadyExists)))?;
            }
            created => return created.map(|()| path.clone()).map_err(|error| failed(&path, error)),
        }
    }
}

/// Returns a random ID of lower-case letters and digits.
fn new_id() -> String {
    const DIGITS: &[u8; 36] = b"0123456789abcdefghijklmnopqrstuvwxyz";
    // The standard library seeds its hashes with random numbers of the system.
    let mut random = RandomState::new().build_hasher().finish();
    let mut id = String::with_capacity(ID_LENGTH);
    for _ in 0..ID_LENGTH {
        id.push(char::from(DIGITS[(random % 36) as usize]));
        random /= 36;
    }
    id
}
