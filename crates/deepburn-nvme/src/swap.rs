//! The swap file of a rank.

use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::thread::JoinHandle;
use std::time::Instant;

use rustix::io::Errno;

use crate::file::{DiskFile, RawFile, no_space};
use crate::policy::Direction;
use crate::queue::{IoQueue, IoRequest};
use crate::region::{self, RegionAllocator, Shortage};
use crate::statistics::WaitClock;
use crate::worker::start_worker;
use crate::{
    ALIGNMENT, Buffer, BufferPool, IoPolicy, IoStatistics, PendingIo, Region, SwapError,
    SwapOperation,
};

/// A file without a name on a local disk, read and written by a few threads. It is preallocated, or grows
/// by preallocated steps.
///
/// It starts as zeros, so reading what was never written returns zeros. Dropping it completes all
/// requests, ends the threads and frees the disk space.
pub struct SwapFile {
    folder: Arc<Path>,
    regions: RegionAllocator,
    queue: Arc<IoQueue>,
    pool: BufferPool,
    clock: Arc<WaitClock>,
    workers: Vec<JoinHandle<()>>,
    is_direct: bool,
    is_preallocated: bool,
    /// The file itself, where it may grow.
    growing: Option<Arc<dyn RawFile>>,
}

/// Bytes by which a file grows at least where the disk has them, so that it does so rarely.
const GROWTH: u64 = 16 << 20;

impl SwapFile {
    /// Creates a swap file of `bytes` bytes in `folder` and starts its threads.
    ///
    /// Uses direct I/O if `policy` asks for it and the file system supports it. The free space is
    /// checked, then reserved; see [`is_preallocated`](Self::is_preallocated).
    ///
    /// # Errors
    /// The folder is missing, not a folder, not writable, in host memory (tmpfs, ramfs) or has too
    /// little free space; a number of `policy` is out of range; the system reports a failure.
    pub fn create(folder: &Path, bytes: u64, policy: &IoPolicy) -> Result<Self, SwapError> {
        policy.check()?;
        // The system refuses to reserve nothing.
        let bytes = bytes.max(1).checked_next_multiple_of(ALIGNMENT as u64).unwrap_or(u64::MAX);
        let file = DiskFile::create(folder, bytes, policy.direct)?;
        let is_preallocated = file.is_preallocated();
        Self::with_file(Arc::new(file), folder, bytes, policy, is_preallocated)
    }

    /// Creates a swap file that grows with its regions, where nobody knows how many there will be.
    ///
    /// # Errors
    /// As [`create`](Self::create). A disk that is full later fails the reservation of a region.
    pub fn growing(folder: &Path, policy: &IoPolicy) -> Result<Self, SwapError> {
        policy.check()?;
        let bytes = ALIGNMENT as u64;
        let file = Arc::new(DiskFile::create(folder, bytes, policy.direct)?);
        let is_preallocated = file.is_preallocated();
        let mut swap = Self::with_file(file.clone(), folder, bytes, policy, is_preallocated)?;
        swap.growing = Some(file);
        Ok(swap)
    }

    /// Starts the threads of a file that exists.
    pub(crate) fn with_file(
        file: Arc<dyn RawFile>,
        folder: &Path,
        bytes: u64,
        policy: &IoPolicy,
        is_preallocated: bool,
    ) -> Result<Self, SwapError> {
        let mut swap = Self {
            folder: folder.into(),
            regions: RegionAllocator::new(bytes),
            queue: Arc::new(IoQueue::new(policy.block_size)),
            pool: BufferPool::new(),
            clock: Arc::default(),
            workers: Vec::with_capacity(policy.queue_depth),
            is_direct: file.is_direct(),
            is_preallocated,
            growing: None,
        };
        for index in 0..policy.queue_depth {
            let worker = start_worker(index, swap.queue.clone(), file.clone(), swap.folder.clone());
            // Dropping `swap` ends the workers that were started.
            swap.workers.push(worker.map_err(|error| {
                let errno = Errno::from_io_error(&error).unwrap_or(Errno::AGAIN);
                SwapError::os(folder, SwapOperation::StartWorkers, (0, bytes), errno)
            })?);
        }
        Ok(swap)
    }

    /// Bytes that a region of `bytes` bytes takes up in the file.
    pub fn padded(bytes: usize) -> u64 {
        region::padded(bytes)
    }

    /// Bytes of the file.
    pub fn bytes(&self) -> u64 {
        self.regions.bytes()
    }

    /// Whether the page cache is bypassed.
    pub fn is_direct(&self) -> bool {
        self.is_direct
    }

    /// Whether the disk has reserved all bytes, so that it cannot fill up during training.
    pub fn is_preallocated(&self) -> bool {
        self.is_preallocated
    }

