//! Writes a checkpoint atomically: it is either complete or does not exist.
//!
//! Main type: [`Save`], which only rank 0 has. All ranks write into a hidden folder:
//!
//! 1. Rank 0: [`Save::begin`] creates the folder. The caller sends its [`SaveTicket`] to the other
//!    ranks.
//! 2. Every rank: [`RankWriter`](crate::RankWriter) writes its file and flushes it to the disk. The
//!    caller sends the [`RankRecord`]s to rank 0.
//! 3. Rank 0: [`Save::commit`] writes the manifest, renames the folder, and finally updates
//!    `latest`.
//!
//! Dropping a [`Save`] removes its files. If the process is killed, the next save removes them.
//! Earlier checkpoints are never changed.
//!
//! **Existing tags.** [`Save::begin`] returns an error if the tag is taken, and
//! [`Save::begin_step`] uses another tag. Damaged checkpoints are an exception: the run has resumed
//! from an older checkpoint and now reaches the same step again. The damaged checkpoint is then
//! renamed to `TAG.damaged-N` and kept.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::identity::{FORMAT, Identity};
use crate::manifest::{MANIFEST, Manifest, RankEntry};
use crate::rank_file::rank_file_name;
use crate::store::{self, Lock};
use crate::{Checkpoint, CheckpointError, Layout, RankRecord, Run, Tag, disk};

/// The largest block size in which disks allocate space, in bytes.
const BLOCK: u64 = 4 << 10;
/// The space for the manifest, in bytes.
const MANIFEST_ROOM: u64 = 1 << 20;

/// A checkpoint that is being written, on rank 0.
#[derive(Debug)]
#[must_use = "a save that is dropped is undone"]
pub struct Save {
    /// The folder of checkpoints.
    root: PathBuf,
    /// The layout that every record has to have.
    layout: Arc<Layout>,
    /// The hidden folder and the identity of the save.
    ticket: SaveTicket,
    /// The id of the latest checkpoint when this save was started.
    follows: Option<String>,
    /// Whether the hidden folder exists and has to be removed.
    unfinished: bool,
    /// Excludes other saves and deletions in this folder until the save ends.
    _lock: Lock,
}

/// The data of a save that every rank needs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SaveTicket {
    /// The hidden folder.
    pub(crate) folder: PathBuf,
    /// The identity that all files of the save get.
    pub(crate) identity: Identity,
}

impl SaveTicket {
    /// Returns the hidden folder into which ranks write.
    pub fn folder(&self) -> &Path {
        &self.folder
    }
}

impl Save {
    /// Starts a checkpoint named `tag` in the folder `root`, which is created if it does not exist.
    /// First completes or removes saves that were killed.
    ///
    /// # Errors
    /// Returns [`CheckpointError::TagTaken`]; [`CheckpointError::DiskFull`] before anything is
    /// written if the files of all ranks do not fit; [`CheckpointError::Busy`]; or an I/O error.
    pub fn begin(root: &Path, tag: Tag, layout: Arc<Layout>) -> Result<Self, CheckpointError> {
        fs::create_dir_all(root).map_err(CheckpointError::io("create", root))?;
        // The lock comes first, because the leftovers could belong to a save that is still running.
        let lock = Lock::take(root)?;
        // Leftovers are removed before the free space is measured, of which they take a part.
        store::remove_leftovers(root)?;
        let follows = store::recover(root)?.map(|latest| latest.manifest.id);
        vacate(root, &tag)?;
        let identity = Identity::new(tag);
        let lengths = (0..layout.world_size()).map(|rank| layout.file_len(rank, &identity));
        let needed = lengths.map(|length| length.next_multiple_of(BLOCK)).sum::<u64>();
        disk::check_free(root, needed.saturating_add(MANIFEST_ROOM))?;
        let folder = store::partial_folder(root, &identity.tag);
        fs::create_dir(&folder).map_err(disk::write_error(&folder, needed))?;
        let ticket = SaveTicket { folder, identity };
        Ok(Self { root: root.to_owned(), layout, ticket, follows, unfinished: true, _lock: lock })
    }

    /// Starts the checkpoint of `step` under the first free name of that step. A name may be taken
    /// if the run was resumed from an older checkpoint.
    ///
    /// # Errors
    /// Returns the errors of [`begin`](Self::begin).
    pub fn begin_step(
        root: &Path,
        step: u64,
        layout: Arc<Layout>,
    ) -> Result<Self, CheckpointError> {
        let mut visit = 1;
        loop {
            match Self::begin(root, Tag::numbered(step, visit), layout.clone()) {
                Err(CheckpointError::TagTaken { .. }) if visit < u32::MAX => visit += 1,
                begun => return begun,
            }
        }
    }

