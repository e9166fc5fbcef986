//! Overlaps the reads and writes of a file with the updates of an optimizer step.
//!
//! This is the overlap of ZeRO-Infinity (Rajbhandari et al. 2021, section 6.2). While chunk `i` is
//! updated, chunk `i + 1` is read and chunk `i - 1` is written. Several small chunks are
//! transferred at a time.
//!
//! ```text
//!  read     0 │ 1 │ 2 │ 3 │
//!  update       0 │ 1 │ 2 │ 3 │
//!  write            0 │ 1 │ 2 │ 3
//! ```
//!
//! The memory is limited to the chunks that are being updated, plus, for reads and for writes each,
//! the bytes of the largest update or one more chunk.
//!
//! A step that fails half-way has updated only a part of the states. The pipeline keeps the error
//! and returns it for every later step, because training cannot continue from such states.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use deepburn_nvme::{AlignedBuffer, PendingIo, Region, SwapError, SwapFile};

/// Which transfers overlap with updates (`pipeline_read` and `pipeline_write`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PipelinePolicy {
    /// Whether chunks are read before they are needed.
    pub(crate) reads_ahead: bool,
    /// Whether a step continues while changed chunks are written.
    pub(crate) writes_behind: bool,
}

/// The location of a chunk in a file.
#[derive(Debug, Clone)]
pub(crate) struct FileChunk {
    /// The file of the rank.
    pub(super) file: Arc<SwapFile>,
    /// The region of the array in the file.
    pub(super) region: Region,
    /// The padded byte range within the region.
    pub(super) bytes: Range<usize>,
}

/// Compares the location within a file. All compared chunks are in the same file.
impl PartialEq for FileChunk {
    fn eq(&self, other: &Self) -> bool {
        self.region == other.region && self.bytes == other.bytes
    }
}

impl FileChunk {
    /// Returns the size of the chunk in bytes, including padding.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Starts to read the chunk.
    fn start(&self) -> Result<PendingIo, SwapError> {
        self.file.read(&self.region, self.bytes.clone())
    }
}

/// A queue of pending writes with a limit in bytes. The default limit of 0 waits for every write.
#[derive(Debug, Default)]
pub(crate) struct WriteBehind {
    /// The largest number of bytes in pending writes.
    limit: usize,
    /// The pending writes and their sizes in bytes, oldest first.
    writes: VecDeque<(usize, PendingIo)>,
}

impl WriteBehind {
    /// Creates a queue with at most `limit` bytes in pending writes.
    pub(crate) fn new(limit: usize) -> Self {
        Self { limit, writes: VecDeque::new() }
    }

    /// Changes the limit, starting with the next write.
    pub(crate) fn set_limit(&mut self, limit: usize) {
        self.limit = limit;
    }

    /// Starts to write a chunk, then waits for the oldest writes until the pending ones are within
    /// the limit.
    ///
    /// # Errors
    /// Returns an error if the disk fails, in this write or in an earlier one.
    pub(crate) fn write(
        &mut self,
        chunk: &FileChunk,
        buffer: AlignedBuffer,
    ) -> Result<(), SwapError> {
        let (bytes, start) = (buffer.len(), chunk.bytes.start);
        self.writes.push_back((bytes, chunk.file.write(&chunk.region, start, buffer)?));
        // The new write counts too, so with a limit of 0 the call waits for it.
        while self.writes.iter().map(|(bytes, _)| bytes).sum::<usize>() > self.limit {
            if let Some((_, pending)) = self.writes.pop_front() {
                // Dropping the buffer returns it to the pool.
                drop(pending.wait()?);
            }
        }
        Ok(())
    }
}

/// The pipeline of a step's reads and writes.
#[derive(Debug)]
pub(crate) struct Pipeline {
    policy: PipelinePolicy,
    /// The chunks whose reads have not started, in the order of the updates.
    upcoming: VecDeque<FileChunk>,
    /// The reads in progress, in the same order.
    reads: VecDeque<(FileChunk, PendingIo)>,
    writes: WriteBehind,
    /// The largest number of bytes that are read ahead.
    ahead: usize,
    /// The error of a step that failed half-way. States and parameters are then only partly
    /// updated.
    failure: Option<SwapError>,
}

impl Pipeline {
    pub(crate) fn new(policy: PipelinePolicy) -> Self {
        let (upcoming, reads, writes) = Default::default();
        Self { policy, upcoming, reads, writes, ahead: 0, failure: None }
    }

