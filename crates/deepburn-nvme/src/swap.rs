//! The swap file of a rank.
//!
//! ```text
//! SwapFile
//!   regions    which bytes of the file are reserved     RegionAllocator
//!   pool       host memory for transfers                BufferPool
//!   queue      transfers and their blocks               IoQueue
//!   workers    threads that run blocks                  one per unit of queue depth
//!
//! file       | region 0 | pad | region 1 | pad | free ... |      regions start at multiples of 4096
//! ```

use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::thread::JoinHandle;
use std::time::Instant;

use rustix::io::Errno;

use crate::file::{DiskFile, no_space};
use crate::policy::Direction;
use crate::queue::{IoQueue, IoRequest};
use crate::raw_file::RawFile;
use crate::region::{self, RegionAllocator, Shortage};
use crate::statistics::WaitClock;
use crate::worker::start_worker;
use crate::{
    ALIGNMENT, AlignedBuffer, BufferPool, IoPolicy, IoStatistics, PendingIo, Region, SwapError,
    SwapOperation,
};

/// A swap file on a local disk. The file has no name and is read and written by worker threads. It
/// is preallocated, or grows in preallocated steps.
///
/// Bytes that were never written are read as zeros. Dropping the swap file completes all requests,
/// ends the threads and frees the disk space.
pub struct SwapFile {
    /// The folder, for messages.
    folder: Arc<Path>,
    /// The reserved parts of the file.
    regions: RegionAllocator,
    /// The transfers, shared with the workers.
    queue: Arc<IoQueue>,
    /// The buffers for transfers.
    pool: BufferPool,
    /// The total time that callers have been blocked.
    clock: Arc<WaitClock>,
    /// The threads, joined when the file is dropped.
    workers: Vec<JoinHandle<()>>,
    /// The file, which the workers hold too.
    file: Arc<dyn RawFile>,
    /// Whether the file grows with its regions.
    grows: bool,
}

/// The minimum number of bytes by which a file grows, if the disk has enough space. Large steps
/// make growing rare.
const GROWTH: u64 = 16 << 20;

impl SwapFile {
    /// Creates a swap file of `bytes` bytes in `folder` and starts its threads.
    ///
    /// Uses direct I/O if `policy.direct` is set and the file system supports it. The free space is
    /// checked and then reserved; see [`is_preallocated`](Self::is_preallocated).
    ///
    /// # Errors
    /// Returns an error if the folder is missing, is not a folder, is not writable, is in host
    /// memory (tmpfs, ramfs) or has too little free space, if a number in `policy` is out of range,
    /// or if a system call fails.
    pub fn create(folder: &Path, bytes: u64, policy: &IoPolicy) -> Result<Self, SwapError> {
        policy.check()?;
        // Reserving zero bytes is an error on Linux, so the file has at least one block.
        let bytes = bytes.max(1).checked_next_multiple_of(ALIGNMENT as u64).unwrap_or(u64::MAX);
        let file = DiskFile::create(folder, bytes, policy.direct)?;
        Self::with_file(Arc::new(file), folder, bytes, policy)
    }

    /// Creates a swap file that grows with its regions, for callers that do not know the total size
    /// in advance.
    ///
    /// # Errors
    /// Returns an error in the same cases as [`create`](Self::create). If the disk fills up later,
    /// reserving a region fails.
    pub fn growing(folder: &Path, policy: &IoPolicy) -> Result<Self, SwapError> {
        // A file has at least one block.
        let mut swap = Self::create(folder, 0, policy)?;
        swap.grows = true;
        Ok(swap)
    }

    /// Starts the threads of an existing file.
    ///
    /// # Errors
    /// Returns an error if a thread cannot be started. Threads that have already been started are
    /// ended.
    pub(crate) fn with_file(
        file: Arc<dyn RawFile>,
        folder: &Path,
        bytes: u64,
        policy: &IoPolicy,
    ) -> Result<Self, SwapError> {
        let mut swap = Self {
            folder: folder.into(),
            regions: RegionAllocator::new(bytes),
            queue: Arc::new(IoQueue::new(policy.block_size)),
            pool: BufferPool::new(),
            clock: Arc::default(),
            workers: Vec::with_capacity(policy.queue_depth),
            file,
            grows: false,
        };
        for index in 0..policy.queue_depth {
            let (queue, file) = (swap.queue.clone(), swap.file.clone());
            let worker = start_worker(index, queue, file, swap.folder.clone());
            // On an error, dropping `swap` ends the workers that have already been started.
            swap.workers.push(worker.map_err(|error| {
                let errno = Errno::from_io_error(&error).unwrap_or(Errno::AGAIN);
                SwapError::os(folder, SwapOperation::StartWorkers, (0, bytes), errno)
            })?);
        }
        Ok(swap)
    }

