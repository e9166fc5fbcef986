//! Writes the file of one rank, tensor by tensor.
//!
//! Main type: [`RankWriter`]. The layout is known from the start, so the header is written first,
//! and memory holds only the tensor (or the part of a tensor) that the caller passes. The file is
//! hashed while it is written. A tensor that is out of order or has another type or length is an
//! error.

use std::fs::{self, File};
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

use serde_json::Value;

use crate::flusher::Flusher;
use crate::manifest::RankEntry;
use crate::rank_file::rank_file_name;
use crate::save::SaveTicket;
use crate::{
    CheckpointError, ElementType, Layout, RankRecord, Segment, StateKind, StoredElement, disk,
};

/// The number of bytes that are hashed and then written at a time. A chunk stays in the cache of
/// the core between the two.
const CHUNK: usize = 256 << 10;

/// A rank's file that is being written. Dropping it removes the file.
#[derive(Debug)]
#[must_use = "a file that is not finished is removed"]
pub struct RankWriter {
    /// The rank that writes the file.
    rank: usize,
    /// The id of the save, for the record.
    id: String,
    /// The layout that all ranks agree on.
    layout: Arc<Layout>,
    /// The tensors of the file, in the order in which they are written.
    segments: Vec<Segment>,
    /// The number of complete tensors.
    written: usize,
    /// The number of elements of the next tensor that are already written.
    filled: usize,
    /// The file. Its position is the number of bytes written so far.
    file: File,
    /// The path of the file in the hidden folder.
    path: PathBuf,
    /// The hash of all bytes written so far, header included.
    hasher: blake3::Hasher,
    /// Flushes the file while it is written.
    flusher: Flusher,
    /// The length of the complete file in bytes.
    length: u64,
    /// Whether the file is complete and must not be removed by a drop.
    finished: bool,
}

impl RankWriter {
    /// Creates the file of `rank` in the save of `ticket`. All ranks use the same layout.
    ///
    /// # Errors
    /// Returns [`CheckpointError::Layout`] for a rank that is not in the layout;
    /// [`CheckpointError::DiskFull`] or an I/O error if the file cannot be created.
    pub fn create(
        ticket: &SaveTicket,
        layout: Arc<Layout>,
        rank: usize,
    ) -> Result<Self, CheckpointError> {
        if rank >= layout.world_size() {
            let reason = format!("there is no rank {rank} in {} ranks", layout.world_size());
            return Err(CheckpointError::Layout { reason });
        }
        let path = ticket.folder.join(rank_file_name(rank));
        let length = layout.file_len(rank, &ticket.identity);
        // A file that exists was written by another process with this rank, and must not be
        // replaced.
        let file = File::create_new(&path).map_err(disk::write_error(&path, length))?;
        let flusher = Flusher::start(&file, length).map_err(CheckpointError::io("flush", &path))?;
        let segments = layout.segments(rank);
        let header = layout.header(rank, &segments, &ticket.identity).to_bytes();
        let mut writer = Self {
            rank,
            id: ticket.identity.id.clone(),
            layout,
            segments,
            written: 0,
            filled: 0,
            file,
            path,
            hasher: blake3::Hasher::new(),
            flusher,
            length,
            finished: false,
        };
        writer.append(&header)?;
        Ok(writer)
    }

    /// Returns the tensor that has to be written next or continued; `None` when all are written.
    pub fn next_segment(&self) -> Option<&Segment> {
        self.segments.get(self.written)
    }

    /// Writes the next tensor or the next part of it. `values` are elements of the array that this
    /// rank owns, without padding.
    ///
    /// # Errors
    /// Returns [`CheckpointError::OutOfPlan`] for another tensor, another type or too many
    /// elements; [`CheckpointError::DiskFull`] or an I/O error.
    pub fn write<T: StoredElement>(
        &mut self,
        path: &str,
        kind: &StateKind,
        values: &[T],
    ) -> Result<(), CheckpointError> {
        self.write_bytes(path, kind, T::TYPE, bytemuck::cast_slice(values))
    }

