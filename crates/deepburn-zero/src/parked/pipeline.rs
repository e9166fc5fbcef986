//! Reads pieces of a file before a step needs them, and writes them after it has changed them.
//!
//! This is ZeRO-Infinity's overlap (Rajbhandari et al. 2021, section 6.2): while piece `i` is
//! updated, piece `i + 1` is read and piece `i - 1` is written. Small pieces are transferred
//! several at a time.
//!
//! ```text
//!  read     0 │ 1 │ 2 │ 3 │
//!  update       0 │ 1 │ 2 │ 3 │
//!  write            0 │ 1 │ 2 │ 3
//! ```
//!
//! In memory are at most the pieces that are being updated, and in each direction as many bytes as
//! the largest update has, or one piece more.
//!
//! A step that fails half-way has updated a part of the states. The pipeline keeps the error and
//! refuses every later step, because there is nothing to continue from.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use deepburn_nvme::{AlignedBuffer, PendingIo, Region, SwapError, SwapFile};

/// Which transfers overlap with updates (`pipeline_read` and `pipeline_write`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PipelinePolicy {
    /// Whether pieces are read before they are needed.
    pub(crate) reads_ahead: bool,
    /// Whether a step continues while its pieces are written.
    pub(crate) writes_behind: bool,
}

/// A piece of an array in a file: where it is read from and written to.
#[derive(Debug, Clone)]
pub(crate) struct PieceRead {
    /// The file of the rank.
    pub(super) file: Arc<SwapFile>,
    /// The region of the array in the file.
    pub(super) region: Region,
    /// The padded byte range within the region.
    pub(super) bytes: Range<usize>,
}

/// Compares pieces of one file, so the file is not compared.
impl PartialEq for PieceRead {
    fn eq(&self, other: &Self) -> bool {
        self.region == other.region && self.bytes == other.bytes
    }
}

impl PieceRead {
    /// Returns the number of bytes that are read, with padding.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Starts the read.
    fn start(&self) -> Result<PendingIo, SwapError> {
        self.file.read(&self.region, self.bytes.clone())
    }
}

/// Writes in progress, up to a number of bytes. The default limit of 0 waits for every write.
#[derive(Debug, Default)]
pub(crate) struct WriteBehind {
    /// The number of bytes whose writes may be incomplete.
    limit: usize,
    /// The bytes of each write, oldest first.
    writes: VecDeque<(usize, PendingIo)>,
}

impl WriteBehind {
    /// Creates a queue that leaves writes of at most `limit` bytes incomplete.
    pub(crate) fn new(limit: usize) -> Self {
        Self { limit, writes: VecDeque::new() }
    }

    /// Changes the limit, starting with the next write.
    pub(crate) fn set_limit(&mut self, limit: usize) {
        self.limit = limit;
    }

    /// Starts to write a piece, then waits for the oldest writes until the others are within the
    /// limit.
    ///
    /// # Errors
    ///
    /// Returns an error if the disk fails, in this write or in an earlier one.
    pub(crate) fn write(
        &mut self,
        piece: &PieceRead,
        buffer: AlignedBuffer,
    ) -> Result<(), SwapError> {
        let (bytes, start) = (buffer.len(), piece.bytes.start);
        self.writes.push_back((bytes, piece.file.write(&piece.region, start, buffer)?));
        while self.writes.iter().map(|(bytes, _)| bytes).sum::<usize>() > self.limit {
            if let Some((_, pending)) = self.writes.pop_front() {
                // Its buffer returns to the pool.
                drop(pending.wait()?);
            }
        }
        Ok(())
    }
}

/// The transfers of one step at a time.
#[derive(Debug)]
pub(crate) struct Pipeline {
    policy: PipelinePolicy,
    /// Pieces that this step has yet to start reading, in the order of its updates.
    upcoming: VecDeque<PieceRead>,
    /// Reads in progress, in the same order.
    reads: VecDeque<(PieceRead, PendingIo)>,
    writes: WriteBehind,
    /// The number of bytes that are read ahead.
    ahead: usize,
    /// The error that ended a step half-way. States and parameters are then only partly updated.
    failure: Option<SwapError>,
}