    /// Returns the number of bytes that a region of `bytes` bytes occupies in the file, including
    /// padding.
    pub fn padded(bytes: usize) -> u64 {
        region::padded(bytes)
    }

    /// Returns the size of the file in bytes.
    pub fn bytes(&self) -> u64 {
        self.regions.bytes()
    }

    /// Returns true if the page cache is bypassed.
    pub fn is_direct(&self) -> bool {
        self.file.is_direct()
    }

    /// Returns true if all bytes of the file are reserved on the disk, so that writes cannot fail
    /// because of a full disk.
    pub fn is_preallocated(&self) -> bool {
        self.file.is_preallocated()
    }

    /// Returns true if the file grows with its regions.
    pub fn grows(&self) -> bool {
        self.grows
    }

    /// Returns the pool from which reads allocate their buffers.
    pub fn pool(&self) -> &BufferPool {
        &self.pool
    }

    /// Reserves a region of `bytes` bytes. It contains zeros, or arbitrary data if it reuses a
    /// released part of the file.
    ///
    /// # Errors
    /// Returns an error if there is not enough space in the file, or if the file has to grow and
    /// the disk is full.
    pub fn region(&self, bytes: usize) -> Result<Region, SwapError> {
        self.regions.allocate(bytes, |shortage| self.grow(shortage))
    }

    /// Grows the file for a region and returns its new size in bytes.
    ///
    /// # Errors
    /// Returns an error if the file cannot grow or the disk is full.
    fn grow(&self, shortage: Shortage) -> Result<u64, SwapError> {
        let Shortage { needed, left, bytes, end } = shortage;
        if !self.grows {
            let folder = self.folder.to_path_buf();
            return Err(SwapError::Full { folder, requested: needed, left, bytes });
        }
        // Growing by at least 16 MiB keeps calls of `fallocate` rare.
        let ample = end.max(bytes.saturating_add(GROWTH));
        if self.file.grow(bytes..ample).is_ok() {
            return Ok(ample);
        }
        // If the disk is nearly full, the file only grows by the missing bytes.
        let grown = self.file.grow(bytes..end);
        grown.map_err(|errno| no_space(&self.folder, bytes..end, errno))?;
        Ok(end)
    }

    /// Releases a region, so that its part of the file can be reserved again. Requests in progress
    /// complete before requests for the next region in this part of the file. The released region
    /// must not be used afterwards.
    ///
    /// Regions of other files are ignored.
    pub fn release(&self, region: &Region) {
        if region.file == self.regions.file() {
            self.regions.release(region);
        }
    }

    /// Starts to read `range`, in bytes of `region`, into a buffer from the pool.
    ///
    /// The range starts at a multiple of [`ALIGNMENT`] and may end anywhere.
    ///
    /// # Errors
    /// Returns an error if the range is not within the region or not aligned, if the region belongs
    /// to another file, if there is not enough memory for a buffer, or if an earlier write failed.
    pub fn read(&self, region: &Region, range: Range<usize>) -> Result<PendingIo, SwapError> {
        let Some(length) = range.end.checked_sub(range.start) else {
            let reason = format!("the range ends at {}, before its start; swap them", range.end);
            return Err(self.refuse(Direction::Read, range.start, 0, reason));
        };
        self.check(Direction::Read, region, range.start, length)?;
        let buffer = self.pool.unfilled(length)?;
        self.start(Direction::Read, region, range.start, buffer)
    }

    /// Starts to read `buffer.len()` bytes from `region`, starting at byte `offset`, into the given
    /// buffer.
    ///
    /// # Errors
    /// Returns an error in the same cases as [`read`](Self::read). The buffer is then returned to
    /// its pool.
    pub fn read_into(
        &self,
        region: &Region,
        offset: usize,
        buffer: AlignedBuffer,
    ) -> Result<PendingIo, SwapError> {
        self.check(Direction::Read, region, offset, buffer.len())?;
        self.start(Direction::Read, region, offset, buffer)
    }

