//! The requests of a swap file: what may start, what is in progress, what has failed.
//!
//! A transfer is split into blocks, which workers take in order. It becomes ready once no earlier
//! transfer that it conflicts with is in progress. The main type is [`IoQueue`]; after a failed write
//! it refuses everything.

use std::collections::{BTreeMap, VecDeque};
use std::sync::mpsc::SyncSender;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::block::Block;
use crate::policy::Direction;
use crate::{Buffer, IoStatistics, SwapError};

/// A read or write that a caller has started.
#[derive(Debug)]
pub(crate) struct IoRequest {
    /// Read or write.
    pub(crate) direction: Direction,
    /// Offset in the file, aligned.
    pub(crate) offset: u64,
    /// The data, of which the padded length is transferred.
    pub(crate) buffer: Buffer,
    /// Where the outcome goes to; it has room for one.
    pub(crate) outcome: SyncSender<Result<Buffer, SwapError>>,
}

impl IoRequest {
    fn end(&self) -> u64 {
        self.offset + self.buffer.padded_len() as u64
    }

    /// Whether the order of the two makes a difference.
    fn conflicts_with(&self, other: &Self) -> bool {
        let overlaps = self.offset < other.end() && other.offset < self.end();
        overlaps && (self.direction == Direction::Write || other.direction == Direction::Write)
    }
}

/// A block that a worker has run.
#[derive(Debug)]
pub(crate) struct Finished {
    /// The block.
    pub(crate) block: Block,
    /// How it ended.
    pub(crate) outcome: Result<(), SwapError>,
    /// How long it took.
    pub(crate) busy: Duration,
}

/// The requests of one swap file, shared by callers and workers.
#[derive(Debug)]
pub(crate) struct IoQueue {
    block_size: usize,
    state: Mutex<QueueState>,
    /// Workers wait for blocks, or for the end.
    work: Condvar,
    /// Callers wait until nothing is in progress.
    idle: Condvar,
}

#[derive(Debug, Default)]
struct QueueState {
    next_transfer: u64,
    /// Transfers that are not complete, in the order in which they were started.
    active: BTreeMap<u64, Active>,
    /// Transfers with blocks that no worker has taken yet.
    ready: VecDeque<u64>,
    /// The first write that failed.
    failure: Option<SwapError>,
    is_closed: bool,
    statistics: IoStatistics,
    /// Since when something is in progress.
    active_since: Option<Instant>,
}

/// A transfer in progress.
#[derive(Debug)]
struct Active {
    transfer: IoRequest,
    /// Bytes whose blocks were taken, or were given up after a failure.
    taken: usize,
    /// Blocks that workers are running.
    running: usize,
    /// Earlier transfers that have to be complete first.
    blocked_by: usize,
    /// Later transfers that wait for this one.
    dependents: Vec<u64>,
    failure: Option<SwapError>,
}

impl IoQueue {
    /// An empty queue, which splits transfers into blocks of `block_size` bytes.
    pub(crate) fn new(block_size: usize) -> Self {
        Self { block_size, state: Mutex::default(), work: Condvar::new(), idle: Condvar::new() }
    }

    /// Starts a transfer of at least one byte.
    ///
    /// # Errors
    /// An earlier write failed.
    pub(crate) fn submit(&self, transfer: IoRequest) -> Result<(), SwapError> {
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

    /// Takes back the block that a worker has run and hands out the next, or `None` at the end.
    pub(crate) fn next(&self, finished: Option<Finished>) -> Option<Block> {
        let mut state = self.lock();
        if let Some(finished) = finished {
            // The transfers that this one held up are work for all.
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

    /// Waits until nothing is in progress.
    ///
    /// # Errors
    /// A write failed.
    pub(crate) fn wait_all(&self) -> Result<(), SwapError> {
        let mut state = self.lock();
        while !state.active.is_empty() {
            state = self.idle.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.check()
    }

    /// Returns the failure of an earlier write, if there is one.
    pub(crate) fn check(&self) -> Result<(), SwapError> {
        self.lock().check()
    }

    /// Lets workers end once nothing is in progress.
    pub(crate) fn close(&self) {
        self.lock().is_closed = true;
        self.work.notify_all();
    }

    /// Bytes and times; `waited` is counted elsewhere.
    pub(crate) fn statistics(&self) -> IoStatistics {
        let state = self.lock();
        let current = state.active_since.map(|since| since.elapsed()).unwrap_or_default();
        IoStatistics { active: state.statistics.active + current, ..state.statistics }
    }

    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl QueueState {
    fn check(&self) -> Result<(), SwapError> {
        self.failure.as_ref().map_or(Ok(()), |failure| Err(failure.earlier_write()))
    }

    /// Adds a transfer and returns whether it may start at once.
    fn add(&mut self, transfer: IoRequest) -> bool {
        let id = self.next_transfer;
        self.next_transfer += 1;
        let mut blocked_by = 0;
        for earlier in self.active.values_mut() {
            if earlier.transfer.conflicts_with(&transfer) {
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

    /// The next block of the first transfer that is ready.
    fn take_block(&mut self, block_size: usize) -> Option<Block> {
        while let Some(&id) = self.ready.front() {
            let active = self.active.get_mut(&id).expect("ready transfers are active");
            if let Some(failure) = &self.failure {
                active.give_up(failure.earlier_write());
                self.ready.pop_front();
                self.retire_if_done(id);
                continue;
            }
            let left = active.transfer.buffer.padded_len() - active.taken;
            let length = left.min(block_size);
            let block = Block {
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

    /// Counts a block that was run; returns whether its transfer is complete.
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

    /// Completes a transfer whose blocks are all done: its dependents may start, its caller continues.
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
        // The caller may have dropped its end; the buffer then returns to the pool.
        let _ = outcome.send(done.failure.map_or(Ok(buffer), Err));
        true
    }
}

impl Active {
    fn is_done(&self) -> bool {
        self.running == 0 && self.taken == self.transfer.buffer.padded_len()
    }

    /// Leaves out all further blocks.
    fn give_up(&mut self, failure: SwapError) {
        self.failure.get_or_insert(failure);
        self.taken = self.transfer.buffer.padded_len();
    }
}
