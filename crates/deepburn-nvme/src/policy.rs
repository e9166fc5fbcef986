//! The options for reads and writes.

use crate::region::ALIGNMENT;
use crate::{SwapError, SwapOperation};

/// The maximum number of requests in flight. Each request uses a thread.
const MAX_QUEUE_DEPTH: usize = 1024;

/// Block size and queue depth of a swap file, with the names and defaults of DeepSpeed's `aio`
/// section.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IoPolicy {
    /// The size of a request to the disk in bytes, a multiple of 4096. Larger reads and writes are
    /// split into blocks of this size, which run in parallel.
    pub block_size: usize,
    /// The number of requests in flight, from 1 to 1024. Each request is issued by its own thread.
    pub queue_depth: usize,
    /// Whether to bypass the page cache, if the file system supports direct I/O.
    pub direct: bool,
}

impl Default for IoPolicy {
    fn default() -> Self {
        Self { block_size: 1 << 20, queue_depth: 8, direct: true }
    }
}

impl IoPolicy {
    /// Checks the block size and the queue depth.
    ///
    /// # Errors
    /// Returns an error with the field and the allowed values if a number is out of range.
    pub(crate) fn check(&self) -> Result<(), SwapError> {
        if self.block_size == 0 || !self.block_size.is_multiple_of(ALIGNMENT) {
            let rule = "a positive multiple of 4096 bytes; use 1048576, DeepSpeed's default";
            return Err(SwapError::Policy { field: "block_size", value: self.block_size, rule });
        }
        if !(1..=MAX_QUEUE_DEPTH).contains(&self.queue_depth) {
            let rule = "from 1 to 1024 requests; use 8, DeepSpeed's default";
            return Err(SwapError::Policy { field: "queue_depth", value: self.queue_depth, rule });
        }
        Ok(())
    }
}

/// The direction of a transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    /// From the disk.
    Read,
    /// To the disk.
    Write,
}

impl From<Direction> for SwapOperation {
    fn from(direction: Direction) -> Self {
        match direction {
            Direction::Read => Self::Read,
            Direction::Write => Self::Write,
        }
    }
}
