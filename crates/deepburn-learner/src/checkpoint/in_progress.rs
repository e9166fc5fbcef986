//! A checkpoint that is being written: one thread of each rank writes while training continues.
//!
//! ```text
//! rank's thread    start_save │ step │ step │ step │ finish ─► [records] ─► commit on rank 0 ─► [folder]
//! writer thread               └─ write array, free it, next ─┘
//! ```
//!
//! The writer thread does not take part in collectives. The ranks communicate only in `finish`,
//! which all of them call between the same two steps.
//!
//! A save holds handles to arrays and copies nothing at its start. Burn's tensors are values: a
//! step that finds a handle still in use updates a copy. An array that is written before its next
//! update is therefore never copied. A synchronous save is the same, but waits for the thread at
//! once. If any rank fails, all ranks abandon the save and continue training.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::{self, JoinHandle};

use deepburn_checkpoint::{CheckpointError, Layout, RankRecord, RankWriter, Run, Save, SaveTicket};
use deepburn_ops::OptimizerOps;
use deepburn_zero::{Group, OwnedArray};
use serde_json::Value;

use super::TrainingCheckpointError;
use super::element::element_type;
use crate::exchange::exchange;

/// The number of elements that are copied to host memory at a time.
const CHUNK: usize = 1 << 20;

/// A checkpoint that [`Engine::start_save`](crate::Engine::start_save) started.
///
/// The checkpoint exists once all ranks have called [`finish`](Self::finish). If the save is
/// dropped or the run fails before that, the files are removed.
///
/// Until an array is written, a rank keeps its values from the start of the save. If the next
/// optimizer step is taken before anything is written, the save therefore holds a second copy of
/// all arrays that it writes: the owned slices at stage 3, and also the complete replicated arrays
/// at lower stages. The memory ledger does not count these copies.
#[derive(Debug)]
#[must_use = "a save that is dropped is undone"]
pub struct SaveInProgress {
    /// The optimizer step whose state is saved.
    step: u64,
    /// The background thread of this rank.
    writing: Writing,
    /// The checkpoint to commit; present on rank 0 only.
    commit: Option<(Save, Run)>,
}

impl SaveInProgress {
    /// Starts the thread that writes this rank's owned slices.
    pub(super) fn start<B: OptimizerOps>(
        ticket: SaveTicket,
        snapshot: Snapshot<B>,
        step: u64,
        commit: Option<(Save, Run)>,
    ) -> Self {
        Self { step, writing: Writing::start(ticket, snapshot), commit }
    }

    /// Returns the optimizer step whose state is saved.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Returns true once this rank's thread has ended, successfully or not.
    /// [`finish`](Self::finish) then waits for other ranks only.
    pub fn is_written(&self) -> bool {
        match &self.writing.thread {
            Some(Ok(thread)) => thread.is_finished(),
            // It could not be started, or was joined.
            Some(Err(_)) | None => true,
        }
    }

    /// Waits for all ranks, commits the checkpoint and returns its folder. All ranks call this
    /// together, between any two calls of their engines.
    ///
    /// # Errors
    /// Returns an error if a rank could not write its part, for example because the disk is full.
    /// Earlier checkpoints are unchanged, and training can continue.
    pub fn finish<B: OptimizerOps>(
        mut self,
        group: &Group<B>,
    ) -> Result<PathBuf, TrainingCheckpointError> {
        let written = self.writing.wait().map_err(TrainingCheckpointError::from);
        // The commit needs the records of all ranks: the manifest has the checksums of their files.
        let records: Vec<RankRecord> = exchange(group, "checkpoint written", Some(written))?;
        let committed = self.commit.take().map(|(save, run)| save.commit(records, run));
        let committed = committed.map(|folder| folder.map_err(TrainingCheckpointError::from));
        Ok(exchange(group, "checkpoint committed", committed)?.swap_remove(0))
    }
}

/// The state of a rank at one moment, to be written in the background.
pub(super) struct Snapshot<B: OptimizerOps> {
    /// The entries of the checkpoint and their division among ranks.
    pub(super) layout: Arc<Layout>,
    /// The rank whose slices these are.
    pub(super) rank: usize,
    /// The owned slices, in the order in which they are written.
    pub(super) arrays: Vec<OwnedArray<B>>,
    /// The state of this rank only, as JSON.
    pub(super) state: Value,
}

impl<B: OptimizerOps> Snapshot<B> {
    /// Writes the file of the rank. The memory of each array is released as soon as the array is
    /// written.
    fn write(
        self,
        ticket: &SaveTicket,
        unwanted: &AtomicBool,
    ) -> Result<RankRecord, CheckpointError> {
        let Self { layout, rank, arrays, state } = self;
        let mut writer = RankWriter::create(ticket, layout.clone(), rank)?;
        for (segment, array) in layout.segments(rank).iter().zip(arrays) {
            for start in (0..array.numel()).step_by(CHUNK) {
                // The flag is checked once per chunk, so that dropping a save does not wait for a
                // large array.
                if unwanted.load(Relaxed) {
                    let source = io::ErrorKind::Interrupted.into();
                    return Err(io_error("continue to write", ticket.folder(), source));
                }
                let data = array.data(start..array.numel().min(start + CHUNK));
                let data = data.map_err(|error| {
                    io_error("read the states for", ticket.folder(), io::Error::other(error))
                })?;
                let entry = &layout.entries()[segment.entry];
                let (kind, element) =
                    (&entry.states[segment.state].kind, element_type(data.dtype)?);
                writer.write_bytes(&entry.path, kind, element, data.as_bytes())?;
            }
        }
        writer.finish(state)
    }
}

/// Returns the error of a save to `folder` that cannot do `action`.
fn io_error(action: &'static str, folder: &Path, source: io::Error) -> CheckpointError {
    CheckpointError::Io { action, path: folder.to_owned(), source }
}

/// A thread that writes the file of a rank.
type WriterThread = JoinHandle<Result<RankRecord, CheckpointError>>;

/// The background thread of one rank.
#[derive(Debug)]
struct Writing {
    /// The thread, or the reason why it could not be started; `None` if it has been joined.
    thread: Option<Result<WriterThread, CheckpointError>>,
    /// Set when the save is dropped. The thread then stops before the next chunk.
    unwanted: Arc<AtomicBool>,
}

impl Writing {
    /// Starts the thread. If the thread cannot be started, `wait` returns the error, so that all
    /// ranks are informed in the exchange of `finish`.
    fn start<B: OptimizerOps>(ticket: SaveTicket, snapshot: Snapshot<B>) -> Self {
        let unwanted = Arc::new(AtomicBool::new(false));
        let name = format!("rank {} checkpoint", snapshot.rank);
        let (folder, asked) = (ticket.folder().to_owned(), unwanted.clone());
        // Ranks that share a device also share its stream, which the thread has to use before it
        // reads arrays.
        let write = move || B::in_shared_stream(|| snapshot.write(&ticket, &asked));
        let thread = thread::Builder::new().name(name).spawn(write);
        let thread =
            thread.map_err(|source| io_error("start a thread that writes", &folder, source));
        Self { thread: Some(thread), unwanted }
    }

    /// Joins the thread. A panic of the thread is resumed on the caller's thread.
    fn wait(&mut self) -> Result<RankRecord, CheckpointError> {
        let Some(thread) = self.thread.take() else { unreachable!("a save is finished once") };
        thread?.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        self.unwanted.store(true, Relaxed);
        if let Some(Ok(thread)) = self.thread.take() {
            // The save was dropped, so its result is not needed.
            _ = thread.join();
        }
    }
}
