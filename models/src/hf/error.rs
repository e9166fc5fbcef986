//! Errors of reading and writing model folders.
//!
//! Main type: [`ModelFolderError`].

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use deepburn_files::safetensors::FloatType;
use thiserror::Error;

use super::CONFIG;
use super::config_error::ModelConfigError;

/// The file of weights that are not sharded.
pub(crate) const WEIGHTS: &str = "model.safetensors";
/// The index file, which maps each tensor to its shard.
pub(crate) const INDEX: &str = "model.safetensors.index.json";

/// A tensor that does not match the config.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorProblem {
    /// Its name in `transformers`.
    pub name: String,
    /// What the configuration requires.
    pub expected: String,
    /// What the files contain.
    pub found: String,
}

impl fmt::Display for TensorProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}`: expected {}, found {}", self.name, self.expected, self.found)
    }
}

/// The reason why a model folder cannot be read or written.
#[derive(Debug, Error)]
pub enum ModelFolderError {
    /// A file operation failed.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// "open", "read", "write", ..
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The I/O error.
        source: io::Error,
    },
    /// `config.json` is invalid.
    #[error("{}: {source}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: ModelConfigError,
    },
    /// The folder has no weights.
    #[error("{} has neither {WEIGHTS} nor {INDEX}{hint}", folder.display())]
    NoWeights {
        /// The folder.
        folder: PathBuf,
        /// What the folder contains instead and how to fix it; empty if unknown.
        hint: String,
    },
    /// A file has an invalid format.
    #[error("{} cannot be used: {reason}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The vocabulary of the config is smaller than the embedding in the file.
    #[error(
        "`vocab_size` is smaller than the vocabulary of {}: {vocab_size}; its embedding has {rows} rows, and without some \
         of them tokens would have no embedding; remove the field, or use {rows} or more (new rows are the mean of the \
         existing ones)",
        folder.display()
    )]
    SmallerVocabulary {
        /// The checkpoint's folder.
        folder: PathBuf,
        /// Rows of the embedding in the file.
        rows: usize,
        /// The vocabulary size of the config.
        vocab_size: usize,
    },
    /// Tensors do not match the config.
    #[error("{} does not fit its config; tensors that do not match: {}: {}", folder.display(), problems.len(), listed(problems))]
    Tensors {
        /// The checkpoint's folder.
        folder: PathBuf,
        /// All tensors that do not match.
        problems: Vec<TensorProblem>,
    },
    /// A finite value would become infinite in the type of the weight file.
    #[error(
        "`{name}` has a value of magnitude {found:e}, and the largest finite {} is {:e}; {}",
        .float.torch_name(), .float.largest(), remedy_of_overflow(*.float)
    )]
    Overflow {
        /// The tensor's name in the file.
        name: String,
        /// The largest magnitude of its finite values.
        found: f64,
        /// The type of the file.
        float: FloatType,
    },
}

/// Returns the types that can represent values which `float` cannot.
fn remedy_of_overflow(float: FloatType) -> &'static str {
    match float {
        FloatType::F16 => "export bf16 or f32",
        FloatType::Bf16 => "export f32",
        FloatType::F32 => "scale the weights down",
    }
}

/// The number of problems that a message shows: the tensors of one layer. Of more, it shows the
/// first ones and the last one.
const SHOWN: usize = 12;

/// Joins the problems of tensors into one line.
///
/// A wrong config can cause a problem in every tensor. Missing tensors come first and unknown ones
/// last, so the first problems and the last one show both.
fn listed(problems: &[TensorProblem]) -> String {
    let joined = |problems: &[TensorProblem]| {
        problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
    };
    match problems {
        [first @ .., last] if problems.len() > SHOWN => {
            let (shown, rest) = first.split_at(SHOWN - 1);
            format!("{}; {} more; {last}", joined(shown), rest.len())
        }
        _ => joined(problems),
    }
}

impl ModelFolderError {
    /// Returns the error for a failed `action` on `path`.
    pub(crate) fn io(action: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Io { action, path: path.to_owned(), source }
    }

    /// Returns the file or folder that the error is about; `None` for a value that is written.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::Io { path, .. } | Self::Config { path, .. } | Self::Format { path, .. } => {
                Some(path)
            }
            Self::NoWeights { folder, .. }
            | Self::SmallerVocabulary { folder, .. }
            | Self::Tensors { folder, .. } => Some(folder),
            Self::Overflow { .. } => None,
        }
    }

    /// Returns the error for the `config.json` in `folder`.
    pub(crate) fn config(folder: &Path, source: ModelConfigError) -> Self {
        Self::Config { path: folder.join(CONFIG), source }
    }
}