impl Pipeline {
    pub(crate) fn new(policy: PipelinePolicy) -> Self {
        let (upcoming, reads, writes) = Default::default();
        Self { policy, upcoming, reads, writes, ahead: 0, failure: None }
    }

    /// Starts a step that reads these pieces in this order. One update needs at most `largest`
    /// bytes.
    ///
    /// # Errors
    ///
    /// Returns the error of an earlier failed step: there is nothing to continue from.
    pub(crate) fn start(
        &mut self,
        pieces: VecDeque<PieceRead>,
        largest: usize,
    ) -> Result<(), SwapError> {
        self.failure.clone().map_or(Ok(()), Err)?;
        // A step that another rank has ended may have left some.
        self.reads.clear();
        self.ahead = largest;
        self.writes.limit = if self.policy.writes_behind { largest } else { 0 };
        self.upcoming = pieces;
        Ok(())
    }

    /// Returns the next piece, and starts the reads of the following ones.
    ///
    /// # Errors
    ///
    /// Returns an error if the disk fails.
    ///
    /// # Panics
    ///
    /// Panics if `piece` is not the next one that the step announced.
    pub(crate) fn read(&mut self, piece: &PieceRead) -> Result<AlignedBuffer, SwapError> {
        let read = self.read_in_order(piece);
        self.note(read)
    }

    /// Writes a piece. An error may come from an earlier write.
    ///
    /// # Errors
    ///
    /// Returns an error if the disk fails.
    pub(crate) fn write(
        &mut self,
        piece: &PieceRead,
        buffer: AlignedBuffer,
    ) -> Result<(), SwapError> {
        let written = self.writes.write(piece, buffer);
        self.note(written)
    }

    /// Returns `outcome` unchanged. After a failure no other step starts.
    pub(crate) fn note<T>(&mut self, outcome: Result<T, SwapError>) -> Result<T, SwapError> {
        if let Err(error) = &outcome {
            self.failure.get_or_insert_with(|| error.clone());
        }
        outcome
    }

    /// Waits for the next piece and reads ahead within the limit. At least one piece is read ahead,
    /// even if it is larger than the limit.
    fn read_in_order(&mut self, piece: &PieceRead) -> Result<AlignedBuffer, SwapError> {
        // Without reading ahead, and at the first piece of a step, nothing is in progress yet.
        if self.reads.is_empty() {
            self.read_next()?;
        }
        let Some((read, pending)) = self.reads.pop_front() else {
            unreachable!("a step reads each of its pieces once")
        };
        assert_eq!(read, *piece, "a step reads its pieces in order");
        let buffer = pending.wait()?;
        let mut ahead: usize = self.reads.iter().map(|(piece, _)| piece.bytes.len()).sum();
        while self.policy.reads_ahead
            && let Some(next) = self.upcoming.front().map(|piece| piece.bytes.len())
            && (ahead == 0 || ahead + next <= self.ahead)
        {
            self.read_next()?;
            ahead += next;
        }
        Ok(buffer)
    }

