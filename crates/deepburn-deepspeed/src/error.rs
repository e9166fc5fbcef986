//! Why a checkpoint of DeepSpeed was not opened or read.

use std::io;
use std::path::{Path, PathBuf};

/// Any failure of this crate. Every message names the file, the value, the rule and what to do.
#[derive(Debug, thiserror::Error)]
pub enum DeepSpeedError {
    /// The system refused something.
    #[error("{}: cannot {action}: {source}", .path.display())]
    Io {
        /// What was tried, as a verb.
        action: &'static str,
        /// File or folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// There is no checkpoint, or a file of it is not there.
    #[error("{}: {reason}", .path.display())]
    Missing {
        /// Where it was looked for.
        path: PathBuf,
        /// What is missing, and what to do.
        reason: String,
    },
    /// A file is not what was written.
    #[error(
        "{}: damaged: {reason}; copy the file anew, or use an older checkpoint", .path.display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// How that shows.
        reason: String,
    },
    /// A file is sound, but a value in it is not what DeepSpeed writes there.
    #[error(
        "{}: {value} is {found}, and it has to be {rule}: this is no file of DeepSpeed, or of a \
         version whose layout differs; load it there and save it with version 0.19", .path.display()
    )]
    Layout {
        /// The file.
        path: PathBuf,
        /// Which value.
        value: String,
        /// What it is.
        found: String,
        /// What it has to be.
        rule: String,
    },
    /// A file is sound, but of another save than its neighbours.
    #[error(
        "{}: {reason}: files of different saves were mixed; copy checkpoints as whole folders",
        .path.display()
    )]
    Mixed {
        /// The file.
        path: PathBuf,
        /// How that shows.
        reason: String,
    },
    /// A checkpoint of a kind that is not read here.
    #[error("{}: {found}, which is not read here; {remedy}", .path.display())]
    Unsupported {
        /// File or folder that shows it.
        path: PathBuf,
        /// What it is.
        found: String,
        /// What to do instead.
        remedy: &'static str,
    },
    /// The checkpoint is sound, but has not what is asked for.
    #[error("{}: {reason}", .path.display())]
    NotInside {
        /// The checkpoint.
        path: PathBuf,
        /// What was asked for and what there is.
        reason: String,
    },
}

impl DeepSpeedError {
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { action, path, source }
    }

    pub(crate) fn missing(path: &Path, reason: impl Into<String>) -> Self {
        Self::Missing { path: path.to_owned(), reason: reason.into() }
    }

    pub(crate) fn damaged(path: &Path, reason: impl Into<String>) -> Self {
        Self::Damaged { path: path.to_owned(), reason: reason.into() }
    }

    pub(crate) fn mixed(path: &Path, reason: impl Into<String>) -> Self {
        Self::Mixed { path: path.to_owned(), reason: reason.into() }
    }

    pub(crate) fn unsupported(path: &Path, found: impl Into<String>, remedy: &'static str) -> Self {
        Self::Unsupported { path: path.to_owned(), found: found.into(), remedy }
    }
}