    /// Whether the file grows with its regions.
    pub fn grows(&self) -> bool {
        self.growing.is_some()
    }

    /// The pool that reads take their buffers from.
    pub fn pool(&self) -> &BufferPool {
        &self.pool
    }

    /// Reserves a region of `bytes` bytes. What it holds is unknown where it was released before, and
    /// zeros otherwise.
    ///
    /// # Errors
    /// Fewer bytes are left, or the disk is full and the file cannot grow.
    pub fn region(&self, bytes: usize) -> Result<Region, SwapError> {
        self.regions.allocate(bytes, |shortage| self.grow(shortage))
    }

    /// Makes room for a region, and returns the bytes of the file.
    fn grow(&self, shortage: Shortage) -> Result<u64, SwapError> {
        let Shortage { needed, left, bytes, end } = shortage;
        let Some(file) = &self.growing else {
            let folder = self.folder.to_path_buf();
            return Err(SwapError::Full { folder, requested: needed, left, bytes });
        };
        let ample = end.max(bytes.saturating_add(GROWTH));
        if file.grow(bytes..ample).is_ok() {
            return Ok(ample);
        }
        // On a disk that is nearly full, what is needed and no more.
        file.grow(bytes..end).map_err(|errno| no_space(&self.folder, bytes..end, errno))?;
        Ok(end)
    }

    /// Takes a region back, whose part of the file may then be reserved again. Requests for it that are in
    /// progress complete before its next owner's; nobody may use it otherwise.
    pub fn release(&self, region: &Region) {
        if region.file == self.regions.file() {
            self.regions.release(region);
        }
    }

    /// Starts to read `range`, in bytes of `region`, into a buffer of the pool.
    ///
    /// The range may end anywhere; it starts at a multiple of [`ALIGNMENT`].
    ///
    /// # Errors
    /// The range is not in the region or not aligned, the region belongs to another file, there is no
    /// memory for a buffer, or an earlier write failed.
    pub fn read(&self, region: &Region, range: Range<usize>) -> Result<PendingIo, SwapError> {
        let Some(length) = range.end.checked_sub(range.start) else {
            let reason = format!("the range ends at {}, before its start; swap them", range.end);
            return Err(self.refuse(Direction::Read, range.start, 0, reason));
        };
        self.check(Direction::Read, region, range.start, length)?;
        let buffer = self.pool.unfilled(length)?;
        self.start(Direction::Read, region, range.start, buffer)
    }

    /// Starts to read into a given buffer: as many bytes as it has, from `offset` of `region` on.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn read_into(
        &self,
        region: &Region,
        offset: usize,
        buffer: Buffer,
    ) -> Result<PendingIo, SwapError> {
        self.check(Direction::Read, region, offset, buffer.len())?;
        self.start(Direction::Read, region, offset, buffer)
    }

    /// Starts to write `buffer` to `region`, from byte `offset` on.
    ///
    /// The write starts at a multiple of [`ALIGNMENT`], and ends at one or at the end of the region:
    /// the disk writes whole blocks, and the bytes behind the buffer would be lost.
    ///
    /// # Errors
    /// The write does not fit into the region or is not aligned, the region belongs to another file,
    /// or an earlier write failed.
    pub fn write(
        &self,
        region: &Region,
        offset: usize,
        buffer: Buffer,
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
    /// A write failed, waited for or not.
    pub fn wait_all(&self) -> Result<(), SwapError> {
        let started = Instant::now();
        let outcome = self.queue.wait_all();
        self.clock.add(started.elapsed());
        outcome
    }

    /// Bytes and times since the file was created.
    pub fn statistics(&self) -> IoStatistics {
        IoStatistics { waited: self.clock.total(), ..self.queue.statistics() }
    }

    /// Checks what reads and writes have in common.
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

    /// Starts a transfer that was checked.
    fn start(
        &self,
        direction: Direction,
        region: &Region,
        offset: usize,
        buffer: Buffer,
    ) -> Result<PendingIo, SwapError> {
        let (sender, receiver) = sync_channel(1);
        if buffer.is_empty() {
            // The channel has room for one, and its other end is still here.
            let _ = sender.send(Ok(buffer));
        } else {
            let offset = region.offset + offset as u64;
            self.queue.submit(IoRequest { direction, offset, buffer, outcome: sender })?;
        }
        Ok(PendingIo::new(receiver, self.clock.clone()))
    }
}

impl Drop for SwapFile {
    fn drop(&mut self) {
        self.queue.close();
        for worker in self.workers.drain(..) {
            // A panic of a worker has been printed, and there is nobody to return it to.
            let _ = worker.join();
        }
    }
}

impl fmt::Debug for SwapFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SwapFile")
            .field("folder", &self.folder)
            .field("bytes", &self.bytes())
            .field("is_direct", &self.is_direct)
            .field("statistics", &self.statistics())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