    /// Starts a step that reads `chunks` in this order. One update reads at most `largest` bytes.
    ///
    /// # Errors
    /// Returns the error of an earlier failed step, because training cannot continue after it.
    pub(crate) fn start(
        &mut self,
        chunks: VecDeque<FileChunk>,
        largest: usize,
    ) -> Result<(), SwapError> {
        self.failure.clone().map_or(Ok(()), Err)?;
        // A step that ended because another rank failed may have left reads.
        self.reads.clear();
        self.ahead = largest;
        self.writes.limit = if self.policy.writes_behind { largest } else { 0 };
        self.upcoming = chunks;
        Ok(())
    }

    /// Returns the next chunk and starts to read the following ones.
    ///
    /// # Errors
    /// Returns an error if the disk fails.
    ///
    /// # Panics
    /// Panics if `chunk` is not the next chunk of the list that was passed to
    /// [`start`](Self::start).
    pub(crate) fn read(&mut self, chunk: &FileChunk) -> Result<AlignedBuffer, SwapError> {
        let read = self.read_in_order(chunk);
        self.note(read)
    }

    /// Writes a chunk.
    ///
    /// # Errors
    /// Returns an error if the disk fails, in this write or in an earlier one.
    pub(crate) fn write(
        &mut self,
        chunk: &FileChunk,
        buffer: AlignedBuffer,
    ) -> Result<(), SwapError> {
        let written = self.writes.write(chunk, buffer);
        self.note(written)
    }

    /// Returns `outcome` unchanged and stores its error. After an error, no other step can start.
    pub(crate) fn note<T>(&mut self, outcome: Result<T, SwapError>) -> Result<T, SwapError> {
        if let Err(error) = &outcome {
            self.failure.get_or_insert_with(|| error.clone());
        }
        outcome
    }

    /// Waits for the next chunk and reads ahead within the limit. At least one chunk is read ahead,
    /// even if it is larger than the limit.
    fn read_in_order(&mut self, chunk: &FileChunk) -> Result<AlignedBuffer, SwapError> {
        // No read is in progress at the first chunk of a step, or if nothing is read ahead.
        if self.reads.is_empty() {
            self.read_next()?;
        }
        let Some((read, pending)) = self.reads.pop_front() else {
            unreachable!("a step reads each of its chunks once")
        };
        assert_eq!(read, *chunk, "a step reads its chunks in order");
        let buffer = pending.wait()?;
        let mut ahead: usize = self.reads.iter().map(|(chunk, _)| chunk.bytes.len()).sum();
        while self.policy.reads_ahead
            && let Some(next) = self.upcoming.front().map(|chunk| chunk.bytes.len())
            && (ahead == 0 || ahead + next <= self.ahead)
        {
            self.read_next()?;
            ahead += next;
        }
        Ok(buffer)
    }

