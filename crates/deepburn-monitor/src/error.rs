//! The error of a monitor.

use crate::append::is_full;
use std::io;
use std::path::{Path, PathBuf};

/// The reason why a monitor cannot write.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot {action} monitor file `{}`: {source}; make room there, or choose another folder",
    path.display()
)]
pub struct MonitorError {
    action: &'static str,
    path: PathBuf,
    source: io::Error,
}

impl MonitorError {
    pub(crate) fn new(action: &'static str, path: &Path, source: io::Error) -> Self {
        Self { action, path: path.to_path_buf(), source }
    }

    /// Returns true if the disk was full. The value is then written with the next one.
    pub fn is_disk_full(&self) -> bool {
        is_full(&self.source)
    }
}
