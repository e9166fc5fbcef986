//! Errors of opening and reading DeepSpeed checkpoints.

use std::io;
use std::path::{Path, PathBuf};

/// An error of this crate. Messages name the file, the value, the rule and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum DeepSpeedError {
    /// The operating system returned an error.
    #[error("{}: cannot {action}: {source}", .path.display())]
    Io {
        /// The failed action, as a verb.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// There is no checkpoint, or one of its files is missing.
    #[error("{}: {reason}", .path.display())]
    Missing {
        /// The folder or file.
        path: PathBuf,
        /// What is missing, and the remedy.
        reason: String,
    },
    /// The content of a file differs from what was written.
    #[error(
        "{}: damaged: {reason}; copy the file anew, or use an older checkpoint", .path.display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The difference.
        reason: String,
    },
    /// A file is intact, but has a value that DeepSpeed does not write there.
    #[error(
        "{}: {value} is {found}, and it has to be {rule}: this is not a DeepSpeed file, or its layout \
         is from another version; load it with that version and save it with version 0.19",
        .path.display()
    )]
    Layout {
        /// The file.
        path: PathBuf,
        /// The name of the value.
        value: String,
        /// The value that was found.
        found: String,
        /// The value that is required.
        rule: String,
    },
    /// A file is intact, but belongs to a different save than the others.
    #[error(
        "{}: {reason}: files of different saves were mixed; copy checkpoints as whole folders",
        .path.display()
    )]
    Mixed {
        /// The file.
        path: PathBuf,
        /// The difference.
        reason: String,
    },
    /// This kind of checkpoint is not supported.
    #[error("{}: {found}, which is not supported; {remedy}", .path.display())]
    Unsupported {
        /// The file or folder.
        path: PathBuf,
        /// The kind of checkpoint.
        found: String,
        /// The remedy.
        remedy: &'static str,
    },
    /// The checkpoint is intact, but does not contain the requested data.
    #[error("{}: {reason}", .path.display())]
    NotInside {
        /// The checkpoint.
        path: PathBuf,
        /// The requested data and what is available.
        reason: String,
    },
}

impl DeepSpeedError {
    /// Returns a function that wraps the error of a failed `action` on `path`, for `map_err`.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { action, path, source }
    }

    /// Returns [`Self::Missing`] for `path`.
    pub(crate) fn missing(path: &Path, reason: impl Into<String>) -> Self {
        Self::Missing { path: path.to_owned(), reason: reason.into() }
    }

    /// Returns [`Self::Damaged`] for the file `path`.
    pub(crate) fn damaged(path: &Path, reason: impl Into<String>) -> Self {
        Self::Damaged { path: path.to_owned(), reason: reason.into() }
    }

    /// Returns [`Self::Mixed`] for the file `path`.
    pub(crate) fn mixed(path: &Path, reason: impl Into<String>) -> Self {
        Self::Mixed { path: path.to_owned(), reason: reason.into() }
    }

    /// Returns [`Self::Unsupported`] for `path`.
    pub(crate) fn unsupported(path: &Path, found: impl Into<String>, remedy: &'static str) -> Self {
        Self::Unsupported { path: path.to_owned(), found: found.into(), remedy }
    }
}