    /// Returns the ticket from which every rank creates its [`RankWriter`](crate::RankWriter).
    pub fn ticket(&self) -> &SaveTicket {
        &self.ticket
    }

    /// Completes the checkpoint after all ranks have written, and returns its folder. `records` may
    /// be in any order.
    ///
    /// # Errors
    /// Returns [`CheckpointError::Records`] if a record is missing, belongs to another save or
    /// another layout, or has a state that would not be restored unchanged;
    /// [`CheckpointError::DiskFull`]; or an I/O error. `latest` is then unchanged.
    pub fn commit(
        mut self,
        records: Vec<RankRecord>,
        run: Run,
    ) -> Result<PathBuf, CheckpointError> {
        let checksum = self.write_manifest(records, run)?;
        let folder = self.publish()?;
        store::set_latest(&self.root, &self.ticket.identity.tag, &checksum)?;
        Ok(folder)
    }

    /// Writes and flushes the manifest and returns its checksum.
    fn write_manifest(
        &self,
        records: Vec<RankRecord>,
        mut run: Run,
    ) -> Result<String, CheckpointError> {
        run.metric = run.metric.filter(|metric| metric.is_finite());
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let Identity { tag, id } = self.ticket.identity.clone();
        let manifest = Manifest {
            format: FORMAT.into(),
            version: self.layout.version(),
            writer: concat!("deepburn ", env!("CARGO_PKG_VERSION")).into(),
            tag,
            id,
            follows: self.follows.clone(),
            saved_at: since.map_or(0, |since| since.as_secs()),
            run,
            layout: Layout::clone(&self.layout),
            ranks: self.in_order(records)?,
        };
        let path = self.ticket.folder.join(MANIFEST);
        let (text, checksum) = manifest.to_text(&path)?;
        disk::write_new(&path, text.as_bytes())?;
        disk::sync_folder(&self.ticket.folder)?;
        Ok(checksum)
    }

    /// Renames the hidden folder to its tag.
    fn publish(&mut self) -> Result<PathBuf, CheckpointError> {
        let path = self.root.join(self.ticket.identity.tag.as_str());
        // A rename would silently replace an empty folder.
        if path.symlink_metadata().is_ok() {
            return Err(CheckpointError::TagTaken { path });
        }
        fs::rename(&self.ticket.folder, &path).map_err(CheckpointError::io("create", &path))?;
        self.unfinished = false;
        disk::sync_folder(&self.root)?;
        Ok(path)
    }

    /// Checks the records and returns the manifest entries in rank order.
    fn in_order(&self, mut records: Vec<RankRecord>) -> Result<Vec<RankEntry>, CheckpointError> {
        let refuse = |reason| Err(CheckpointError::Records { reason });
        // Ranks finish in any order.
        records.sort_by_key(|record| record.rank);
        let digest = self.layout.digest();
        let found: Vec<_> = records.iter().map(|record| record.rank).collect();
        let world_size = self.layout.world_size();
        if found.len() != world_size || found.iter().enumerate().any(|(i, &rank)| i != rank) {
            return refuse(format!("{found:?} are not the ranks 0 to {}", world_size - 1));
        }
        for RankRecord { rank, id, layout, file } in &records {
            if *id != self.ticket.identity.id {
                return refuse(format!("the file of rank {rank} belongs to a different save"));
            }
            if *layout != digest {
                return refuse(format!("rank {rank} has other parameters than rank 0"));
            }
            let path = self.ticket.folder.join(rank_file_name(*rank));
            // On a shared file system, this rank may see less of a file than its writer does.
            let length = fs::metadata(&path).map(|metadata| metadata.len());
            let length = length.map_err(CheckpointError::io("find", &path))?;
            if length != file.length {
                return refuse(format!(
                    "rank {rank} wrote {} bytes, and {} has {length}",
                    file.length,
                    path.display()
                ));
            }
        }
        Ok(records.into_iter().map(|record| record.file).collect())
    }
}

impl Drop for Save {
    fn drop(&mut self) {
        if self.unfinished {
            // Best effort: the next save removes leftovers.
            _ = fs::remove_dir_all(&self.ticket.folder);
        }
    }
}