    /// Writes like [`write`](Self::write), with a type that is known only at run time. `bytes` are
    /// little-endian values; bools are bytes that are 0 or 1.
    ///
    /// # Errors
    /// Returns the errors of [`write`](Self::write), and an error if the length is not a multiple
    /// of the element size or a bool is neither 0 nor 1.
    pub fn write_bytes(
        &mut self,
        path: &str,
        kind: &StateKind,
        element: ElementType,
        bytes: &[u8],
    ) -> Result<(), CheckpointError> {
        let len = bytes.len() / element.size();
        let found = || format!("{path}:{kind}, {len} elements of {element}");
        let is_bool = |byte: &u8| *byte <= 1;
        if !bytes.len().is_multiple_of(element.size())
            || element == ElementType::Bool && !bytes.iter().all(is_bool)
        {
            return Err(self.out_of_plan(format!("{}, with {} bytes", found(), bytes.len())));
        }
        let Some(segment) = self.segments.get(self.written) else {
            return Err(self.out_of_plan(found()));
        };
        let entry = &self.layout.entries()[segment.entry];
        let stored = &entry.states[segment.state];
        if entry.path != path
            || stored.kind != *kind
            || stored.element != element
            || segment.range.len() - self.filled < len
        {
            return Err(self.out_of_plan(found()));
        }
        self.filled += len;
        // The counters are updated before the write, because the file is unusable after a failed
        // write in any case.
        if self.filled == segment.range.len() {
            (self.written, self.filled) = (self.written + 1, 0);
        }
        self.append(bytes)
    }

    /// Waits until the file is on the disk and returns the record of the rank. `state` is the state
    /// of this rank only, such as its random stream and the position of its data loader.
    ///
    /// # Errors
    /// Returns [`CheckpointError::OutOfPlan`] if tensors are missing; [`CheckpointError::DiskFull`]
    /// or an I/O error.
    pub fn finish(mut self, state: Value) -> Result<RankRecord, CheckpointError> {
        if self.written < self.segments.len() {
            return Err(self.out_of_plan("the end".into()));
        }
        self.flusher
            .finish()
            .and_then(|()| self.file.sync_all())
            .map_err(disk::write_error(&self.path, self.length))?;
        self.finished = true;
        let checksum = self.hasher.finalize().to_hex().to_string();
        Ok(RankRecord {
            rank: self.rank,
            id: std::mem::take(&mut self.id),
            layout: self.layout.digest(),
            file: RankEntry { length: self.length, checksum, state },
        })
    }

    /// Hashes and writes bytes in chunks, so that each chunk is still in the cache when it is
    /// written.
    fn append(&mut self, bytes: &[u8]) -> Result<(), CheckpointError> {
        for chunk in bytes.chunks(CHUNK) {
            self.hasher.update(chunk);
            self.file.write_all(chunk).map_err(disk::write_error(&self.path, self.length))?;
            self.flusher.wrote(chunk.len());
        }
        Ok(())
    }

    /// Returns the error for a tensor that is not the next one. `found` describes what the caller
    /// passed.
    fn out_of_plan(&self, found: String) -> CheckpointError {
        let expected = self.next_segment().map_or_else(
            || "nothing more".to_owned(),
            |segment| {
                let element = self.layout.entries()[segment.entry].states[segment.state].element;
                let name = self.layout.name(segment);
                format!("{name}, {} elements of {element}", segment.range.len() - self.filled)
            },
        );
        CheckpointError::OutOfPlan { rank: self.rank, expected, found }
    }
}