    /// Starts to read the next upcoming piece, if there is one.
    fn read_next(&mut self) -> Result<(), SwapError> {
        if let Some(piece) = self.upcoming.pop_front() {
            let pending = piece.start()?;
            self.reads.push_back((piece, pending));
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

    fn pieces(file: &Arc<SwapFile>, lens: &[usize]) -> Vec<PieceRead> {
        let piece = |len: &usize| PieceRead {
            file: file.clone(),
            region: file.region(*len).unwrap(),
            bytes: 0..*len,
        };
        lens.iter().map(piece).collect()
    }

    /// Pieces of unequal sizes, several steps: each finds what the one before has left.
    #[test]
    fn each_step_sees_the_one_before() {
        let file = file(1 << 20);
        let lens = [8192, 4096, 4096, 4096, 16384, 4096];
        let pieces = pieces(&file, &lens);
        for policy in [OVERLAPPED, PipelinePolicy { reads_ahead: false, writes_behind: false }] {
            let mut pipeline = Pipeline::new(policy);
            let mut expected = None;
            for _ in 0..20 {
                pipeline.start(pieces.iter().cloned().collect(), 16384).unwrap();
                for piece in &pieces {
                    let mut buffer = pipeline.read(piece).unwrap();
                    let values = buffer.as_mut_slice::<u32>();
                    let first = *expected.get_or_insert(values[0]);
                    assert!(values.iter().all(|value| *value == first), "{first} in {values:?}");
                    values.fill(first + 1);
                    pipeline.write(piece, buffer).unwrap();
                }
                expected = expected.map(|value| value + 1);
            }
        }
    }

    #[test]
    fn no_more_than_three_pieces_are_in_memory() {
        let file = file(1 << 20);
        let pieces = pieces(&file, &[16384; 20]);
        let mut pipeline = Pipeline::new(OVERLAPPED);
        for _ in 0..5 {
            pipeline.start(pieces.iter().cloned().collect(), 16384).unwrap();
            for piece in &pieces {
                let buffer = pipeline.read(piece).unwrap();
                pipeline.write(piece, buffer).unwrap();
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
        let piece = PieceRead { file: own, region, bytes: 0..4096 };
        let mut pipeline = Pipeline::new(OVERLAPPED);
        pipeline.start([piece.clone()].into(), 4096).unwrap();
        let failure = pipeline.read(&piece).unwrap_err();
        assert_eq!(pipeline.start(VecDeque::new(), 0).unwrap_err(), failure);
    }

    /// Reads the arrays of Adam and a gradient, computes for `load` on each piece, and writes all but the
    /// gradient. Returns how long the disk was at work, how long the step waited for it, and how long the
    /// step took.
    fn timed_step(file: &SwapFile, pieces: &[[PieceRead; 4]], load: Duration) -> [Duration; 3] {
        let [first, ..] = pieces else { unreachable!("there are pieces") };
        let largest = first.iter().map(PieceRead::bytes).sum();
        let (before, started) = (file.statistics(), Instant::now());
        let mut pipeline = Pipeline::new(OVERLAPPED);
        pipeline.start(pieces.iter().flatten().cloned().collect(), largest).unwrap();
        let step = ElementwiseStep::from(AdamStep::new(&ADAM, 1));
        for piece in pieces {
            let read = |piece| pipeline.read(piece).unwrap();
            let [mut param, mut m, mut v, gradient] = piece.each_ref().map(read);
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
            for (piece, buffer) in piece.iter().zip([param, m, v]) {
                pipeline.write(piece, buffer).unwrap();
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

    /// A step of Adam on 1 GiB of states and gradients, with updates that are repeated until they take as long
    /// as their transfers, and longer.
    #[test]
    #[ignore = "measures a disk: 1 GiB in the folder of the crate"]
    fn transfers_hide_behind_longer_updates() {
        const PIECES: usize = 64;
        let bytes = crate::parked::PIECE * size_of::<f32>();
        let file = file((4 * PIECES * bytes) as u64);
        let pieces: Vec<[PieceRead; 4]> =
            (0..PIECES).map(|_| pieces(&file, &[bytes; 4]).try_into().unwrap()).collect();
        // The first round writes to blocks that are only reserved.
        timed_step(&file, &pieces, Duration::ZERO);
        let [active, ..] = timed_step(&file, &pieces, Duration::ZERO);
        let transfer = active / PIECES as u32;
        for factor in [0.0, 1.0, 1.5, 2.0, 3.0] {
            let [active, waited, took] = timed_step(&file, &pieces, transfer.mul_f64(factor));
            let hidden = 1.0 - waited.as_secs_f64() / active.as_secs_f64();
            println!(
                "updates of {factor} transfers of {transfer:.1?}: step {took:.2?}, disk at work \
                 {active:.2?}, waited {waited:.2?}, {:.0} % hidden",
                100.0 * hidden
            );
        }
    }
}
