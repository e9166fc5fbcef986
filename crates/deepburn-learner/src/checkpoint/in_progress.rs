//! A checkpoint on its way to the disk: written by a thread of each rank while training goes on.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::{self, JoinHandle};

use burn::tensor::TensorData;
use burn::tensor::backend::Backend;
use deepburn_checkpoint::{
    CheckpointError, Layout, Piece, RankRecord, RankWriter, Run, Save, Ticket,
};
use deepburn_ops::OptimizerOps;
use deepburn_zero::{Group, OwnedArray, ZeroError};
use serde_json::Value;

use super::element::element_type;
use super::{TrainingCheckpointError, exchange};

/// Elements that are brought to host memory at a time.
const CHUNK: usize = 1 << 20;

/// A checkpoint that [`Engine::start_save`](crate::Engine::start_save) began. It is there as soon as
/// all ranks have called [`finish`](Self::finish); dropping it undoes it, and so does a failure that
/// ends the run.
///
/// Until a rank has written an array it holds it as it was. So the largest memory that a save can
/// take is once more that of the arrays it writes from, where an optimizer step finds nothing written
/// yet: what the rank owns at stage 3, and at lower stages also the rest of what it keeps whole. The
/// ledger does not count it.
#[derive(Debug)]
#[must_use = "a save that is dropped is undone"]
pub struct SaveInProgress {
    step: u64,
    writing: Writing,
    /// On rank 0.
    commit: Option<(Save, Run)>,
}

impl SaveInProgress {
    /// Starts to write what this rank owns.
    pub(super) fn start<B: OptimizerOps>(
        ticket: Ticket,
        snapshot: Snapshot<B>,
        step: u64,
        commit: Option<(Save, Run)>,
    ) -> Self {
        Self { step, writing: Writing::start(ticket, snapshot), commit }
    }

    /// Step whose states they are.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Whether this rank has written its part, or failed to; [`finish`](Self::finish) then waits for
    /// other ranks alone.
    pub fn is_written(&self) -> bool {
        self.writing.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits for all ranks, makes the checkpoint and returns its folder. All ranks call this
    /// together, at any time between other calls of their engines.
    ///
    /// # Errors
    /// When a rank could not write its part, for want of room perhaps: then earlier checkpoints are
    /// as they were, and training may go on.
    pub fn finish<B: OptimizerOps>(
        mut self,
        group: &Group<B>,
    ) -> Result<PathBuf, TrainingCheckpointError> {
        let written = self.writing.wait().map_err(Into::into);
        let records: Vec<RankRecord> = exchange(group, "checkpoint written", Some(written))?;
        let committed = self.commit.take().map(|(save, run)| save.commit(records, run));
        let committed = committed.map(|folder| folder.map_err(Into::into));
        Ok(exchange(group, "checkpoint committed", committed)?.swap_remove(0))
    }
}

/// What a rank saves, as it was at one moment.
pub(super) struct Snapshot<B: Backend> {
    pub(super) layout: Arc<Layout>,
    pub(super) rank: usize,
    /// In the order in which they are written.
    pub(super) arrays: Vec<OwnedArray<B>>,
    /// What this rank alone knows.
    pub(super) state: Value,
}

impl<B: OptimizerOps> Snapshot<B> {
    /// Writes the file of the rank; an array is let go as soon as it is written.
    fn write(self, ticket: &Ticket, unwanted: &AtomicBool) -> Result<RankRecord, CheckpointError> {
        let Self { layout, rank, arrays, state } = self;
        let mut writer = RankWriter::create(ticket, layout.clone(), rank)?;
        for (piece, array) in layout.pieces(rank).iter().zip(arrays) {
            for start in (0..array.numel()).step_by(CHUNK) {
                if unwanted.load(Relaxed) {
                    return Err(undone(ticket));
                }
                let data = array.data(start..array.numel().min(start + CHUNK));
                let data = data.map_err(|error| unread(ticket, error))?;
                write_part(&mut writer, &layout, piece, &data)?;
            }
        }
        writer.finish(state)
    }
}

/// States that lie on a disk cannot be read.
fn unread(ticket: &Ticket, error: ZeroError) -> CheckpointError {
    let path = ticket.folder().to_owned();
    CheckpointError::Io { action: "read the states for", path, source: io::Error::other(error) }
}

/// The thread that writes.
#[derive(Debug)]
struct Writing {
    thread: Option<JoinHandle<Result<RankRecord, CheckpointError>>>,
    /// Why there is none.
    failure: Option<CheckpointError>,
    unwanted: Arc<AtomicBool>,
}

impl Writing {
    fn start<B: OptimizerOps>(ticket: Ticket, snapshot: Snapshot<B>) -> Self {
        let unwanted = Arc::new(AtomicBool::new(false));
        let name = format!("rank {} checkpoint", snapshot.rank);
        let (folder, asked) = (ticket.folder().to_owned(), unwanted.clone());
        let write = move || B::in_shared_stream(|| snapshot.write(&ticket, &asked));
        let (thread, failure) = match thread::Builder::new().name(name).spawn(write) {
            Ok(thread) => (Some(thread), None),
            Err(source) => {
                let action = "start a thread that writes";
                (None, Some(CheckpointError::Io { action, path: folder, source }))
            }
        };
        Self { thread, failure, unwanted }
    }

    fn wait(&mut self) -> Result<RankRecord, CheckpointError> {
        if let Some(failure) = self.failure.take() {
            return Err(failure);
        }
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(written)) => written,
            Some(Err(panic)) => std::panic::resume_unwind(panic),
            None => unreachable!("a save is finished once"),
        }
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        self.unwanted.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            // There is nobody to tell.
            _ = thread.join();
        }
    }
}

fn undone(ticket: &Ticket) -> CheckpointError {
    let source = io::Error::from(io::ErrorKind::Interrupted);
    CheckpointError::Io { action: "go on writing", path: ticket.folder().to_owned(), source }
}

fn write_part(
    writer: &mut RankWriter,
    layout: &Layout,
    piece: &Piece,
    data: &TensorData,
) -> Result<(), CheckpointError> {
    let atom = &layout.atoms()[piece.atom];
    let (path, slot) = (&atom.path, &atom.slots[piece.slot].slot);
    writer.write_bytes(path, slot, element_type(data.dtype)?, data.as_bytes())
}
