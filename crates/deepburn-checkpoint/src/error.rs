//! Why a checkpoint was not written, read or exported.

use std::io;
use std::path::{Path, PathBuf};

/// Any failure of this crate. Every message names the file, the rule and what to do.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
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
    /// There is no room for what is to be written. Nothing that was there before is changed.
    #[error(
        "{}: the disk is too full: {needed} bytes are needed and {free} are free; make room, keep \
         fewer checkpoints, or write to another disk", .path.display()
    )]
    DiskFull {
        /// Folder or file that was being written.
        path: PathBuf,
        /// Bytes that the whole of it needs.
        needed: u64,
        /// Bytes that are free.
        free: u64,
    },
    /// A name that cannot be a tag.
    #[error(
        "`{name}` is no tag: 1 to {max} characters out of A-Z a-z 0-9 . _ - that start with a \
         letter or a digit, and not the name of a file that lies beside checkpoints",
        max = crate::Tag::MAX_LEN
    )]
    BadTag {
        /// The name.
        name: String,
    },
    /// A checkpoint of this name exists and is intact.
    #[error(
        "{}: a checkpoint is there already, and none is ever overwritten; save under another tag \
         or in another folder, or move it away", .path.display()
    )]
    TagTaken {
        /// The checkpoint that is there.
        path: PathBuf,
    },
    /// Somebody else is saving or deleting here.
    #[error("{}: another save is under way here; wait for it, or use another folder", .root.display())]
    Busy {
        /// The folder of checkpoints.
        root: PathBuf,
    },
    /// The tensors that a caller announced make no sense.
    #[error("a checkpoint cannot be laid out: {reason}")]
    Layout {
        /// Which parameter, and why.
        reason: String,
    },
    /// A rank wrote something else than was announced.
    #[error("rank {rank} was to write {expected} next, not {found}")]
    OutOfPlan {
        /// The rank.
        rank: usize,
        /// Tensor and number of elements.
        expected: String,
        /// What it wrote instead.
        found: String,
    },
    /// What the ranks handed in does not make one checkpoint.
    #[error("the ranks' files do not make one checkpoint: {reason}")]
    Records {
        /// Which rank, and why.
        reason: String,
    },
    /// There is no checkpoint where one was looked for.
    #[error("{}: there is no checkpoint here: {reason}", .path.display())]
    Missing {
        /// Where.
        path: PathBuf,
        /// What is missing, and what is there instead.
        reason: String,
    },
    /// Somebody else's format.
    #[error("{}: this is no checkpoint of DeepBurn but {found}", .path.display())]
    Foreign {
        /// File or folder.
        path: PathBuf,
        /// What it looks like and what to do with it.
        found: String,
    },
    /// A format of an older or newer program.
    #[error(
        "{}: its format is version {found}, and this program reads version {supported}; use the \
         program that wrote it", .path.display()
    )]
    Version {
        /// The manifest.
        path: PathBuf,
        /// Version of the file.
        found: u64,
        /// The version this program reads and writes.
        supported: u64,
    },
    /// A file is not what was written.
    #[error("{}: damaged: {reason}", .path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// How that shows.
        reason: String,
    },
    /// A file is sound but belongs to another checkpoint.
    #[error(
        "{}: it belongs to another checkpoint ({found}): files of different saves were mixed; copy \
         checkpoints as whole folders", .path.display()
    )]
    Mixed {
        /// The file.
        path: PathBuf,
        /// What it belongs to.
        found: String,
    },
    /// A checkpoint that cannot be used, where another one can.
    #[error("{error}; the newest older intact checkpoint is {}", .intact.display())]
    Superseded {
        /// What is wrong with the one that was asked for.
        error: Box<CheckpointError>,
        /// One to use instead.
        intact: PathBuf,
    },
    /// The checkpoint is sound, but has not what is asked for.
    #[error("{}: {reason}", .path.display())]
    NotInside {
        /// The checkpoint.
        path: PathBuf,
        /// What was asked for and what there is.
        reason: String,
    },
    /// A value has no place in the type it is to be exported in.
    #[error("parameter {path} has a value that f16 cannot hold (beyond 65504): export bf16 or f32")]
    Overflow {
        /// Module path.
        path: String,
    },
}

impl CheckpointError {
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { action, path, source }
    }

    pub(crate) fn damaged(path: &Path, reason: impl Into<String>) -> Self {
        Self::Damaged { path: path.to_owned(), reason: reason.into() }
    }

    pub(crate) fn missing(path: &Path, reason: impl Into<String>) -> Self {
        Self::Missing { path: path.to_owned(), reason: reason.into() }
    }
}