/// Makes the tag available. A damaged checkpoint is renamed; anything else of this name is an
/// error.
fn vacate(root: &Path, tag: &Tag) -> Result<(), CheckpointError> {
    let path = root.join(tag.as_str());
    if path.symlink_metadata().is_err() {
        return Ok(());
    }
    match Checkpoint::open(&path, None).and_then(|checkpoint| checkpoint.verify()) {
        Err(CheckpointError::Damaged { .. } | CheckpointError::Mixed { .. }) => {}
        _ => return Err(CheckpointError::TagTaken { path }),
    }
    let aside = (1_u32..)
        .map(|number| root.join(format!("{tag}.damaged-{number}")))
        .find(|aside| aside.symlink_metadata().is_err());
    let Some(aside) = aside else { return Err(CheckpointError::TagTaken { path }) };
    fs::rename(&path, &aside).map_err(CheckpointError::io("rename", &path))?;
    disk::sync_folder(root)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RankWriter;
    use crate::tests::fixture::{TempRoot, layout, parameter, run, save, write_rank};
    use serde_json::json;

    fn newest(root: &Path) -> Option<u64> {
        let checkpoint = Checkpoint::open(root, None).ok()?;
        checkpoint.verify().unwrap();
        Some(checkpoint.run().step)
    }

    /// Leaves a save as if the process had been killed: its files stay, and the lock is released.
    fn kill(mut save: Save) {
        save.unfinished = false;
    }

    #[test]
    fn a_save_that_is_killed_at_any_moment_leaves_an_intact_checkpoint() {
        // The last moment at which the save is killed, and the step to resume from then.
        let moments =
            [("begun", 1), ("one rank", 1), ("all ranks", 1), ("manifest", 1), ("renamed", 2)];
        for before in [true, false] {
            for (moment, step) in moments {
                let root = TempRoot::new();
                if before {
                    save(&root, 1, 2);
                }
                let layout = layout(2);
                let mut second = Save::begin(&root, Tag::of_step(2), layout.clone()).unwrap();
                let mut records = vec![];
                let mut reached = |name| {
                    match name {
                        "begun" => {}
                        "one rank" => records.push(write_rank(second.ticket(), &layout, 0, 2)),
                        "all ranks" => records.push(write_rank(second.ticket(), &layout, 1, 2)),
                        "manifest" => {
                            let records = std::mem::take(&mut records);
                            second.write_manifest(records, run(2)).map(drop).unwrap();
                        }
                        _ => second.publish().map(drop).unwrap(),
                    }
                    name == moment
                };
                let reached = moments.iter().any(|(name, _)| reached(name));
                assert!(reached);
                kill(second);
                let expected = if before || step == 2 { Some(step) } else { None };
                assert_eq!(newest(&root), expected, "killed: {moment}");
                // The next save succeeds and removes the leftovers.
                save(&root, 3, 1);
                assert_eq!(newest(&root), Some(3));
                let hidden = disk::names(&root).unwrap();
                assert!(!hidden.iter().any(|name| name.starts_with('.')), "{hidden:?}");
            }
        }
    }

    #[test]
    fn a_dropped_save_leaves_no_trace() {
        let root = TempRoot::new();
        save(&root, 1, 1);
        let before = disk::names(&root).unwrap();
        let layout = layout(1);
        let second = Save::begin(&root, Tag::of_step(2), layout.clone()).unwrap();
        let record = write_rank(second.ticket(), &layout, 0, 2);
        drop(second);
        assert_eq!(disk::names(&root).unwrap(), before);
        // The record of the dropped save is rejected by a later save.
        let third = Save::begin(&root, Tag::of_step(2), layout.clone()).unwrap();
        write_rank(third.ticket(), &layout, 0, 2);
        let error = third.commit(vec![record], run(2)).unwrap_err().to_string();
        assert!(error.contains("belongs to a different save"), "{error}");
        assert_eq!(disk::names(&root).unwrap(), before);
        assert_eq!(newest(&root), Some(1));
    }

    #[test]
    fn all_ranks_must_write_with_the_same_layout() {
        let root = TempRoot::new();
        let layout = layout(2);
        let begin = || Save::begin(&root, Tag::of_step(1), layout.clone()).unwrap();
        let refusal = |save: Save, records| save.commit(records, run(1)).unwrap_err().to_string();
        let first = begin();
        let record = write_rank(first.ticket(), &layout, 0, 1);
        let error = refusal(first, vec![record.clone(), record]);
        assert!(error.contains("[0, 0] are not the ranks 0 to 1"), "{error}");

        let second = begin();
        let record = write_rank(second.ticket(), &layout, 0, 1);
        let other = Arc::new(Layout::new(vec![parameter("other", &[3])], 2).unwrap());
        let records = vec![write_rank(second.ticket(), &other, 1, 1), record];
        let error = refusal(second, records);
        assert!(error.contains("rank 1 has other parameters"), "{error}");

        let third = begin();
        let [left, right] = [0, 1].map(|rank| write_rank(third.ticket(), &layout, rank, 1));
        fs::write(third.ticket().folder.join(rank_file_name(1)), "short").unwrap();
        let error = refusal(third, vec![left, right]);
        assert!(error.contains("rank 1 wrote"), "{error}");
        assert_eq!(newest(&root), None);
    }

    #[test]
    fn records_and_tickets_are_serializable() {
        let root = TempRoot::new();
        let layout = layout(1);
        let save = Save::begin(&root, Tag::of_step(1), layout.clone()).unwrap();
        let ticket = serde_json::to_string(save.ticket()).unwrap();
        let ticket: SaveTicket = serde_json::from_str(&ticket).unwrap();
        assert_eq!(&ticket, save.ticket());
        let record = write_rank(&ticket, &layout, 0, 1);
        let text = serde_json::to_string(&record).unwrap();
        assert_eq!(serde_json::from_str::<RankRecord>(&text).unwrap(), record);
        save.commit(vec![record], run(1)).unwrap();
        assert_eq!(newest(&root), Some(1));
    }

    #[test]
    fn existing_tags_are_refused() {
        let root = TempRoot::new();
        save(&root, 1, 2);
        let error = Save::begin(&root, Tag::of_step(1), layout(2)).unwrap_err();
        assert!(matches!(error, CheckpointError::TagTaken { .. }), "{error}");
        // A folder that is not a checkpoint is not moved.
        fs::create_dir(root.join("mine")).unwrap();
        let error = Save::begin(&root, "mine".parse().unwrap(), layout(2)).unwrap_err();
        assert!(matches!(error, CheckpointError::TagTaken { .. }), "{error}");
        // The same applies to a folder that appears while the save is in progress.
        let second = Save::begin(&root, Tag::of_step(2), layout(1)).unwrap();
        let record = write_rank(second.ticket(), &layout(1), 0, 2);
        fs::create_dir(root.join("step-00000002")).unwrap();
        let error = second.commit(vec![record], run(2)).unwrap_err();
        assert!(matches!(error, CheckpointError::TagTaken { .. }), "{error}");
        assert_eq!(newest(&root), Some(1));
    }

    #[test]
    fn saving_a_step_again_uses_a_new_name() {
        let root = TempRoot::new();
        for tag in ["step-00000001", "step-00000001.2", "step-00000001.3"] {
            let save = Save::begin_step(&root, 1, layout(1)).unwrap();
            let record = write_rank(save.ticket(), &layout(1), 0, 1);
            assert_eq!(save.commit(vec![record], run(1)).unwrap(), root.join(tag));
            assert_eq!(Checkpoint::open(&root, None).unwrap().tag().as_str(), tag);
        }
        let error = Save::begin_step(&root.join("step-00000001/manifest.json"), 2, layout(1));
        assert!(matches!(error, Err(CheckpointError::Io { .. })));
    }

    #[test]
    fn a_damaged_checkpoint_is_renamed_and_kept() {
        let root = TempRoot::new();
        for number in 1..3 {
            save(&root, 1, 2);
            let file = root.join("step-00000001").join(rank_file_name(1));
            let mut bytes = fs::read(&file).unwrap();
            *bytes.last_mut().unwrap() ^= 1;
            fs::write(&file, bytes).unwrap();
            assert!(Checkpoint::open(&root, None).unwrap().verify().is_err());
            drop(Save::begin(&root, Tag::of_step(1), layout(2)).unwrap());
            assert!(root.join(format!("step-00000001.damaged-{number}")).exists());
            assert!(!root.join("step-00000001").exists());
        }
    }

    #[test]
    fn a_save_that_exceeds_the_disk_is_refused_before_writing() {
        let root = TempRoot::new();
        save(&root, 1, 1);
        let huge = Layout::new(vec![parameter("w", &[1 << 55])], 3).unwrap();
        let error = Save::begin(&root, Tag::of_step(2), huge.into()).unwrap_err();
        assert!(matches!(error, CheckpointError::DiskFull { .. }), "{error}");
        assert_eq!(newest(&root), Some(1));
        assert!(!store::partial_folder(&root, &Tag::of_step(2)).exists());
    }

    #[test]
    fn a_metric_that_is_not_finite_is_none() {
        let root = TempRoot::new();
        let layout = layout(1);
        let save = Save::begin(&root, Tag::of_step(1), layout.clone()).unwrap();
        let record = write_rank(save.ticket(), &layout, 0, 1);
        let run = Run { metric: Some(f64::NAN), state: json!([1.5]), ..run(1) };
        save.commit(vec![record], run).unwrap();
        let checkpoint = Checkpoint::open(&root, None).unwrap();
        assert_eq!((checkpoint.run().metric, &checkpoint.run().state), (None, &json!([1.5])));
    }

    #[test]
    fn a_ticket_of_a_dropped_save_is_refused() {
        let root = TempRoot::new();
        let save = Save::begin(&root, Tag::of_step(1), layout(1)).unwrap();
        let ticket = save.ticket().clone();
        drop(save);
        let error = RankWriter::create(&ticket, layout(1), 0).unwrap_err();
        assert!(matches!(error, CheckpointError::Io { action: "write", .. }), "{error}");
    }
}
