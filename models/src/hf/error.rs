//! Errors of reading and writing model folders.
//!
//! Main type: [`ModelFolderError`].

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

use super::config::ModelConfigError;

/// The file of weights that are not sharded.
pub(crate) const WEIGHTS: &str = "model.safetensors";
/// The file that says in which shard each tensor is.
pub(crate) const INDEX: &str = "model.safetensors.index.json";

/// A tensor that does not fit the config.
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
    /// The operating system refused.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// "open", "read", "write", ..
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// Its reason.
        source: io::Error,
    },
    /// `config.json` is refused.
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
        /// What it has instead and what to do, or empty.
        hint: &'static str,
    },
    /// A file is not what its name says.
    #[error("{} cannot be used: {reason}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// Tensors do not fit the config.
    #[error("{} does not fit its config in {} tensors: {}", folder.display(), problems.len(), listed(problems))]
    Tensors {
        /// The checkpoint's folder.
        folder: PathBuf,
        /// All of them.
        problems: Vec<TensorProblem>,
    },
}

/// Joins the problems of all tensors into one line.
fn listed(problems: &[TensorProblem]) -> String {
    problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

impl ModelFolderError {
    /// Returns the error of a failed `action` on `path`.
    pub(crate) fn io(action: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Io { action, path: path.to_owned(), source }
    }
}
