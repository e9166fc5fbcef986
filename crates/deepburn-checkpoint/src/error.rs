//! Errors of writing, reading and exporting checkpoints.

use std::io;
use std::path::{Path, PathBuf};

use deepburn_files::safetensors::FloatType;
use deepburn_weights::WeightMapError;

use crate::TagError;

/// An error of this crate. Messages name the file, the rule and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
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
    /// There is not enough space on the disk. Existing files are unchanged.
    #[error(
        "{}: the disk is too full: {needed} bytes are needed and {free} are free; make room, keep \
         fewer checkpoints, or write to another disk", .path.display()
    )]
    DiskFull {
        /// The folder or file that was being written.
        path: PathBuf,
        /// The number of bytes that it needs in total.
        needed: u64,
        /// The number of free bytes.
        free: u64,
    },
    /// A name is not a valid tag.
    #[error(transparent)]
    BadTag(#[from] TagError),
    /// An intact checkpoint of this name exists.
    #[error(
        "{}: a checkpoint already exists and is never overwritten; save under another tag \
         or in another folder, or move it away", .path.display()
    )]
    TagTaken {
        /// The existing checkpoint.
        path: PathBuf,
    },
    /// Another process is saving or deleting in this folder.
    #[error("{}: another save is in progress here; wait for it, or use another folder", .root.display())]
    Busy {
        /// The folder of checkpoints.
        root: PathBuf,
    },
    /// The announced tensors are invalid.
    #[error("a checkpoint cannot be laid out: {reason}")]
    Layout {
        /// The parameter and the reason.
        reason: String,
    },
    /// A rank wrote a different tensor than the layout requires next.
    #[error("rank {rank} must write {expected} next, not {found}")]
    OutOfPlan {
        /// The rank.
        rank: usize,
        /// The expected tensor and its number of elements.
        expected: String,
        /// The tensor that was written instead.
        found: String,
    },
    /// The records of the ranks do not form one checkpoint.
    #[error("the ranks' files do not make one checkpoint: {reason}")]
    Records {
        /// The rank and the reason.
        reason: String,
    },
    /// There is no checkpoint at the given path.
    #[error("{}: no checkpoint found; {reason}", .path.display())]
    Missing {
        /// The file or folder.
        path: PathBuf,
        /// What is missing, and what was found instead.
        reason: String,
    },
    /// The files have the format of another program.
    #[error("{}: not a DeepBurn checkpoint but {found}", .path.display())]
    Foreign {
        /// The file or folder.
        path: PathBuf,
        /// What the files look like, and what to do with them.
        found: String,
    },
    /// The format version is not supported.
    #[error(
        "{}: its format is version {found}, and this program reads up to version {supported}; use the \
         program that wrote it", .path.display()
    )]
    Version {
        /// The manifest.
        path: PathBuf,
        /// The version of the file.
        found: u64,
        /// The highest version that this program reads.
        supported: u64,
    },
    /// The content of a file differs from what was written.
    #[error("{}: damaged: {reason}", .path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The difference.
        reason: String,
    },
    /// A file is intact, but belongs to another checkpoint.
    #[error(
        "{}: it belongs to another checkpoint ({found}): files of different saves were mixed; copy \
         checkpoints as whole folders", .path.display()
    )]
    Mixed {
        /// The file.
        path: PathBuf,
        /// The save that it belongs to.
        found: String,
    },
    /// The requested checkpoint is unusable, but another one is intact.
    #[error("{error}; the newest {which} intact checkpoint is {}", .intact.display())]
    Superseded {
        /// The error of the requested checkpoint.
        error: Box<CheckpointError>,
        /// "older", or "other" if the step of the requested checkpoint is unknown.
        which: &'static str,
        /// The intact checkpoint.
        intact: PathBuf,
    },
    /// The checkpoint is intact, but does not contain the requested data.
    #[error("{}: {reason}", .path.display())]
    NotInside {
        /// The checkpoint.
        path: PathBuf,
        /// The requested data and what is available.
        reason: String,
    },
    /// A base model does not have the values of a parameter that the checkpoint omits.
    #[error(
        "the checkpoint omits the frozen parameter {path}, which is read from the base model: {reason}"
    )]
    OtherBase {
        /// Module path.
        path: String,
        /// The difference, and the remedy.
        reason: String,
    },
    /// A value exceeds the range of the export type.
    #[error(
        "parameter {path} has a value of magnitude {found:e}, and the largest finite {} is {:e}: export {}",
        .float.torch_name(), .float.largest(), match .float { FloatType::F16 => "bf16 or f32", _ => "f32" }
    )]
    Overflow {
        /// Module path.
        path: String,
        /// The largest magnitude of its finite values.
        found: f32,
        /// The type of the export.
        float: FloatType,
    },
}

impl CheckpointError {
    /// Returns a function that wraps the error of a failed `action` on `path`, for `map_err`.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { action, path, source }
    }

    /// Returns [`Self::Layout`] for an inconsistent weight map.
    pub(crate) fn map(error: WeightMapError) -> Self {
        Self::Layout { reason: error.to_string() }
    }

    /// Returns [`Self::Damaged`] for the file `path`.
    pub(crate) fn damaged(path: &Path, reason: impl Into<String>) -> Self {
        Self::Damaged { path: path.to_owned(), reason: reason.into() }
    }

    /// Returns [`Self::Missing`] for the file or folder `path`.
    pub(crate) fn missing(path: &Path, reason: impl Into<String>) -> Self {
        Self::Missing { path: path.to_owned(), reason: reason.into() }
    }
}
