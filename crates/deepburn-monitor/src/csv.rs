//! CSV files in the format of DeepSpeed's CSV monitor: one file per metric.
//!
//! Main type: [`CsvFiles`]. The file of `Train/Samples/lr` is `Train_Samples_lr.csv` with the
//! header `step,lr`. Every line contains a number of samples and a value. A new run replaces an
//! existing file, and a resumed run continues it. DeepSpeed instead writes another header in the
//! middle of the file.

use crate::append::AppendFile;
use crate::error::MonitorError;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

/// Writes metrics to the files of a folder.
#[derive(Debug)]
pub struct CsvFiles {
    folder: PathBuf,
    /// Lines of an earlier run are kept up to this number of samples.
    kept: u64,
    /// The open files by tag.
    files: BTreeMap<String, AppendFile>,
}

impl CsvFiles {
    /// Opens the files of a folder, which is created if it does not exist. Existing files keep
    /// their lines up to `kept` samples, which an earlier run wrote before the point from which
    /// this run resumes.
    ///
    /// # Errors
    /// Returns an error if the folder cannot be created.
    pub fn create(folder: &Path, kept: u64) -> Result<Self, MonitorError> {
        fs::create_dir_all(folder).map_err(|source| MonitorError::new("create", folder, source))?;
        Ok(Self { folder: folder.to_path_buf(), kept, files: BTreeMap::new() })
    }

    /// Appends a value of `tag` to its file, without buffering. Values that are not finite are
    /// written as `nan`, `inf` or `-inf`.
    ///
    /// # Errors
    /// Returns an error if the file cannot be written.
    pub fn scalar(&mut self, tag: &str, step: u64, value: f64) -> Result<(), MonitorError> {
        let path = self.path_of(tag);
        let failed = |source| MonitorError::new("write", &path, source);
        if !self.files.contains_key(tag) {
            // Read before the file is replaced.
            let kept = match self.kept {
                0 => Vec::new(),
                kept => lines_until(&path, kept).map_err(failed)?,
            };
            let file = AppendFile::create(&path)
                .map_err(|source| MonitorError::new("open", &path, source))?;
            // Inserted before anything is written, so that lines that do not fit on the disk are
            // kept.
            let file = self.files.entry(tag.to_owned()).or_insert(file);
            let head = csv::StringRecord::from(vec!["step", tag.rsplit('/').next().unwrap_or(tag)]);
            for line in [head].into_iter().chain(kept) {
                file.append(&record(&line).map_err(failed)?).map_err(failed)?;
            }
        }
        let Some(file) = self.files.get_mut(tag) else {
            unreachable!("the file was opened above");
        };
        let line = csv::StringRecord::from(vec![step.to_string(), number(value)]);
        record(&line).and_then(|line| file.append(&line)).map_err(failed)
    }

    /// Returns the file of a tag.
    pub fn path_of(&self, tag: &str) -> PathBuf {
        // The names of DeepSpeed's files.
        self.folder.join(format!("{}.csv", tag.replace(['/', ' '], "_")))
    }
}

/// Formats a line.
fn record(line: &csv::StringRecord) -> io::Result<Vec<u8>> {
    let mut writer = csv::Writer::from_writer(Vec::new());
    writer.write_record(line)?;
    writer.into_inner().map_err(|error| error.into_error())
}

/// Returns the lines of a file up to this number of samples, without its header. A truncated line
/// and all lines after it are omitted.
fn lines_until(path: &Path, samples: u64) -> io::Result<Vec<csv::StringRecord>> {
    let file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        opened => opened?,
    };
    let whole = |line: &csv::StringRecord| {
        let step = line.get(0).and_then(|step| step.parse::<u64>().ok());
        line.len() == 2 && step.is_some_and(|step| step <= samples)
    };
    let lines = csv::Reader::from_reader(file).into_records().map_while(Result::ok);
    Ok(lines.take_while(whole).collect())
}

/// Formats the shortest text that is read as the same number, with Python's names for NaN and
/// infinity.
fn number(value: f64) -> String {
    // Rust and Python agree on `inf` and `-inf`.
    if value.is_nan() { "nan".to_owned() } else { format!("{value:?}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_metric_is_a_file_with_a_head() {
        let folder = tempfile::tempdir().unwrap();
        let mut files = CsvFiles::create(&folder.path().join("a/b"), 0).unwrap();
        files.scalar("Train/Samples/lr", 32, 1e-4).unwrap();
        files.scalar("Train/Samples/train loss", 32, f64::NAN).unwrap();
        files.scalar("Train/Samples/lr", 64, 2.0).unwrap();
        files.scalar("Train/Samples/train loss", 64, f64::NEG_INFINITY).unwrap();
        let read = |name: &str| fs::read_to_string(folder.path().join("a/b").join(name)).unwrap();
        assert_eq!(read("Train_Samples_lr.csv"), "step,lr\n32,0.0001\n64,2.0\n");
        assert_eq!(read("Train_Samples_train_loss.csv"), "step,train loss\n32,nan\n64,-inf\n");
    }

    #[test]
    fn a_second_run_begins_anew() {
        let folder = tempfile::tempdir().unwrap();
        for step in [1, 2] {
            CsvFiles::create(folder.path(), 0).unwrap().scalar("a", step, 0.5).unwrap();
        }
        let text = fs::read_to_string(folder.path().join("a.csv")).unwrap();
        assert_eq!(text, "step,a\n2,0.5\n");
    }

    #[test]
    fn a_resumed_run_continues_its_files() {
        let folder = tempfile::tempdir().unwrap();
        let mut first = CsvFiles::create(folder.path(), 0).unwrap();
        for step in [8, 16, 24] {
            first.scalar("a", step, step as f64).unwrap();
        }
        let mut second = CsvFiles::create(folder.path(), 16).unwrap();
        second.scalar("a", 24, 0.5).unwrap();
        second.scalar("new", 24, 1.0).unwrap();
        let read = |name: &str| fs::read_to_string(folder.path().join(name)).unwrap();
        assert_eq!(read("a.csv"), "step,a\n8,8.0\n16,16.0\n24,0.5\n");
        assert_eq!(read("new.csv"), "step,new\n24,1.0\n");
        // Killed in the middle of a line.
        fs::write(folder.path().join("a.csv"), "step,a\n8,8.0\n16").unwrap();
        CsvFiles::create(folder.path(), 16).unwrap().scalar("a", 24, 2.0).unwrap();
        assert_eq!(read("a.csv"), "step,a\n8,8.0\n24,2.0\n");
    }

    #[test]
    fn errors_name_the_file() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("a.csv")).unwrap();
        let message = CsvFiles::create(folder.path(), 0)
            .unwrap()
            .scalar("a", 1, 1.0)
            .unwrap_err()
            .to_string();
        assert!(message.contains("cannot open") && message.contains("a.csv"), "{message}");
    }

    proptest! {
        #[test]
        fn numbers_come_back(value in any::<f64>()) {
            let read: f64 = number(value).parse().unwrap();
            prop_assert!(read == value || read.is_nan() && value.is_nan());
        }
    }
}
