//! The earlier parts of a W&B run that is resumed.
//!
//! Main type: [`EarlierRun`]. Each start of a run writes a folder of its own, and all of them have
//! the same run ID. `wandb sync` uploads them in the order of their start times.
//!
//! W&B only appends rows, and steps have to increase. A run that resumes after step N repeats the
//! steps after N, so their rows are removed from the folders that were not uploaded yet. The row of
//! step N moves to the new folder, because the evaluation after that step may be repeated there.

use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use super::record::{HistoryRecord, RecordKind};
use super::transaction_log::StoredRecords;
use crate::error::MonitorError;

/// The beginning of the name of a folder.
const PREFIX: &str = "offline-run-";
/// The length of the time in the name of a folder, `YYYYMMDD_HHMMSS`.
const TIME_LENGTH: usize = 15;
/// The end of the name of the file that marks an uploaded log.
const UPLOADED: &str = ".synced";

/// The earlier parts of a run.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct EarlierRun {
    /// The ID of the run.
    pub(super) id: String,
    /// The row of the step after which the run resumes, which was removed from its folder; `None`
    /// if it is unknown or uploaded.
    pub(super) last_row: Option<HistoryRecord>,
    /// The seconds from the start of the run to its last remaining row.
    pub(super) runtime: f64,
    /// The last step in an uploaded folder; `None` if there is no such folder.
    pub(super) uploaded_step: Option<u64>,
}

impl EarlierRun {
    /// Finds the newest run in `folder`, and removes the rows of `step` and later steps from its
    /// logs. Returns `None` if the folder has no run.
    ///
    /// Uploaded logs are not changed.
    ///
    /// # Errors
    /// Returns an error if a folder or a log cannot be read, or if a log cannot be shortened.
    pub(super) fn rewind(folder: &Path, step: u64) -> Result<Option<Self>, MonitorError> {
        let mut parts = parts(folder)?;
        // By time, which is the first field.
        parts.sort();
        let Some(id) = parts.last().map(|part| part.id.clone()) else { return Ok(None) };
        let mut earlier = Self { id, ..Self::default() };
        for part in parts.iter().filter(|part| part.id == earlier.id).cloned().collect::<Vec<_>>() {
            earlier.rewind_log(&part.log, step)?;
        }
        Ok(Some(earlier))
    }

    /// Removes the rows of `step` and later steps, and everything after them, from a log.
    fn rewind_log(&mut self, log: &Path, step: u64) -> Result<(), MonitorError> {
        let bytes = fs::read(log).map_err(|source| MonitorError::new("read", log, source))?;
        let is_uploaded = sibling(log, UPLOADED).exists();
        // A killed run may have left a part of a record.
        let mut end = 0;
        // Rows are in ascending order of steps, so everything from the first later one on is cut
        // off.
        for stored in StoredRecords::new(&bytes) {
            if let Some(RecordKind::History(row)) = stored.record.kind {
                if row.step() < step || is_uploaded {
                    if is_uploaded {
                        self.uploaded_step = self.uploaded_step.max(Some(row.step()));
                    }
                    self.runtime = runtime(&row).unwrap_or(self.runtime);
                } else {
                    if row.step() == step {
                        self.runtime = runtime(&row).unwrap_or(self.runtime);
                        self.last_row = Some(row);
                    }
                    end = stored.start;
                    break;
                }
            }
            end = stored.end;
        }
        // A file without a readable record is left as it is.
        if is_uploaded || end == 0 || end == bytes.len() as u64 {
            return Ok(());
        }
        let shortened = OpenOptions::new().write(true).open(log).and_then(|file| file.set_len(end));
        shortened.map_err(|source| MonitorError::new("shorten", log, source))
    }
}

/// A folder of a run: one start of it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct RunPart {
    /// The time of the start, in an order in which text sorts by time.
    time: String,
    id: String,
    log: PathBuf,
}

/// Returns the folders of all runs.
fn parts(folder: &Path) -> Result<Vec<RunPart>, MonitorError> {
    let failed = |source| MonitorError::new("read", folder, source);
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(failed)?.collect::<io::Result<Vec<_>>>().map_err(failed)?,
    };
    let part = |path: PathBuf| {
        let name = path.file_name()?.to_str()?.strip_prefix(PREFIX)?;
        let (time, id) = name.split_at_checked(TIME_LENGTH)?;
        let id = id.strip_prefix('-').filter(|id| !id.is_empty())?.to_owned();
        let log = path.join(log_name(&id));
        log.is_file().then(|| RunPart { time: time.to_owned(), id, log })
    };
    Ok(entries.into_iter().filter_map(|entry| part(entry.path())).collect())
}

/// Returns the name of the folder of a run that starts at a time.
pub(super) fn folder_name(time: chrono::NaiveDateTime, id: &str) -> String {
    format!("{PREFIX}{}-{id}", time.format("%Y%m%d_%H%M%S"))
}

/// Returns the name of the log of a run.
pub(super) fn log_name(id: &str) -> String {
    format!("run-{id}.wandb")
}

/// Returns a path with a longer name.
fn sibling(path: &Path, end: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(end);
    PathBuf::from(name)
}

/// Returns the seconds from the start of the run to a row.
fn runtime(row: &HistoryRecord) -> Option<f64> {
    let item = row.item.iter().find(|item| item.key == super::RUNTIME)?;
    item.value_json.parse().ok().filter(|seconds: &f64| seconds.is_finite())
}