    /// Starts to write `buffer` to `region`, starting at byte `offset`.
    ///
    /// The write must start at a multiple of [`ALIGNMENT`]. It must end at a multiple of
    /// [`ALIGNMENT`] or at the end of the region, because the disk writes whole blocks and the
    /// bytes after the buffer would be overwritten.
    ///
    /// # Errors
    /// Returns an error if the write does not fit in the region or is not aligned, if the region
    /// belongs to another file, or if an earlier write failed. The buffer is then returned to its
    /// pool.
    pub fn write(
        &self,
        region: &Region,
        offset: usize,
        buffer: AlignedBuffer,
    ) -> Result<PendingIo, SwapError> {
        let end = offset.saturating_add(buffer.len());
        self.check(Direction::Write, region, offset, buffer.len())?;
        if !end.is_multiple_of(ALIGNMENT) && end != region.len() {
            let reason = format!(
                "a write ends at a multiple of {ALIGNMENT} bytes or at the end of its region, byte \
                 {}; write more, or reserve a region for this part",
                region.len()
            );
            return Err(self.refuse(Direction::Write, offset, buffer.len(), reason));
        }
        self.start(Direction::Write, region, offset, buffer)
    }

    /// Waits until no request is in progress.
    ///
    /// # Errors
    /// Returns an error if a write failed at any time, even if its [`PendingIo`] was dropped.
    pub fn wait_all(&self) -> Result<(), SwapError> {
        let started = Instant::now();
        let outcome = self.queue.wait_all();
        self.clock.add(started.elapsed());
        outcome
    }

    /// Returns the statistics since the file was created.
    pub fn statistics(&self) -> IoStatistics {
        IoStatistics { waited: self.clock.total(), ..self.queue.statistics() }
    }

    /// Checks the conditions that are common to reads and writes.
    ///
    /// # Errors
    /// Returns an error if an earlier write failed, or if the request is not within its region or
    /// not aligned.
    fn check(
        &self,
        direction: Direction,
        region: &Region,
        offset: usize,
        length: usize,
    ) -> Result<(), SwapError> {
        self.queue.check()?;
        let reason = if region.file != self.regions.file() {
            "the region belongs to another swap file; use the file that reserved it".to_owned()
        } else if offset.checked_add(length).is_none_or(|end| end > region.len()) {
            format!("the region has {} bytes; stay within them", region.len())
        } else if !offset.is_multiple_of(ALIGNMENT) {
            format!("the offset must be a multiple of {ALIGNMENT}; start at one")
        } else {
            return Ok(());
        };
        Err(self.refuse(direction, offset, length, reason))
    }

    /// Returns the error for an invalid request.
    fn refuse(
        &self,
        direction: Direction,
        offset: usize,
        length: usize,
        reason: String,
    ) -> SwapError {
        SwapError::Request {
            folder: self.folder.to_path_buf(),
            operation: direction.into(),
            offset,
            length,
            reason,
        }
    }

    /// Starts a transfer that has been checked. An empty transfer completes immediately.
    fn start(
        &self,
        direction: Direction,
        region: &Region,
        offset: usize,
        buffer: AlignedBuffer,
    ) -> Result<PendingIo, SwapError> {
        let (sender, receiver) = sync_channel(1);
        if buffer.is_empty() {
            // Sending cannot fail or block: the channel has a capacity of one, and the receiver is
            // still alive.
            let _ = sender.send(Ok(buffer));
        } else {
            let offset = region.offset + offset as u64;
            self.queue.submit(IoRequest { direction, offset, buffer, outcome: sender })?;
        }
        Ok(PendingIo::new(receiver, self.clock.clone()))
    }
}

/// Completes all queued requests, so that the buffers of dropped [`PendingIo`]s are no longer in
/// use when their memory is freed.
impl Drop for SwapFile {
    fn drop(&mut self) {
        self.queue.close();
        for worker in self.workers.drain(..) {
            // A panic of a worker has already been printed, and `drop` cannot return an error.
            let _ = worker.join();
        }
    }
}

impl fmt::Debug for SwapFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SwapFile")
            .field("folder", &self.folder)
            .field("bytes", &self.bytes())
            .field("is_direct", &self.is_direct())
            .field("statistics", &self.statistics())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
