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
    /// What ended a step half-way. States and parameters are then partly those of that step.
    failure: Option<SwapError>,
}

impl Pipeline {
    pub(crate) fn new(store: &Store, policy: PipelinePolicy) -> Self {
        let file = match store {
            Store::Host => None,
            Store::Disk(file) => Some(file.clone()),
        };
        let (upcoming, reads, writes) = Default::default();
        Self { policy, file, upcoming, reads, writes, largest: 0, failure: None }
    }

    /// Begins a step that updates these pieces, in this order.
    ///
    /// # Errors
    /// That of an earlier step which failed: there is nothing to continue from.
    pub(crate) fn start(&mut self, pieces: VecDeque<Region>) -> Result<(), SwapError> {
        self.failure.clone().map_or(Ok(()), Err)?;
        // A step that another rank has ended may have left some.
        self.reads.clear();
        self.largest = pieces.iter().map(Region::len).max().unwrap_or(0);
        self.upcoming = pieces;
        Ok(())
    }

    /// The next piece.
    ///
    /// # Errors
    /// The disk fails.
    pub(crate) fn read(&mut self, region: &Region) -> Result<Buffer, SwapError> {
        let read = self.read_in_order(region);
        self.note(read)
    }

    /// Writes a piece that was read before. An error may be that of an earlier write.
    ///
    /// # Errors
    /// The disk fails.
    pub(crate) fn write(&mut self, region: &Region, buffer: Buffer) -> Result<(), SwapError> {
        let written = self.write_behind(region, buffer);
        self.note(written)
    }

    /// Hands an outcome on; after a failure no other step starts.
    pub(crate) fn note<T>(&mut self, outcome: Result<T, SwapError>) -> Result<T, SwapError> {
        if let Err(error) = &outcome {
            self.failure.get_or_insert_with(|| error.clone());
        }
        outcome
    }

    fn read_in_order(&mut self, region: &Region) -> Result<Buffer, SwapError> {
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

    fn write_behind(&mut self, region: &Region, buffer: Buffer) -> Result<(), SwapError> {
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

#[cfg(test)]
mod tests {
    use deepburn_nvme::IoPolicy;

    use super::*;

    const OVERLAPPED: PipelinePolicy = PipelinePolicy { reads_ahead: true, writes_behind: true };

    fn file(bytes: u64) -> Arc<SwapFile> {
        let folder = env!("CARGO_MANIFEST_DIR").as_ref();
        Arc::new(SwapFile::create(folder, bytes, &IoPolicy::default()).unwrap())
    }

    /// Pieces of unequal sizes, several steps: each finds what the one before has left.
    #[test]
    fn each_step_sees_the_one_before() {
        let file = file(1 << 20);
        let lens = [8192, 4096, 4096, 4096, 16384, 4096];
        let regions: Vec<_> = lens.iter().map(|len| file.region(*len).unwrap()).collect();
        for policy in [OVERLAPPED, PipelinePolicy { reads_ahead: false, writes_behind: false }] {
            let mut pipeline = Pipeline::new(&Store::Disk(file.clone()), policy);
            let mut expected = None;
            for _ in 0..20 {
                pipeline.start(regions.iter().cloned().collect()).unwrap();
                for region in &regions {
                    let mut buffer = pipeline.read(region).unwrap();
                    let values = buffer.as_mut_slice::<u32>();
                    let first = *expected.get_or_insert(values[0]);
                    assert!(values.iter().all(|value| *value == first), "{first} in {values:?}");
                    values.fill(first + 1);
                    pipeline.write(region, buffer).unwrap();
                }
                expected = expected.map(|value| value + 1);
            }
        }
    }

    #[test]
    fn no_more_than_three_pieces_are_in_memory() {
        let file = file(1 << 20);
        let regions: Vec<_> = (0..20).map(|_| file.region(16384).unwrap()).collect();
        let mut pipeline = Pipeline::new(&Store::Disk(file.clone()), OVERLAPPED);
        for _ in 0..5 {
            pipeline.start(regions.iter().cloned().collect()).unwrap();
            for region in &regions {
                let buffer = pipeline.read(region).unwrap();
                pipeline.write(region, buffer).unwrap();
                // The piece itself, one ahead, one behind, and the one whose write is waited for.
                assert!(file.pool().held_bytes() <= 4 * 16384, "{}", file.pool().held_bytes());
            }
        }
    }

    /// A step that failed half-way has changed a part of the states.
    #[test]
    fn no_step_follows_one_that_failed() {
        let [own, other] = [file(1 << 16), file(1 << 16)];
        let region = other.region(4096).unwrap();
        let mut pipeline = Pipeline::new(&Store::Disk(own), OVERLAPPED);
        pipeline.start([region.clone()].into()).unwrap();
        let failure = pipeline.read(&region).unwrap_err();
        assert_eq!(pipeline.start(VecDeque::new()).unwrap_err(), failure);
    }
}
