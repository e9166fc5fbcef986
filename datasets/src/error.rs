//! Errors in data and in the settings that describe it.
//!
//! Each message names the problem, the allowed values and the remedy, so that a program can print
//! it as it is. Settings are named by their key in a job file (`data.sequence_length`).

use std::fmt::Display;
use std::io;
use std::path::{Path, PathBuf};

/// The result of reading data.
pub type Result<T, E = DataError> = std::result::Result<T, E>;

/// An error in the data, in a setting that describes it, or in the thread that reads it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// A file or folder could not be read.
    #[error("cannot read `{}`: {cause}; check the path and its permissions", path.display())]
    Unreadable {
        /// The file or folder.
        path: PathBuf,
        /// The error of the operating system.
        cause: io::Error,
    },
    /// A file could not be written.
    #[error("cannot write `{}`: {cause}; check that the folder exists, is writable and has space", path.display())]
    Unwritable {
        /// The file or folder.
        path: PathBuf,
        /// The error of the operating system.
        cause: io::Error,
    },
    /// A path that does not exist in the required form, or a file whose name or contents are not
    /// valid.
    #[error("`{}` {reason}", path.display())]
    InvalidFile {
        /// The file or folder.
        path: PathBuf,
        /// The problem, what is allowed and the remedy, with the row or line where one is known.
        reason: String,
    },
    /// A file or text that was modified while it was in use.
    #[error("{what} {reason}; restore the data, or start again while nothing writes to it")]
    Modified {
        /// The file or text.
        what: String,
        /// The change.
        reason: String,
    },
    /// A file, a folder or a split without any data.
    #[error(
        "{what} is empty; it must have at least one sequence of tokens, or one row of data; give it more data, or a larger share in data.splits"
    )]
    Empty {
        /// The file, folder or split.
        what: String,
    },
    /// All rows are invalid, and invalid rows are skipped.
    #[error("{what}: all of its {rows} rows are invalid; the first one is {first}: {reason}")]
    AllInvalid {
        /// The files.
        what: String,
        /// The number of rows.
        rows: usize,
        /// The first row.
        first: String,
        /// Why it is invalid.
        reason: String,
    },
    /// Samples of which no token counts in the loss.
    #[error(
        "{what}: none of {samples} samples has a token that counts in the loss, {truncated} of them after truncation to {length} tokens; the first one is {first}; look at the mask with `deepburn show-data`"
    )]
    Untrained {
        /// The split.
        what: String,
        /// The number of samples.
        samples: usize,
        /// The number of samples that lost their end.
        truncated: usize,
        /// The length to which they were truncated.
        length: usize,
        /// The first sample.
        first: String,
    },
    /// A setting with a value that is not allowed, or that does not fit the data.
    #[error("{name} = {value}: {rule}")]
    Setting {
        /// The key of the setting in a job file, if it has one.
        name: String,
        /// Its value.
        value: String,
        /// The rule that the value breaks, and the remedy.
        rule: String,
    },
    /// An error of the repository that a key of the job file names.
    #[error("{key}: {error}")]
    Repository {
        /// The key.
        key: &'static str,
        /// The error, which names the repository or an address in it.
        error: Box<DataError>,
    },
    /// A server that could not be reached.
    #[error(
        "cannot fetch `{url}`: {reason}; check the network and HF_ENDPOINT, or give the path of a local copy"
    )]
    Unreachable {
        /// The requested address.
        url: String,
        /// The error of the last attempt.
        reason: String,
    },
    /// A server that rejected a request or sent an invalid response.
    #[error(
        "cannot fetch `{url}`: {reason}; check the id, the revision and HF_ENDPOINT, or give the path of a local copy"
    )]
    Hub {
        /// The requested address.
        url: String,
        /// A description of the response.
        reason: String,
    },
    /// A download whose hash differs from the hash that the Hub announced. The downloaded file is
    /// deleted.
    #[error(
        "`{url}` is damaged: its contents have {found}, announced is {expected}; fetch it again later, from another HF_ENDPOINT, or give the path of a local copy"
    )]
    Corrupted {
        /// The address of the file.
        url: String,
        /// The announced hash.
        expected: String,
        /// The hash of the downloaded contents.
        found: String,
    },
    /// Files that are missing from the cache in offline mode.
    #[error("{wanted} of `{id}` is not in the cache and HF_HUB_OFFLINE is set: looked in `{}`, {reason}; unset HF_HUB_OFFLINE to fetch it, set HF_HOME to a cache that has it, or give the path of a local copy", looked.display())]
    Offline {
        /// The repository.
        id: String,
        /// A description of the missing files.
        wanted: String,
        /// The folder of the cache that was searched.
        looked: PathBuf,
        /// The contents of the folder.
        reason: String,
    },
    /// Files that a repository or a folder does not have, or that are ambiguous.
    #[error(
        "cannot select {wanted} in `{place}`: {reason}; check data.name and data.splits, or the path"
    )]
    NotFound {
        /// The repository or folder.
        place: String,
        /// A description of the missing files.
        wanted: String,
        /// The contents of the repository or folder.
        reason: String,
    },
    /// The folder of the Hub's cache is unknown because there is no home folder.
    #[error("there is no home folder for the Hub's cache; set HF_HOME to a folder")]
    NoHome,
    /// A tokenizer that could not be trained, used or serialized.
    #[error("{} failed while {doing}: {reason}; {}set data.tokenizer to another one", tokenizer_name(path.as_deref()), if path.is_some() { "fetch its files again, or " } else { "" })]
    Tokenizer {
        /// The file or folder that it was loaded from; `None` for a trained one.
        path: Option<PathBuf>,
        /// The operation that failed.
        doing: &'static str,
        /// The error of the library.
        reason: String,
    },
    /// A data position that is not valid for the sampler.
    #[error(
        "invalid data position {{ {position} }}: {reason}; restore data, seed and dynamic_batching as they were when the checkpoint was saved, or resume from another checkpoint"
    )]
    Position {
        /// The fields of the position.
        position: String,
        /// The rule that it breaks.
        reason: &'static str,
    },
    /// The thread of the data loader could not be started, or panicked.
    #[error("the data loader's thread {reason}")]
    LoaderThread {
        /// The reason.
        reason: String,
    },
    /// A batch was requested from a loader that has already failed.
    #[error("the data loader has stopped after an earlier error; start it again")]
    LoaderStopped,
}

