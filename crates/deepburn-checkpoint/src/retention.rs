//! Deletion of old checkpoints.

use std::fs;
use std::num::NonZeroUsize;
use std::path::Path;

use crate::store::{self, ListedCheckpoint, Lock};
use crate::{CheckpointError, Tag, disk};

/// The number of checkpoints that are kept. Checkpoints with a name that a user chose
/// ([`Tag::step`] is `None`) are neither counted nor deleted. The latest checkpoint is never
/// deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Retention {
    /// The number of newest checkpoints, by step. `None` keeps all.
    pub keep_last: Option<NonZeroUsize>,
    /// The number of additional checkpoints with the lowest [`Run::metric`](crate::Run::metric);
    /// among equal ones, the newer are kept.
    pub keep_best: usize,
}

impl Retention {
    /// Deletes the checkpoints in the folder `root` that are not to be kept, and returns their
    /// tags.
    ///
    /// Checkpoints of `protected_step`, for example of the best model, are always kept. Each
    /// checkpoint is renamed before it is deleted, so a partly deleted one is never mistaken for a
    /// checkpoint. Folders with damaged manifests are not touched, because their content is
    /// unknown.
    ///
    /// # Errors
    /// Returns [`CheckpointError::Busy`] while a save is in progress, or an I/O error.
    pub fn apply(
        &self,
        root: &Path,
        protected_step: Option<u64>,
    ) -> Result<Vec<Tag>, CheckpointError> {
        let Some(keep_last) = self.keep_last else { return Ok(Vec::new()) };
        let _lock = Lock::take(root)?;
        let mut checkpoints = store::checkpoints(root)?;
        // Checkpoints that users have named are theirs to delete.
        checkpoints.retain(|checkpoint| checkpoint.tag.step().is_some());
        let kept = checkpoints.len().saturating_sub(keep_last.get());
        let old = checkpoints.drain(..kept);
        let mut old: Vec<_> = old.collect();
        let best = self.best(&old, &checkpoints);
        let latest =
            [store::named_latest(root), store::latest(root)?.map(|checkpoint| checkpoint.tag)];
        old.retain(|ListedCheckpoint { tag, manifest, .. }| {
            let is_protected = Some(manifest.run.step) == protected_step;
            !is_protected && !best.contains(tag) && !latest.contains(&Some(tag.clone()))
        });
        old.into_iter()
            .map(|ListedCheckpoint { tag, .. }| delete(root, &tag).map(|()| tag))
            .collect()
    }

    /// Returns the tags of the best checkpoints.
    fn best(&self, old: &[ListedCheckpoint], kept: &[ListedCheckpoint]) -> Vec<Tag> {
        let metric = |checkpoint: &ListedCheckpoint| {
            Some((checkpoint.manifest.run.metric?, checkpoint.tag.clone()))
        };
        // The list is sorted newest first, and the sort keeps this order among equal metrics.
        let mut best: Vec<_> =
            kept.iter().rev().chain(old.iter().rev()).filter_map(metric).collect();
        best.sort_by(|(left, _), (right, _)| left.total_cmp(right));
        best.into_iter().take(self.keep_best).map(|(_, tag)| tag).collect()
    }
}

/// Deletes the checkpoint `tag` in the folder `root`, even if it is the latest one. Like
/// [`Retention::apply`], it never leaves a partial checkpoint under its name.
///
/// # Errors
/// Returns [`CheckpointError::Busy`] while a save is in progress, or an I/O error, for example if
/// the checkpoint does not exist.
pub fn delete_checkpoint(root: &Path, tag: &Tag) -> Result<(), CheckpointError> {
    let _lock = Lock::take(root)?;
    delete(root, tag)
}

