//! The blocks of a transfer. Each block is one request to the disk, and short reads and writes are
//! continued.
//!
//! ```text
//! transfer   4,000,004 bytes of a buffer, padded to 4,001,792
//! blocks     | 1 MiB | 1 MiB | 1 MiB | 836 KiB |     in parallel, one worker each
//! ```

use std::path::Path;
use std::slice;

use rustix::io::Errno;

use crate::policy::Direction;
use crate::raw_file::RawFile;
use crate::{ALIGNMENT, SwapError};

/// The memory of a block.
///
/// Blocks of one transfer run in parallel on several workers, and each block uses a different part
/// of the same buffer. The borrow checker cannot verify this, so the memory is a raw pointer.
///
/// Invariant: the range is within one buffer, and no other block in progress uses any part of it.
#[derive(Debug)]
pub(crate) struct BlockMemory {
    /// The first byte.
    start: *mut u8,
    /// The length in bytes, a multiple of the alignment.
    length: usize,
}

impl BlockMemory {
    /// Returns the `length` bytes from `start` on.
    pub(crate) fn new(start: *mut u8, length: usize) -> Self {
        Self { start, length }
    }
}

/// A part of a transfer that is read or written by one worker.
#[derive(Debug)]
pub(crate) struct TransferBlock {
    /// The number of the transfer.
    pub(crate) transfer: u64,
    /// Read or write.
    pub(crate) direction: Direction,
    /// The offset in the file, in bytes, aligned.
    pub(crate) offset: u64,
    /// The memory that is read or written.
    pub(crate) memory: BlockMemory,
}

impl TransferBlock {
    /// Returns the length in bytes.
    pub(crate) fn len(&self) -> usize {
        self.memory.length
    }

    /// Reads or writes the complete block. Interrupted and short transfers are continued at the
    /// position where they ended. With direct I/O, they are continued at the last complete sector.
    ///
    /// # Errors
    /// Returns an error if a system call fails or transfers no bytes.
    #[allow(unsafe_code)]
    pub(crate) fn run(&mut self, file: &dyn RawFile, folder: &Path) -> Result<(), SwapError> {
        // SAFETY: `IoQueue` owns the buffer from before it hands out the first block until every
        // block was handed back, so the memory lives and nobody else refers to it. Each part of a
        // buffer is handed out once, so blocks are disjoint. `AlignedBuffer::block` has checked the
        // bounds, and the system has initialized the mapping.
        let memory = unsafe { slice::from_raw_parts_mut(self.memory.start, self.memory.length) };
        let mut done = 0;
        while done < memory.len() {
            let offset = self.offset + done as u64;
            let rest = &mut memory[done..];
            let outcome = match self.direction {
                Direction::Read => file.read_at(rest, offset),
                Direction::Write => file.write_at(rest, offset),
            };
            let transferred = match outcome {
                Ok(transferred) => transferred,
                // A signal came before any byte was transferred.
                Err(Errno::INTR) => continue,
                Err(errno) => {
                    let span = (offset, rest.len() as u64);
                    return Err(SwapError::os(folder, self.direction.into(), span, errno));
                }
            };
            // Direct I/O cannot continue in the middle of a sector, so a partial sector is
            // transferred again.
            let progress = match transferred < rest.len() && file.is_direct() {
                true => transferred - transferred % ALIGNMENT,
                false => transferred,
            };
            if progress == 0 {
                return Err(SwapError::Short {
                    folder: folder.to_owned(),
                    operation: self.direction.into(),
                    offset,
                    length: rest.len() as u64,
                    transferred: transferred as u64,
                });
            }
            done += progress;
        }
        file.drop_cache(self.offset, memory.len() as u64);
        Ok(())
    }
}
