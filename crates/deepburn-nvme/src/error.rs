//! The errors of a swap file.
//!
//! Every message names the folder and the invalid value, and suggests how to fix the problem.
//! Errors implement `Clone`, because all calls after a failed write return its error.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::io::Errno;
use thiserror::Error;

/// The operation that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SwapOperation {
    /// Inspecting the folder.
    Inspect,
    /// Creating the file.
    Create,
    /// Reserving the file's space on the disk.
    Preallocate,
    /// Starting the worker threads.
    StartWorkers,
    /// Reading a region.
    Read,
    /// Writing a region.
    Write,
}

impl fmt::Display for SwapOperation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Inspect => "inspect the folder",
            Self::Create => "create the file",
            Self::Preallocate => "preallocate",
            Self::StartWorkers => "start the worker threads",
            Self::Read => "read",
            Self::Write => "write",
        })
    }
}

/// The reason why a swap file cannot be created, read or written.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum SwapError {
    /// The folder does not exist.
    #[error(
        "swap folder {}: not found; create it on a local disk, or correct `nvme_path`",
        folder.display()
    )]
    Missing {
        /// The folder.
        folder: PathBuf,
    },

    /// The path is not a folder.
    #[error(
        "swap folder {}: not a folder; set `nvme_path` to a folder on a local disk",
        folder.display()
    )]
    NotAFolder {
        /// The path.
        folder: PathBuf,
    },

    /// No file can be created in the folder.
    #[error(
        "swap folder {}: read-only or without write permission; mount it writable, change its \
         permissions, or set `nvme_path` to another folder",
        folder.display()
    )]
    ReadOnly {
        /// The folder.
        folder: PathBuf,
    },

    /// The folder is on a file system in host memory.
    #[error(
        "swap folder {}: on {filesystem}, which keeps files in host memory; set `nvme_path` to a \
         folder on a disk, or offload to `cpu`",
        folder.display()
    )]
    InMemory {
        /// The folder.
        folder: PathBuf,
        /// Its file system.
        filesystem: &'static str,
    },

    /// The disk has too little free space.
    #[error(
        "swap folder {}: {needed} bytes needed, {free} bytes free; free {} more bytes, set \
         `nvme_path` to a larger disk, or use more ranks on other machines",
        folder.display(), needed.saturating_sub(*free)
    )]
    NoSpace {
        /// The folder.
        folder: PathBuf,
        /// The size of the swap file in bytes.
        needed: u64,
        /// The free space in bytes.
        free: u64,
    },

    /// A number in the policy is out of range.
    #[error("aio.{field}: unsupported value: {value}; it must be {rule}")]
    Policy {
        /// The field.
        field: &'static str,
        /// Its value.
        value: usize,
        /// The allowed values and a recommendation.
        rule: &'static str,
    },

    /// The file has no space for another region.
    #[error(
        "swap file in {}: {requested} bytes requested, {left} of its {bytes} bytes left; create it \
         with the sum of `SwapFile::padded` over all regions",
        folder.display()
    )]
    Full {
        /// The folder.
        folder: PathBuf,
        /// The number of bytes requested, including padding.
        requested: u64,
        /// The number of bytes after the last region.
        left: u64,
        /// The size of the file in bytes.
        bytes: u64,
    },

    /// A read or write is invalid for its region.
    #[error(
        "swap file in {}: cannot {operation} {length} bytes at byte {offset} of a region: {reason}",
        folder.display()
    )]
    Request {
        /// The folder.
        folder: PathBuf,
        /// Read or write.
        operation: SwapOperation,
        /// Offset in the region, in bytes.
        offset: usize,
        /// Length in bytes.
        length: usize,
        /// The violated rule and how to fix the problem.
        reason: String,
    },

    /// There is not enough host memory for offloaded states.
    #[error(
        "out of host memory: cannot allocate {bytes} bytes for offloaded states beside {held} bytes of \
         buffers; use fewer ranks on this machine, or a machine with more memory"
    )]
    OutOfMemory {
        /// Bytes requested.
        bytes: usize,
        /// The number of bytes that the buffers of the swap file already use.
        held: usize,
    },

    /// A system call failed.
    #[error(
        "swap file in {}: cannot {operation} {length} bytes at byte {offset}: {}; {}",
        folder.display(), io::Error::from_raw_os_error(*code), remedy(*code)
    )]
    Os {
        /// The folder.
        folder: PathBuf,
        /// The operation that failed.
        operation: SwapOperation,
        /// Offset in the file, in bytes.
        offset: u64,
        /// Length in bytes.
        length: u64,
        /// The error number (`errno`).
        code: i32,
    },

    /// The disk repeatedly transfers fewer bytes than requested.
    #[error(
        "swap file in {}: cannot {operation} {length} bytes at byte {offset}: only {transferred} \
         bytes were transferred; the file was truncated or the disk fails: see `dmesg` and use \
         another disk",
        folder.display()
    )]
    Short {
        /// The folder.
        folder: PathBuf,
        /// Read or write.
        operation: SwapOperation,
        /// Offset in the file, in bytes.
        offset: u64,
        /// Length in bytes.
        length: u64,
        /// Bytes transferred.
        transferred: u64,
    },

    /// An earlier write failed, so the contents of the file are invalid.
    #[error("an earlier write failed; resume from the latest checkpoint: {0}")]
    EarlierWrite(Arc<SwapError>),
}

impl SwapError {
    /// Returns the error for a failed system call on `length` bytes at `offset` in the file.
    pub(crate) fn os(
        folder: &Path,
        operation: SwapOperation,
        (offset, length): (u64, u64),
        errno: Errno,
    ) -> Self {
        Self::Os {
            folder: folder.to_owned(),
            operation,
            offset,
            length,
            code: errno.raw_os_error(),
        }
    }

    /// Returns the error for calls after this failed write.
    pub(crate) fn earlier_write(&self) -> Self {
        Self::EarlierWrite(Arc::new(self.clone()))
    }
}

/// Returns the advice for an error number.
fn remedy(code: i32) -> &'static str {
    match Errno::from_raw_os_error(code) {
        Errno::NOSPC => {
            "the disk is full, although space was checked at the start: free space, or set \
             `nvme_path` to another disk"
        }
        Errno::DQUOT => "the disk quota is used up: raise it, or set `nvme_path` to another disk",
        Errno::IO => {
            "the disk reports a failure: see `dmesg` and `smartctl -a`, and set `nvme_path` to \
             another disk"
        }
        Errno::FBIG => {
            "the file is larger than its file system or `ulimit -f` allows: set `nvme_path` to \
             another file system, or raise the limit"
        }
        Errno::MFILE | Errno::NFILE => "too many files are open: raise `ulimit -n`",
        Errno::AGAIN | Errno::NOMEM => {
            "the system is out of threads or memory: raise `ulimit -u`, or reduce `aio.queue_depth`"
        }
        _ => "see `dmesg`, or set `nvme_path` to a folder on another local disk",
    }
}