/// Deletes a checkpoint's folder. It is renamed first, and the rename is flushed, so after a power
/// failure the folder is either complete under its name or hidden. The caller holds the lock.
fn delete(root: &Path, tag: &Tag) -> Result<(), CheckpointError> {
    let (path, hidden) = (root.join(tag.as_str()), store::deleted_folder(root, tag));
    if hidden.symlink_metadata().is_ok() {
        // A process that was killed may have left this folder.
        fs::remove_dir_all(&hidden).map_err(CheckpointError::io("remove", &hidden))?;
    }
    fs::rename(&path, &hidden).map_err(CheckpointError::io("rename", &path))?;
    disk::sync_folder(root)?;
    fs::remove_dir_all(&hidden).map_err(CheckpointError::io("remove", &hidden))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::fixture::{TempRoot, layout, run, save, save_layout};
    use crate::{Checkpoint, Run, Save};
    use proptest::prelude::*;

    fn save_with(root: &Path, step: u64, metric: Option<f64>) {
        save_layout(root, step, &layout(1), Run { metric, ..run(step) });
    }

    fn steps(root: &Path) -> Vec<u64> {
        Checkpoint::all(root).unwrap().iter().map(|checkpoint| checkpoint.run().step).collect()
    }

    fn keep(last: usize, best: usize) -> Retention {
        Retention { keep_last: NonZeroUsize::new(last), keep_best: best }
    }

    #[test]
    fn the_last_and_the_best_are_kept() {
        let root = TempRoot::new();
        for (step, metric) in
            [(1, Some(0.5)), (2, Some(0.1)), (3, None), (4, Some(0.1)), (5, Some(2.0))]
        {
            save_with(&root, step, metric);
        }
        assert_eq!(keep(0, 1).apply(&root, None).unwrap(), []);
        assert_eq!(keep(2, 3).apply(&root, None).unwrap(), [Tag::of_step(3)]);
        // Of two equally good checkpoints the newer one is kept, in this case as one of the last
        // two.
        assert_eq!(keep(2, 1).apply(&root, None).unwrap(), [1, 2].map(Tag::of_step));
        assert_eq!(keep(1, 1).apply(&root, None).unwrap(), []);
        assert_eq!(keep(1, 0).apply(&root, None).unwrap(), [Tag::of_step(4)]);
        assert_eq!(steps(&root), [5]);
        assert_eq!(disk::names(&root).unwrap(), ["latest", "step-00000005"]);
    }

    #[test]
    fn renamed_and_latest_checkpoints_are_kept() {
        let root = TempRoot::new();
        save(&root, 9, 1);
        fs::rename(root.join("step-00000009"), root.join("best")).unwrap();
        fs::remove_file(root.join("latest")).unwrap();
        save(&root, 8, 1);
        // The run resumed from an older checkpoint, so `latest` is not the newest step.
        for step in [5, 6] {
            save(&root, step, 1);
        }
        assert_eq!(keep(1, 0).apply(&root, None).unwrap(), [Tag::of_step(5)]);
        assert_eq!(steps(&root), [6, 8, 9]);
        Checkpoint::open_intact(&root, None).unwrap();
    }

    #[test]
    fn nothing_is_deleted_during_a_save() {
        let root = TempRoot::new();
        save(&root, 1, 1);
        save(&root, 2, 1);
        let save = Save::begin(&root, Tag::of_step(3), layout(1)).unwrap();
        if cfg!(unix) {
            assert!(matches!(keep(1, 0).apply(&root, None), Err(CheckpointError::Busy { .. })));
        }
        drop(save);
        assert_eq!(keep(1, 0).apply(&root, None).unwrap(), [Tag::of_step(1)]);
    }

    #[test]
    fn a_deletion_that_was_killed_is_finished_later() {
        let root = TempRoot::new();
        for step in 1..4 {
            save(&root, step, 1);
        }
        let hidden = store::deleted_folder(&root, &Tag::of_step(1));
        fs::create_dir(&hidden).unwrap();
        fs::write(hidden.join("rank-00000.safetensors"), "half").unwrap();
        assert_eq!(keep(2, 0).apply(&root, None).unwrap(), [Tag::of_step(1)]);
        assert!(!hidden.exists());
        // The next save finishes a deletion too.
        fs::rename(root.join("step-00000002"), store::deleted_folder(&root, &Tag::of_step(2)))
            .unwrap();
        assert_eq!(steps(&root), [3]);
        save(&root, 4, 1);
        assert_eq!(disk::names(&root).unwrap(), ["latest", "step-00000003", "step-00000004"]);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]

        #[test]
        fn exactly_the_other_checkpoints_are_deleted(
            metrics in prop::collection::vec(prop::option::of(0_u8..4), 1..7),
            last in 1_usize..4,
            best in 0_usize..4,
        ) {
            let root = TempRoot::new();
            for (step, metric) in metrics.iter().enumerate() {
                save_with(&root, step as u64, metric.map(f64::from));
            }
            keep(last, best).apply(&root, None).unwrap();
            let mut ranked: Vec<_> =
                metrics.iter().enumerate().filter_map(|(step, m)| Some((m.as_ref()?, step))).collect();
            ranked.sort_by_key(|&(metric, step)| (metric, usize::MAX - step));
            ranked.truncate(best);
            let expected: Vec<_> = (0..metrics.len())
                .filter(|&step| {
                    step + last >= metrics.len() || ranked.iter().any(|(_, best)| *best == step)
                })
                .map(|step| step as u64)
                .collect();
            prop_assert_eq!(steps(&root), expected);
        }
    }

    #[test]
    fn any_checkpoint_can_be_deleted_and_saved_again() {
        let root = TempRoot::new();
        for step in [1, 2] {
            save_with(&root, step, None);
        }
        delete_checkpoint(&root, &Tag::of_step(2)).unwrap();
        assert_eq!(steps(&root), [1]);
        assert!(delete_checkpoint(&root, &Tag::of_step(2)).is_err());
        save_with(&root, 2, None);
        assert_eq!(Checkpoint::open(&root, None).unwrap().run().step, 2);
    }
}