    /// Starts to read the next upcoming chunk, if there is one.
    fn read_next(&mut self) -> Result<(), SwapError> {
        if let Some(chunk) = self.upcoming.pop_front() {
            let pending = chunk.start()?;
            self.reads.push_back((chunk, pending));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use deepburn_kernels::{Adam, AdamStep, ElementwiseStep, FloatSlice, OwnedSlice, WeightDecay};
    use deepburn_nvme::IoPolicy;

    use super::*;

    const OVERLAPPED: PipelinePolicy = PipelinePolicy { reads_ahead: true, writes_behind: true };

    fn file(bytes: u64) -> Arc<SwapFile> {
        let folder = env!("CARGO_MANIFEST_DIR").as_ref();
        Arc::new(SwapFile::create(folder, bytes, &IoPolicy::default()).unwrap())
    }

    fn chunks(file: &Arc<SwapFile>, lens: &[usize]) -> Vec<FileChunk> {
        let chunk = |len: &usize| FileChunk {
            file: file.clone(),
            region: file.region(*len).unwrap(),
            bytes: 0..*len,
        };
        lens.iter().map(chunk).collect()
    }

    /// Each step reads the values that the previous step has written, with chunks of different
    /// sizes.
    #[test]
    fn each_step_sees_the_one_before() {
        let file = file(1 << 20);
        let lens = [8192, 4096, 4096, 4096, 16384, 4096];
        let chunks = chunks(&file, &lens);
        for policy in [OVERLAPPED, PipelinePolicy { reads_ahead: false, writes_behind: false }] {
            let mut pipeline = Pipeline::new(policy);
            let mut expected = None;
            for _ in 0..20 {
                pipeline.start(chunks.iter().cloned().collect(), 16384).unwrap();
                for chunk in &chunks {
                    let mut buffer = pipeline.read(chunk).unwrap();
                    let values = buffer.as_mut_slice::<u32>();
                    let first = *expected.get_or_insert(values[0]);
                    assert!(values.iter().all(|value| *value == first), "{first} in {values:?}");
                    values.fill(first + 1);
                    pipeline.write(chunk, buffer).unwrap();
                }
                expected = expected.map(|value| value + 1);
            }
        }
    }

    #[test]
    fn no_more_than_three_chunks_are_in_memory() {
        let file = file(1 << 20);
        let chunks = chunks(&file, &[16384; 20]);
        let mut pipeline = Pipeline::new(OVERLAPPED);
        for _ in 0..5 {
            pipeline.start(chunks.iter().cloned().collect(), 16384).unwrap();
            for chunk in &chunks {
                let buffer = pipeline.read(chunk).unwrap();
                pipeline.write(chunk, buffer).unwrap();
                // The current chunk, one that is read ahead, one pending write, and one write that
                // is being awaited.
                assert!(file.pool().held_bytes() <= 4 * 16384, "{}", file.pool().held_bytes());
            }
        }
    }

    /// A step that failed half-way has changed a part of the states, so no other step may start.
    #[test]
    fn no_step_follows_one_that_failed() {
        let [own, other] = [file(1 << 16), file(1 << 16)];
        let region = other.region(4096).unwrap();
        let chunk = FileChunk { file: own, region, bytes: 0..4096 };
        let mut pipeline = Pipeline::new(OVERLAPPED);
        pipeline.start([chunk.clone()].into(), 4096).unwrap();
        let failure = pipeline.read(&chunk).unwrap_err();
        assert_eq!(pipeline.start(VecDeque::new(), 0).unwrap_err(), failure);
    }

    /// Reads the arrays of Adam and a gradient, computes for `load` on each chunk, and writes all
    /// arrays except the gradient. Returns the active time of the disk, the time for which the step
    /// waited for it, and the time of the step.
    fn timed_step(file: &SwapFile, chunks: &[[FileChunk; 4]], load: Duration) -> [Duration; 3] {
        let [first, ..] = chunks else { unreachable!("there are chunks") };
        let largest = first.iter().map(FileChunk::bytes).sum();
        let (before, started) = (file.statistics(), Instant::now());
        let mut pipeline = Pipeline::new(OVERLAPPED);
        pipeline.start(chunks.iter().flatten().cloned().collect(), largest).unwrap();
        let step = ElementwiseStep::from(AdamStep::new(&ADAM, 1));
        for chunk in chunks {
            let read = |chunk| pipeline.read(chunk).unwrap();
            let [mut param, mut m, mut v, gradient] = chunk.each_ref().map(read);
            let update_started = Instant::now();
            loop {
                let slice = OwnedSlice {
                    param: param.as_mut_slice(),
                    states: &mut [m.as_mut_slice(), v.as_mut_slice()],
                    working: None,
                };
                step.update(1.0, FloatSlice::F32(gradient.as_slice()), slice);
                if update_started.elapsed() >= load {
                    break;
                }
            }
            for (chunk, buffer) in chunk.iter().zip([param, m, v]) {
                pipeline.write(chunk, buffer).unwrap();
            }
        }
        file.wait_all().unwrap();
        let (after, took) = (file.statistics(), started.elapsed());
        [after.active - before.active, after.waited - before.waited, took]
    }

    const ADAM: Adam = Adam {
        lr: 1e-3,
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-8,
        weight_decay: WeightDecay::Decoupled(0.01),
        bias_correction: true,
    };

    /// Measures a step of Adam on 1 GiB of states and gradients. Updates are repeated until they
    /// take a multiple of the time of their transfers.
    #[test]
    #[ignore = "measures a disk: 1 GiB in the folder of the crate"]
    fn transfers_hide_behind_longer_updates() {
        const CHUNKS: usize = 64;
        let bytes = crate::offload::CHUNK * size_of::<f32>();
        let file = file((4 * CHUNKS * bytes) as u64);
        let chunks: Vec<[FileChunk; 4]> =
            (0..CHUNKS).map(|_| chunks(&file, &[bytes; 4]).try_into().unwrap()).collect();
        // The first round writes to blocks that are reserved but were never written.
        timed_step(&file, &chunks, Duration::ZERO);
        let [active, ..] = timed_step(&file, &chunks, Duration::ZERO);
        let transfer = active / CHUNKS as u32;
        for factor in [0.0, 1.0, 1.5, 2.0, 3.0] {
            let [active, waited, took] = timed_step(&file, &chunks, transfer.mul_f64(factor));
            let hidden = 1.0 - waited.as_secs_f64() / active.as_secs_f64();
            println!(
                "updates of {factor} transfers of {transfer:.1?}: step {took:.2?}, disk at work \
                 {active:.2?}, waited {waited:.2?}, {:.0} % hidden",
                100.0 * hidden
            );
        }
    }
}