impl DataError {
    /// Returns a function for `map_err` that wraps an I/O error while reading `path`.
    pub(crate) fn unreadable(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |cause| Self::Unreadable { path, cause }
    }

    /// Returns a function for `map_err` that wraps an I/O error while writing `path`.
    pub(crate) fn unwritable(path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |cause| Self::Unwritable { path, cause }
    }

    /// Returns the error of an invalid file or folder. Its message is the path, followed by
    /// `reason`.
    pub(crate) fn invalid(path: &Path, reason: impl Into<String>) -> Self {
        Self::InvalidFile { path: path.to_owned(), reason: reason.into() }
    }

    /// Returns the error of a setting whose value breaks `rule`.
    pub(crate) fn setting(name: &str, value: impl Display, rule: impl Into<String>) -> Self {
        Self::Setting { name: name.to_owned(), value: value.to_string(), rule: rule.into() }
    }
}

/// Returns an error if a setting is 0.
pub(crate) fn check_positive(name: &str, value: usize) -> Result<()> {
    match value {
        0 => Err(DataError::setting(name, 0, "it must be at least 1; raise it")),
        _ => Ok(()),
    }
}

/// Returns the name of a tokenizer for messages.
fn tokenizer_name(path: Option<&Path>) -> String {
    path.map_or("the trained tokenizer".to_owned(), |path| {
        format!("tokenizer `{}`", path.display())
    })
}
