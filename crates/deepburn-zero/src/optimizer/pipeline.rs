//! Reads pieces of a file before a step needs them, and writes them after it has changed them.
//!
//! ZeRO-Infinity's overlap: while piece `i` is updated, piece `i + 1` is read and piece `i - 1` is written.
//! Small pieces go several at a time. In memory are at most the piece that is updated, and as many bytes as
//! the largest piece has in each direction, or one piece more.

use std::collections::VecDeque;
use std::sync::Arc;

use deepburn_nvme::{Buffer, PendingIo, Region, SwapError, SwapFile};

use super::parked::Store;

/// What overlaps (`pipeline_read` and `pipeline_write`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PipelinePolicy {
    /// Whether pieces are read before they are needed.
    pub(crate) reads_ahead: bool,
    /// Whether a step goes on while its pieces are written.
    pub(crate) writes_behind: bool,
}

/// The transfers of one step.
#[derive(Debug)]
pub(crate) struct Pipeline {
    policy: PipelinePolicy,
    file: Option<Arc<SwapFile>>,
    /// Pieces that this step has still to start reading, in its order.
    upcoming: VecDeque<Region>,
    reads: VecDeque<(Region, PendingIo)>,
    /// Bytes of each write.
    writes: VecDeque<(usize, PendingIo)>,
    /// Bytes of the largest piece.
    largest: usize,
}

impl Pipeline {
    pub(crate) fn new(store: &Store, policy: PipelinePolicy) -> Self {
        let file = match store {
            Store::Host => None,
            Store::Disk(file) => Some(file.clone()),
        };
        let (upcoming, reads, writes) = Default::default();
        Self { policy, file, upcoming, reads, writes, largest: 0 }
    }

    /// Begins a step that updates these pieces, in this order.
    pub(crate) fn start(&mut self, pieces: VecDeque<Region>) {
        // A step that failed may have left some.
        self.reads.clear();
        self.largest = pieces.iter().map(Region::len).max().unwrap_or(0);
        self.upcoming = pieces;
    }

    /// The next piece.
    ///
    /// # Errors
    /// The disk fails.
    pub(crate) fn read(&mut self, region: &Region) -> Result<Buffer, SwapError> {
        if self.reads.is_empty() {
            self.read_next()?;
        }
        let Some((read, pending)) = self.reads.pop_front() else {
            unreachable!("a step reads each of its pieces once")
        };
        assert_eq!(read, *region, "a step reads its pieces in order");
        let buffer = pending.wait()?;
        let mut ahead: usize = self.reads.iter().map(|(region, _)| region.len()).sum();
        while self.policy.reads_ahead
            && let Some(next) = self.upcoming.front().map(Region::len)
            && (ahead == 0 || ahead + next <= self.largest)
        {
            self.read_next()?;
            ahead += next;
        }
        Ok(buffer)
    }

    fn read_next(&mut self) -> Result<(), SwapError> {
        if let (Some(region), Some(file)) = (self.upcoming.pop_front(), &self.file) {
            let pending = file.read(&region, 0..region.len())?;
            self.reads.push_back((region, pending));
        }
        Ok(())
    }

    /// Writes a piece that was read before. An error may be that of an earlier write.
    ///
    /// # Errors
    /// The disk fails.
    pub(crate) fn write(&mut self, region: &Region, buffer: Buffer) -> Result<(), SwapError> {
        let Some(file) = &self.file else { unreachable!("a region belongs to a file") };
        self.writes.push_back((buffer.len(), file.write(region, 0, buffer)?));
        let allowed = if self.policy.writes_behind { self.largest } else { 0 };
        while self.writes.iter().map(|(bytes, _)| bytes).sum::<usize>() > allowed {
            if let Some((_, pending)) = self.writes.pop_front() {
                // Its buffer returns to the pool.
                drop(pending.wait()?);
            }
        }
        Ok(())
    }
}
