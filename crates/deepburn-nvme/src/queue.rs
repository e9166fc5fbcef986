//! The request queue of a swap file.
//!
//! Each transfer is split into blocks, which the workers take in order. A transfer is ready when
//! all earlier transfers that conflict with it are complete. Two transfers conflict if their ranges
//! overlap and at least one of them is a write.
//!
//! ```text
//! submit --> active, blocked by earlier conflicts
//!               |  the last of them is complete
//!               v
//!            ready: workers take its blocks       front of the queue first
//!               |  all blocks are done
//!               v
//!            complete: result sent, dependents unblocked
//! ```
//!
//! The main type is [`IoQueue`]. After a failed write it rejects new transfers, and ready transfers
//! fail without I/O, because the file no longer contains the data that callers stored.
//!
//! One lock protects the state. It is only held for list operations, never during I/O.

use std::collections::{BTreeMap, VecDeque};
use std::sync::mpsc::SyncSender;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::policy::Direction;
use crate::transfer_block::TransferBlock;
use crate::{AlignedBuffer, IoStatistics, SwapError};

/// A read or write that a caller has started. It owns the buffer until it is complete.
#[derive(Debug)]
pub(crate) struct IoRequest {
    /// Read or write.
    pub(crate) direction: Direction,
    /// The offset in the file in bytes, aligned.
    pub(crate) offset: u64,
    /// The data. Its padded length is transferred.
    pub(crate) buffer: AlignedBuffer,
    /// The channel for the result. It has a capacity of one message, so sending never blocks.
    pub(crate) outcome: SyncSender<Result<AlignedBuffer, SwapError>>,
}

impl IoRequest {
    /// Returns the offset after the last byte.
    fn end(&self) -> u64 {
        self.offset + self.buffer.padded_len() as u64
    }

    /// Returns true if the two requests must not be reordered.
    fn conflicts_with(&self, other: &Self) -> bool {
        let overlaps = self.offset < other.end() && other.offset < self.end();
        overlaps && (self.direction == Direction::Write || other.direction == Direction::Write)
    }
}

/// A block that a worker has run.
#[derive(Debug)]
pub(crate) struct Finished {
    /// The block.
    pub(crate) block: TransferBlock,
    /// Its result.
    pub(crate) outcome: Result<(), SwapError>,
    /// The time that it took.
    pub(crate) busy: Duration,
}

/// The requests of one swap file, shared by callers and workers.
#[derive(Debug)]
pub(crate) struct IoQueue {
    /// The maximum block size in bytes.
    block_size: usize,
    /// The requests.
    state: Mutex<QueueState>,
    /// Notifies workers that blocks are available or that the queue is closed.
    work: Condvar,
    /// Notifies callers that no request is in progress.
    idle: Condvar,
}

/// The state behind the lock.
#[derive(Debug, Default)]
struct QueueState {
    /// The number of the next transfer.
    next_transfer: u64,
    /// Transfers that are not complete, by number, which is the order in which they were started.
    active: BTreeMap<u64, Active>,
    /// Transfers that are not blocked by conflicts and have blocks that no worker has taken yet.
    ready: VecDeque<u64>,
    /// The first write that failed, after which the file is unusable.
    failure: Option<SwapError>,
    /// Whether workers exit as soon as no request is in progress.
    is_closed: bool,
    /// The bytes and times of completed transfers.
    statistics: IoStatistics,
    /// The start of the current period with requests in progress; `None` if no request is in
    /// progress.
    active_since: Option<Instant>,
}

/// A transfer in progress.
#[derive(Debug)]
struct Active {
    /// The request.
    transfer: IoRequest,
    /// The number of bytes in blocks that workers have taken, or that were canceled after a
    /// failure.
    taken: usize,
    /// The number of blocks that workers are running.
    running: usize,
    /// The number of earlier transfers that must be complete first.
    blocked_by: usize,
    /// Later transfers that wait for this one.
    dependents: Vec<u64>,
    /// The first failure of a block.
    failure: Option<SwapError>,
}

impl IoQueue {
    /// Returns an empty queue that splits transfers into blocks of `block_size` bytes.
    pub(crate) fn new(block_size: usize) -> Self {
        Self { block_size, state: Mutex::default(), work: Condvar::new(), idle: Condvar::new() }
    }

    /// Starts a transfer of at least one byte. Wakes one worker for a single block, and all workers
    /// for several blocks.
    ///
    /// # Errors
    /// Returns an error if an earlier write failed. The buffer is then returned to its pool.
    pub(crate) fn submit(&self, transfer: IoRequest) -> Result<(), SwapError> {
        // The number of workers that the transfer can use.
        let blocks = transfer.buffer.len().div_ceil(self.block_size);
        let mut state = self.lock();
        state.check()?;
        let is_ready = state.add(transfer);
        drop(state);
        match blocks {
            _ if !is_ready => {}
            1 => self.work.notify_one(),
            _ => self.work.notify_all(),
        }
        Ok(())
    }