impl Drop for RankWriter {
    fn drop(&mut self) {
        if !self.finished {
            // Best effort: the next save removes leftovers.
            _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::fixture::{TempRoot, layout, save, values};
    use crate::{Checkpoint, Save, Tag};
    use half::f16;

    fn refusal(result: Result<(), CheckpointError>) -> String {
        result.unwrap_err().to_string()
    }

    #[test]
    fn tensors_must_be_written_as_in_the_layout() {
        let root = TempRoot::new();
        let layout = layout(2);
        let save = Save::begin(&root, Tag::of_step(1), layout.clone()).unwrap();
        assert!(RankWriter::create(save.ticket(), layout.clone(), 2).is_err());
        let mut writer = RankWriter::create(save.ticket(), layout.clone(), 0).unwrap();
        let error = refusal(writer.write("a", &StateKind::Gradient, &[0_f32; 6]));
        assert!(error.contains("rank 0 must write a:weights, 6 elements of F32"), "{error}");
        assert!(error.contains("not a:gradient, 6 elements of F32"), "{error}");
        for result in [
            writer.write("b", &StateKind::Weights, &[0_f32; 6]),
            writer.write("a", &StateKind::Weights, &[0_f32; 7]),
            writer.write("a", &StateKind::Weights, &[f16::ZERO; 6]),
        ] {
            assert!(refusal(result).contains("must write a:weights"));
        }
        writer.write("a", &StateKind::Weights, &[0_f32; 4]).unwrap();
        let error = refusal(writer.write("a", &StateKind::Weights, &[0_f32; 3]));
        assert!(error.contains("must write a:weights, 2 elements of F32"), "{error}");
        let path = writer.path.clone();
        let error = writer.finish(Value::Null).unwrap_err().to_string();
        assert!(error.contains("not the end"), "{error}");
        assert!(!path.exists());
    }

    #[test]
    fn a_file_is_written_once() {
        let root = TempRoot::new();
        let layout = layout(1);
        let save = Save::begin(&root, Tag::of_step(1), layout.clone()).unwrap();
        let _writer = RankWriter::create(save.ticket(), layout.clone(), 0).unwrap();
        assert!(RankWriter::create(save.ticket(), layout, 0).is_err());
    }

    /// Every write to `/dev/full` fails as on a full disk.
    #[test]
    #[cfg(target_os = "linux")]
    fn a_full_disk_is_reported_with_the_needed_bytes() {
        let root = TempRoot::new();
        let layout = layout(1);
        let save = Save::begin(&root, Tag::of_step(1), layout.clone()).unwrap();
        let mut writer = RankWriter::create(save.ticket(), layout.clone(), 0).unwrap();
        writer.file = File::options().write(true).open("/dev/full").unwrap();
        let values = values("a", &StateKind::Weights, 1, 0..12);
        let error = writer.write("a", &StateKind::Weights, &values).unwrap_err();
        let needed = layout.file_len(0, &save.ticket().identity);
        assert!(
            matches!(error, CheckpointError::DiskFull { needed: found, .. } if found == needed),
            "{error}"
        );
    }

    /// Uses a small tmpfs. Skipped if the test is not allowed to mount one.
    #[test]
    #[cfg(target_os = "linux")]
    fn a_full_disk_does_not_harm_earlier_checkpoints() {
        let Some(disk) = SmallDisk::mount() else {
            eprintln!("not allowed to mount a small disk: not tested");
            return;
        };
        let root = disk.folder.path().join("checkpoints");
        save(&root, 1, 1);
        let filler = disk.folder.path().join("filler");
        let mut layout = None;
        for full_at_begin in [false, true] {
            if full_at_begin {
                fs::write(&filler, vec![1; 3 << 20]).unwrap();
                let error = Save::begin(&root, Tag::of_step(2), big(1 << 20)).unwrap_err();
                assert!(matches!(error, CheckpointError::DiskFull { .. }), "{error}");
            } else {
                let layout = layout.insert(big(1 << 20)).clone();
                let save = Save::begin(&root, Tag::of_step(2), layout.clone()).unwrap();
                let mut writer = RankWriter::create(save.ticket(), layout, 0).unwrap();
                fs::write(&filler, vec![1; 7 << 20]).unwrap();
                let written = writer.write("w", &StateKind::Weights, &vec![1_f32; 1 << 20]);
                let error = written.unwrap_err();
                assert!(matches!(error, CheckpointError::DiskFull { .. }), "{error}");
                drop(writer);
                drop(save);
            }
            let checkpoint = Checkpoint::open(&root, None).unwrap();
            checkpoint.verify().unwrap();
            assert_eq!(checkpoint.run().step, 1);
            fs::remove_file(&filler).unwrap();
        }
        // Once there is space again, the next save succeeds.
        save(&root, 3, 1);
    }

    #[cfg(target_os = "linux")]
    fn big(numel: usize) -> Arc<Layout> {
        use crate::{ElementType, ParamEntry, StoredState};
        let states = vec![StoredState { kind: StateKind::Weights, element: ElementType::F32 }];
        let (path, shape) = ("w".into(), vec![numel]);
        let entry = ParamEntry { path, shape, states, ..crate::tests::fixture::parameter("", &[]) };
        Arc::new(Layout::new(vec![entry], 1).unwrap())
    }

    /// A tmpfs of 8 MB.
    #[cfg(target_os = "linux")]
    struct SmallDisk {
        folder: tempfile::TempDir,
    }

    #[cfg(target_os = "linux")]
    impl SmallDisk {
        fn mount() -> Option<Self> {
            let folder = tempfile::tempdir().unwrap();
            let mut mount = std::process::Command::new("mount");
            mount.args(["-t", "tmpfs", "-o", "size=8m", "tmpfs"]).arg(folder.path());
            let mounted = mount.output().is_ok_and(|output| output.status.success());
            mounted.then_some(Self { folder })
        }
    }

    #[cfg(target_os = "linux")]
    impl Drop for SmallDisk {
        fn drop(&mut self) {
            _ = std::process::Command::new("umount").arg(self.folder.path()).status();
        }
    }
}
