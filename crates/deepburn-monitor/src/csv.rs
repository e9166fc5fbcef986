//! CSV files as DeepSpeed's CSV monitor writes them: one file a metric.
//!
//! Main type: [`CsvFiles`]. The file of `Train/Samples/lr` is `Train_Samples_lr.csv`, its head is
//! `step,lr`, and every line is a count of samples and a value. A file that is there already is replaced:
//! there one goes on, with a head of its own in the middle for each run.

use crate::monitors::MonitorError;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

/// Writes metrics to the files of one folder.
#[derive(Debug)]
pub struct CsvFiles {
    folder: PathBuf,
    /// The open files by tag.
    files: BTreeMap<String, csv::Writer<File>>,
}

impl CsvFiles {
    /// The files of a folder, which is made where it is not there.
    ///
    /// # Errors
    /// When the folder cannot be made.
    pub fn create(folder: &Path) -> Result<Self, MonitorError> {
        fs::create_dir_all(folder).map_err(|source| MonitorError::new("create", folder, source))?;
        Ok(Self { folder: folder.to_path_buf(), files: BTreeMap::new() })
    }

    /// Adds one value of `tag`. It is in the file when the call returns; what is not finite is
    /// written as `nan`, `inf` or `-inf`.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn scalar(&mut self, tag: &str, step: u64, value: f64) -> Result<(), MonitorError> {
        let path = self.path_of(tag);
        let failed = |source| MonitorError::new("write", &path, source);
        if !self.files.contains_key(tag) {
            let file =
                File::create(&path).map_err(|source| MonitorError::new("open", &path, source))?;
            let mut writer = csv::Writer::from_writer(file);
            let head = tag.rsplit('/').next().unwrap_or(tag);
            writer.write_record(["step", head]).map_err(|error| failed(error.into()))?;
            self.files.insert(tag.to_owned(), writer);
        }
        let Some(writer) = self.files.get_mut(tag) else {
            unreachable!("the file was opened above");
        };
        writer
            .write_record([step.to_string(), number(value)])
            .map_err(std::io::Error::from)
            .and_then(|()| writer.flush())
            .map_err(failed)
    }

    /// The file of a tag.
    pub fn path_of(&self, tag: &str) -> PathBuf {
        self.folder.join(format!("{}.csv", tag.replace(['/', ' '], "_")))
    }
}

/// The shortest spelling that reads as the same number, in Python's words where it is none.
fn number(value: f64) -> String {
    if value.is_nan() { "nan".to_owned() } else { format!("{value:?}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_metric_is_a_file_with_a_head() {
        let folder = tempfile::tempdir().unwrap();
        let mut files = CsvFiles::create(&folder.path().join("a/b")).unwrap();
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
            CsvFiles::create(folder.path()).unwrap().scalar("a", step, 0.5).unwrap();
        }
        let text = fs::read_to_string(folder.path().join("a.csv")).unwrap();
        assert_eq!(text, "step,a\n2,0.5\n");
    }

    #[test]
    fn errors_name_the_file() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("a.csv")).unwrap();
        let message =
            CsvFiles::create(folder.path()).unwrap().scalar("a", 1, 1.0).unwrap_err().to_string();
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
