//! A file on NVMe.

use std::path::PathBuf;

use serde::Serialize;

/// A file of each rank on NVMe, and how it is read and written (`aio`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct SwapFilePlan {
    /// Folder in which ranks create their files.
    pub folder: PathBuf,
    /// Bytes of one request.
    pub block_size: usize,
    /// Requests in flight.
    pub queue_depth: usize,
}