    /// Records the block that a worker has finished and returns the next block. Waits until a block
    /// is available. Returns `None` if the queue is closed and empty.
    pub(crate) fn next(&self, finished: Option<Finished>) -> Option<TransferBlock> {
        let mut state = self.lock();
        if let Some(finished) = finished {
            // Transfers that waited for this transfer may now be ready, so all workers are woken.
            if state.finish(finished) && !state.ready.is_empty() {
                self.work.notify_all();
            }
        }
        loop {
            let block = state.take_block(self.block_size);
            if state.active.is_empty() {
                self.idle.notify_all();
                if state.is_closed {
                    self.work.notify_all();
                    return None;
                }
            }
            if block.is_some() {
                return block;
            }
            state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Waits until no request is in progress.
    ///
    /// # Errors
    /// Returns an error if a write failed at any time.
    pub(crate) fn wait_all(&self) -> Result<(), SwapError> {
        let mut state = self.lock();
        while !state.active.is_empty() {
            state = self.idle.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.check()
    }

    /// Returns an error if an earlier write failed.
    pub(crate) fn check(&self) -> Result<(), SwapError> {
        self.lock().check()
    }

    /// Closes the queue: workers exit as soon as no request is in progress.
    pub(crate) fn close(&self) {
        self.lock().is_closed = true;
        self.work.notify_all();
    }

    /// Returns the statistics, including the current period of activity. The field `waited` is
    /// counted by [`crate::PendingIo`].
    pub(crate) fn statistics(&self) -> IoStatistics {
        let state = self.lock();
        let current = state.active_since.map(|since| since.elapsed()).unwrap_or_default();
        IoStatistics { active: state.statistics.active + current, ..state.statistics }
    }

    /// Locks the state. The state is valid even if another thread panicked while it held the lock,
    /// because no change is interrupted by code that could panic.
    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl QueueState {
    /// Returns an error if a write failed.
    fn check(&self) -> Result<(), SwapError> {
        self.failure.as_ref().map_or(Ok(()), |failure| Err(failure.earlier_write()))
    }

    /// Adds a transfer and returns true if it can start immediately.
    ///
    /// The transfer is compared with every active transfer. There are at most a few dozen active
    /// transfers, because each of them holds a buffer.
    fn add(&mut self, transfer: IoRequest) -> bool {
        let id = self.next_transfer;
        self.next_transfer += 1;
        let mut blocked_by = 0;
        for earlier in self.active.values_mut() {
            if earlier.transfer.conflicts_with(&transfer) {
                // The order of submission decides, so a read that follows a write gets what was
                // written, and two writes of a range end with the later one.
                earlier.dependents.push(id);
                blocked_by += 1;
            }
        }
        self.active_since.get_or_insert_with(Instant::now);
        let active = Active {
            transfer,
            taken: 0,
            running: 0,
            blocked_by,
            dependents: Vec::new(),
            failure: None,
        };
        self.active.insert(id, active);
        if blocked_by == 0 {
            self.ready.push_back(id);
        }
        blocked_by == 0
    }

    /// Returns the next block of the first ready transfer; `None` if there is none. After a failed
    /// write, ready transfers are completed with the failure instead.
    fn take_block(&mut self, block_size: usize) -> Option<TransferBlock> {
        while let Some(&id) = self.ready.front() {
            let active = self.active.get_mut(&id).expect("ready transfers are active");
            if let Some(failure) = &self.failure {
                active.give_up(failure.earlier_write());
                self.ready.pop_front();
                self.retire_if_done(id);
                continue;
            }
            // Blocks are taken from front to back, so that the disk requests of a transfer are
            // sequential.
            let left = active.transfer.buffer.padded_len() - active.taken;
            let length = left.min(block_size);
            let block = TransferBlock {
                transfer: id,
                direction: active.transfer.direction,
                offset: active.transfer.offset + active.taken as u64,
                memory: active.transfer.buffer.block(active.taken, length),
            };
            active.taken += length;
            active.running += 1;
            if length == left {
                self.ready.pop_front();
            }
            return Some(block);
        }
        None
    }

    /// Records a finished block. Returns true if its transfer is complete.
    ///
    /// A failed write invalidates the file. A failed block ends its transfer: blocks that have not
    /// been taken are canceled, and the transfer completes when all running blocks have finished,
    /// because they use the buffer.
    fn finish(&mut self, finished: Finished) -> bool {
        let Finished { block, outcome, busy } = finished;
        self.statistics.busy += busy;
        let id = block.transfer;
        let active = self.active.get_mut(&id).expect("a transfer is active until its last block");
        active.running -= 1;
        match outcome {
            Ok(()) => match block.direction {
                Direction::Read => self.statistics.bytes_read += block.len() as u64,
                Direction::Write => self.statistics.bytes_written += block.len() as u64,
            },
            Err(error) => {
                // A failed read changes nothing on the disk, so only its own transfer fails.
                if block.direction == Direction::Write && self.failure.is_none() {
                    tracing::error!("{error}");
                    self.failure = Some(error.clone());
                }
                active.give_up(error);
                self.ready.retain(|ready| *ready != id);
            }
        }
        self.retire_if_done(id)
    }

    /// Completes a transfer if all of its blocks are done: unblocks its dependents and sends the
    /// result. Returns true if the transfer was completed.
    fn retire_if_done(&mut self, id: u64) -> bool {
        if !self.active.get(&id).is_some_and(Active::is_done) {
            return false;
        }
        let Some(done) = self.active.remove(&id) else { return false };
        for dependent in done.dependents {
            let later = self.active.get_mut(&dependent).expect("dependents wait for this one");
            later.blocked_by -= 1;
            if later.blocked_by == 0 {
                self.ready.push_back(dependent);
            }
        }
        if self.active.is_empty() {
            let since = self.active_since.take();
            self.statistics.active += since.map(|since| since.elapsed()).unwrap_or_default();
        }
        let IoRequest { buffer, outcome, .. } = done.transfer;
        // The caller may have dropped the receiver. The buffer is then returned to the pool.
        let _ = outcome.send(done.failure.map_or(Ok(buffer), Err));
        true
    }
}

impl Active {
    /// Returns true if all blocks have been taken and no block is running.
    fn is_done(&self) -> bool {
        self.running == 0 && self.taken == self.transfer.buffer.padded_len()
    }

    /// Cancels all remaining blocks and records the failure, unless there is an earlier failure.
    fn give_up(&mut self, failure: SwapError) {
        self.failure.get_or_insert(failure);
        self.taken = self.transfer.buffer.padded_len();
    }
}
