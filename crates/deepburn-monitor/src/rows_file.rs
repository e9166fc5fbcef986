//! Files of rows: one JSON object per line, each of which belongs to a step.
//!
//! Main type: [`RowsWriter`]. A write returns after the line was passed to the operating system. If
//! a killed run left an incomplete last line, the line is dropped; any other line that is not a row
//! is an error.

use std::fs;
use std::io::{self, Write};
use std::marker::PhantomData;
use std::path::{Path, PathBuf};

use deepburn_files::PartialFile;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::append::{AppendFile, is_full};

/// A line of a file.
pub trait JsonRow: Serialize + DeserializeOwned {
    /// Returns the step of the row.
    fn step(&self) -> u64;
}

/// The reason why rows cannot be written or read.
#[derive(Debug, thiserror::Error)]
pub enum MetricsError {
    /// The operating system returned an error.
    #[error("cannot {action} `{}`: {source}; {}", path.display(), remedy(source))]
    File {
        /// The failed action.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// A complete line is not a row.
    #[error(
        "`{}`, line {line}: {source}; each line must be one row as a JSON object",
        path.display()
    )]
    Row {
        /// The file.
        path: PathBuf,
        /// The line number, from 1.
        line: usize,
        /// The parse error.
        source: serde_json::Error,
    },
}

impl MetricsError {
    /// Returns true if the disk was full.
    pub fn is_disk_full(&self) -> bool {
        matches!(self, Self::File { source, .. } if is_full(source))
    }
}

/// Appends rows to a file and flushes each line. Rows that did not fit on the disk are written with
/// the next row.
#[derive(Debug)]
pub struct RowsWriter<R> {
    file: AppendFile,
    row: PhantomData<R>,
}

impl<R: JsonRow> RowsWriter<R> {
    /// Creates a file, which replaces an existing one.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn create(path: &Path) -> Result<Self, MetricsError> {
        let file = AppendFile::create(path);
        let file = file.map_err(|source| file_error("create", path, source))?;
        Ok(Self { file, row: PhantomData })
    }

    /// Continues the file of a run that resumes after `step`. Later rows are dropped, because the
    /// resumed run writes them again. Creates the file if it does not exist.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read or written, or if a line is not a row.
    pub fn resume(path: &Path, step: u64) -> Result<Self, MetricsError> {
        let mut kept = String::new();
        if path.exists() {
            // The lines are copied as text, because numbers that are formatted again might differ
            // in the last digit.
            for (line, row) in read_lines::<R>(path)? {
                if row.step() <= step {
                    kept.push_str(&line);
                    kept.push('\n');
                }
            }
        }
        // Written beside the file and renamed, so that a killed program leaves either file
        // complete.
        let rewritten = path.with_extension("jsonl.partial");
        // If a later write fails, the file is cut to this length.
        let len = kept.len() as u64;
        let written = PartialFile::create(path, &rewritten).and_then(|mut file| {
            file.write_all(kept.as_bytes())?;
            Ok(file)
        });
        let file = written.map_err(|source| file_error("write", &rewritten, source))?;
        file.finish().map_err(|source| file_error("replace", path, source))?;
        let file = AppendFile::open(path, len);
        let file = file.map_err(|source| file_error("open", path, source))?;
        Ok(Self { file, row: PhantomData })
    }

    /// Appends a row after the pending ones.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written. The file then contains no part of the row,
    /// and the row is kept ([`is_disk_full`](MetricsError::is_disk_full)).
    pub fn write(&mut self, row: impl Into<R>) -> Result<(), MetricsError> {
        // `serde_json` writes NaN and infinity as null.
        let line = serde_json::to_string(&row.into()).map_err(io::Error::from);
        // Row and line end are written in one call.
        let written = line.and_then(|line| self.file.append(format!("{line}\n").as_bytes()));
        written.map_err(|source| self.failed(source))
    }

    /// Writes the rows that did not fit on the disk before.
    ///
    /// # Errors
    /// Returns the same errors as [`write`](Self::write).
    pub fn flush(&mut self) -> Result<(), MetricsError> {
        self.file.flush().map_err(|source| self.failed(source))
    }

    /// Creates the file and its folder again if they were removed, and returns whether this was the
    /// case. Earlier rows are lost.
    ///
    /// # Errors
    /// Returns an error if the file cannot be created.
    pub fn restore_if_removed(&mut self) -> Result<bool, MetricsError> {
        self.file.restore_if_removed().map_err(|source| self.failed(source))
    }

    fn failed(&self, source: io::Error) -> MetricsError {
        file_error("write", self.file.path(), source)
    }
}

/// Reads all rows in file order.
///
/// # Errors
/// Returns an error if the file cannot be read, or if a complete line is not a row.
pub(crate) fn read_rows<R: JsonRow>(path: &Path) -> Result<Vec<R>, MetricsError> {
    Ok(read_lines(path)?.into_iter().map(|(_, row)| row).collect())
}

/// Returns each line with its row.
fn read_lines<R: JsonRow>(path: &Path) -> Result<Vec<(String, R)>, MetricsError> {
    let bytes = fs::read(path).map_err(|source| file_error("read", path, source))?;
    // A line without a line end was not written completely.
    let complete = bytes.iter().rposition(|byte| *byte == b'\n').unwrap_or(0);
    let text = std::str::from_utf8(&bytes[..complete]).map_err(|error| {
        file_error("read", path, io::Error::new(io::ErrorKind::InvalidData, error))
    })?;
    let mut rows = Vec::new();
    for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let row = serde_json::from_str(line).map_err(|source| MetricsError::Row {
            path: path.to_path_buf(),
            line: index + 1,
            source,
        })?;
        rows.push((line.to_owned(), row));
    }
    Ok(rows)
}

/// Returns a remedy for an error of the operating system.
fn remedy(error: &io::Error) -> &'static str {
    match is_full(error) {
        true => "make room on its disk, or raise `ulimit -f`",
        false => "check that the folder exists, and its permissions",
    }
}

fn file_error(action: &'static str, path: &Path, source: io::Error) -> MetricsError {
    MetricsError::File { action, path: path.to_path_buf(), source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::{EvalRow, MetricsRow, read_metrics};

    fn row(step: u64) -> EvalRow {
        EvalRow { step, eval_loss: 1.5, ..EvalRow::default() }
    }

    /// `/dev/full` is a disk that is always full.
    #[test]
    #[cfg(target_os = "linux")]
    fn rows_that_have_no_room_wait_for_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut writer = RowsWriter::<MetricsRow>::create(&path).unwrap();
        writer.write(row(1)).unwrap();
        let full = fs::OpenOptions::new().append(true).open("/dev/full").unwrap();
        let file = writer.file.swap(full);
        for step in [2, 3] {
            assert!(writer.write(row(step)).unwrap_err().is_disk_full());
        }
        writer.file.swap(file);
        writer.write(row(4)).unwrap();
        let steps = |rows: Vec<MetricsRow>| rows.iter().map(MetricsRow::step).collect::<Vec<_>>();
        assert_eq!(steps(read_metrics(&path).unwrap()), [1, 2, 3, 4]);
    }
}
