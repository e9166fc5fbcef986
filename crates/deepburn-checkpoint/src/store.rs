//! The folder of checkpoints and the choice of the latest one.
//!
//! The file `latest` contains a tag and the checksum of that checkpoint's manifest, so a damaged
//! `latest` never selects another checkpoint. A save writes `latest` last. If the save is killed
//! just before, it leaves a complete checkpoint that `latest` does not name yet. The manifest of
//! this checkpoint has the id of the checkpoint that was the latest when the save started, and the
//! checkpoint is found by this id.
//!
//! ```text
//! latest        step-00000010\n
//!               <64 hexadecimal digits>\n       BLAKE3 of that checkpoint's manifest
//! ```
//!
//! The field `follows` of the manifests forms a chain. The latest checkpoint is the end of the
//! chain that starts at the checkpoint in `latest`. In practice the chain has at most one more
//! link. Checkpoints of an abandoned branch are not part of the chain.

use std::fs::{self, File, TryLockError};
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use crate::disk::{self, names};
use crate::manifest::{MANIFEST, Manifest};
use crate::{CheckpointError, Tag, foreign};

/// The name of the file with the tag of the latest checkpoint.
const LATEST: &str = "latest";
/// The suffix of the hidden folder of a checkpoint that is being written.
const PARTIAL: &str = ".partial";
/// The suffix of the hidden folder of a checkpoint that is being deleted.
const DELETED: &str = ".deleted";

/// A checkpoint with an intact manifest.
#[derive(Debug)]
pub(crate) struct ListedCheckpoint {
    /// The name of its folder.
    pub(crate) tag: Tag,
    /// The manifest, whose checksum was verified.
    pub(crate) manifest: Manifest,
    /// The checksum of the manifest.
    pub(crate) checksum: String,
}

impl ListedCheckpoint {
    /// Reads the manifest of the checkpoint `tag`. Its rank files are not read.
    fn read(root: &Path, tag: Tag) -> Result<Self, CheckpointError> {
        let (manifest, checksum) = Manifest::read(&root.join(tag.as_str()))?;
        Ok(Self { tag, manifest, checksum })
    }
}

/// The content of the file `latest`.
#[derive(Debug, PartialEq, Eq)]
struct Pointer {
    /// The tag of the latest checkpoint when the file was written.
    tag: Tag,
    /// The checksum of the manifest.
    checksum: String,
}

/// Returns the folder of a checkpoint until it is complete.
pub(crate) fn partial_folder(root: &Path, tag: &Tag) -> PathBuf {
    root.join(format!(".{tag}{PARTIAL}"))
}

/// Returns the folder of a checkpoint while it is deleted.
pub(crate) fn deleted_folder(root: &Path, tag: &Tag) -> PathBuf {
    root.join(format!(".{tag}{DELETED}"))
}

/// Removes the remains of killed saves and deletions.
pub(crate) fn remove_leftovers(root: &Path) -> Result<(), CheckpointError> {
    for name in names(root)? {
        let Some(hidden) = name.strip_prefix('.') else { continue };
        let tag = hidden.strip_suffix(PARTIAL).or_else(|| hidden.strip_suffix(DELETED));
        let path = root.join(&name);
        // Links are not followed, and files of other programs are not removed.
        let is_folder = fs::symlink_metadata(&path).is_ok_and(|metadata| metadata.is_dir());
        if is_folder && tag.is_some_and(|tag| tag.parse::<Tag>().is_ok()) {
            fs::remove_dir_all(&path).map_err(CheckpointError::io("remove", &path))?;
        }
    }
    Ok(())
}

/// Returns the checkpoints whose manifest is intact, sorted by step and then by age. Others are
/// skipped.
pub(crate) fn checkpoints(root: &Path) -> Result<Vec<ListedCheckpoint>, CheckpointError> {
    let tags = names(root)?.into_iter().filter_map(|name| name.parse::<Tag>().ok());
    let mut checkpoints: Vec<_> =
        tags.filter_map(|tag| ListedCheckpoint::read(root, tag).ok()).collect();
    checkpoints.sort_by(|left, right| order(left).cmp(&order(right)));
    Ok(checkpoints)
}

/// Returns the key by which checkpoints are ordered: step, time of the save, tag.
fn order(checkpoint: &ListedCheckpoint) -> (u64, u64, &Tag) {
    (checkpoint.manifest.run.step, checkpoint.manifest.saved_at, &checkpoint.tag)
}

/// Returns the checkpoint to resume from: the one that `latest` names, or a checkpoint that was
/// completed after it. `None` if there is no checkpoint.
///
/// # Errors
/// Returns an error if `latest` is damaged, or if the checkpoint that it names is missing or
/// different.
pub(crate) fn latest(root: &Path) -> Result<Option<ListedCheckpoint>, CheckpointError> {
    let mut current = read_pointer(root)?.map(|pointer| follow(root, pointer)).transpose()?;
    // A checkpoint is removed from the list when the chain reaches it, so the loop ends even if the
    // chain is circular.
    let mut others = checkpoints(root)?;
    while let Some(next) = others.iter().rposition(|checkpoint| {
        checkpoint.manifest.follows.as_ref()
            == current.as_ref().map(|checkpoint| &checkpoint.manifest.id)
    }) {
        current = Some(others.swap_remove(next));
    }
    Ok(current)
}

/// Returns the tag in `latest` without checking it.
pub(crate) fn named_latest(root: &Path) -> Option<Tag> {
    Some(read_pointer(root).ok()??.tag)
}

/// Writes this checkpoint's tag and checksum to `latest`.
pub(crate) fn set_latest(root: &Path, tag: &Tag, checksum: &str) -> Result<(), CheckpointError> {
    disk::replace(&root.join(LATEST), format!("{tag}\n{checksum}\n").as_bytes())?;
    disk::sync_folder(root)
}

/// Completes a save that was killed before it updated `latest`, and returns the latest checkpoint.
/// A damaged `latest` is not changed.
pub(crate) fn recover(root: &Path) -> Result<Option<ListedCheckpoint>, CheckpointError> {
    // A save must not fail because an older checkpoint is damaged. The new one then starts a chain
    // of its own.
    let Ok(Some(checkpoint)) = latest(root) else { return Ok(None) };
    let pointer = Pointer { tag: checkpoint.tag.clone(), checksum: checkpoint.checksum.clone() };
    if read_pointer(root)? != Some(pointer) {
        set_latest(root, &checkpoint.tag, &checkpoint.checksum)?;
    }
    Ok(Some(checkpoint))
}

/// Returns the checkpoint that `latest` names.
///
/// # Errors
/// Returns [`CheckpointError::Missing`] or [`CheckpointError::Foreign`] if its folder has no
/// manifest, the errors of [`Manifest::read`], or [`CheckpointError::Mixed`] if a folder of the
/// same tag contains another save.
fn follow(
    root: &Path,
    Pointer { tag, checksum }: Pointer,
) -> Result<ListedCheckpoint, CheckpointError> {
    let folder = root.join(tag.as_str());
    if !folder.join(MANIFEST).exists() {
        return Err(foreign::explain(&folder)
            .unwrap_or_else(|| CheckpointError::missing(&folder, "`latest` names it")));
    }
    let checkpoint = ListedCheckpoint::read(root, tag)?;
    if checkpoint.checksum != checksum {
        return Err(CheckpointError::Mixed {
            path: root.join(LATEST),
            found: format!("a {} that was there before", checkpoint.tag),
        });
    }
    Ok(checkpoint)
}

/// Reads `latest`; `None` if the file does not exist.
///
/// # Errors
/// Returns [`CheckpointError::Damaged`] for any other content, [`CheckpointError::Foreign`] if the
/// folder belongs to another program that also writes a `latest` (DeepSpeed does), or an I/O error.
fn read_pointer(root: &Path) -> Result<Option<Pointer>, CheckpointError> {
    let path = root.join(LATEST);
    match fs::metadata(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Ok(metadata) if !metadata.is_file() => {
            return Err(CheckpointError::damaged(&path, "it is not a regular file"));
        }
        _ => {}
    }
    let mut bytes = Vec::new();
    File::open(&path)
        .and_then(|file| file.take(1 << 10).read_to_end(&mut bytes))
        .map_err(CheckpointError::io("read", &path))?;
    let parsed = str::from_utf8(&bytes).ok().and_then(parse_pointer);
    if parsed.is_some() {
        return Ok(parsed);
    }
    Err(foreign::explain(root).unwrap_or_else(|| {
        CheckpointError::damaged(
            &path,
            "it has to hold a tag and a checksum, a line each; name the tag to load instead",
        )
    }))
}

/// Parses the content of `latest`; `None` if it is not a tag and a hash on one line each.
fn parse_pointer(text: &str) -> Option<Pointer> {
    let (tag, checksum) = text.strip_suffix('\n')?.split_once('\n')?;
    let is_hash = checksum.len() == 64 && checksum.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_hash.then_some(Pointer { tag: tag.parse().ok()?, checksum: checksum.to_owned() })
}

/// A lock that excludes other saves and deletions in the same folder. It is released when it is
/// dropped or when the process ends for any reason.
#[derive(Debug)]
pub(crate) struct Lock {
    /// The open folder; `None` if the operating system cannot open or lock it.
    folder: Option<File>,
}

impl Lock {
    /// Takes the lock of the folder `root`.
    ///
    /// # Errors
    /// Returns [`CheckpointError::Busy`] if another process, or another save of this process, holds
    /// the lock.
    pub(crate) fn take(root: &Path) -> Result<Self, CheckpointError> {
        // Best effort: not every file system supports locks, and not every operating system can
        // open folders.
        let Ok(folder) = File::open(root) else { return Ok(Self { folder: None }) };
        match folder.try_lock() {
            Err(TryLockError::WouldBlock) => Err(CheckpointError::Busy { root: root.to_owned() }),
            _ => Ok(Self { folder: Some(folder) }),
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        if let Some(folder) = &self.folder {
            // Closing the file is not enough: a process that was forked in the meantime also has it
            // open until it executes another program.
            _ = folder.unlock();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::fixture::{TempRoot, save};

    #[test]
    fn truncated_and_malformed_latest_files_are_refused() {
        let checksum = "0".repeat(64);
        let text = format!("step-00000001\n{checksum}\n");
        assert_eq!(parse_pointer(&text).unwrap().tag, Tag::of_step(1));
        for end in 0..text.len() {
            assert_eq!(parse_pointer(&text[..end]), None, "{end}");
        }
        for text in ["step-00000001", "step-00000001\n", &format!("../x\n{checksum}\n")] {
            assert_eq!(parse_pointer(text), None);
        }
    }

    #[test]
    fn every_flip_in_latest_is_refused_even_if_it_names_another_checkpoint() {
        let root = TempRoot::new();
        for step in [2, 3] {
            save(&root, step, 1);
        }
        let path = root.join(LATEST);
        let original = fs::read(&path).unwrap();
        for at in 0..original.len() {
            for bit in 0..8 {
                let mut bytes = original.clone();
                bytes[at] ^= 1 << bit;
                fs::write(&path, bytes).unwrap();
                // A checksum whose digits differ only in case is refused too.
                assert!(latest(&root).is_err(), "bit {bit} of byte {at}");
            }
        }
    }

    #[test]
    fn a_checkpoint_that_latest_does_not_name_yet_is_found_and_named() {
        let root = TempRoot::new();
        let path = root.join(LATEST);
        save(&root, 1, 1);
        fs::remove_file(&path).unwrap();
        assert_eq!(latest(&root).unwrap().unwrap().tag, Tag::of_step(1));
        save(&root, 2, 1);
        let earlier = fs::read(&path).unwrap();
        save(&root, 3, 1);
        fs::write(&path, earlier).unwrap();
        assert_eq!(latest(&root).unwrap().unwrap().tag, Tag::of_step(3));
        assert_eq!(named_latest(&root), Some(Tag::of_step(2)));
        recover(&root).unwrap();
        assert_eq!(named_latest(&root), Some(Tag::of_step(3)));
    }

    #[test]
    fn a_latest_of_another_save_is_refused() {
        let (root, other) = (TempRoot::new(), TempRoot::new());
        save(&root, 1, 1);
        save(&other, 1, 1);
        fs::copy(other.join(LATEST), root.join(LATEST)).unwrap();
        assert!(matches!(latest(&root).unwrap_err(), CheckpointError::Mixed { .. }));
    }

    #[test]
    fn only_leftovers_are_removed() {
        let root = TempRoot::new();
        save(&root, 1, 1);
        for folder in [".step-00000002.partial", ".best.deleted", ".git", ".x y.partial", "mine"] {
            fs::create_dir(root.join(folder)).unwrap();
            fs::write(root.join(folder).join("file"), "").unwrap();
        }
        remove_leftovers(&root).unwrap();
        assert_eq!(
            names(&root).unwrap(),
            [".git", ".x y.partial", LATEST, "mine", "step-00000001"]
        );
    }

    #[test]
    #[cfg(unix)]
    fn the_lock_excludes_other_saves() {
        let root = TempRoot::new();
        let lock = Lock::take(&root).unwrap();
        let error = Lock::take(&root).unwrap_err();
        assert!(matches!(error, CheckpointError::Busy { .. }), "{error}");
        let inherited = lock.folder.as_ref().unwrap().try_clone().unwrap();
        drop(lock);
        Lock::take(&root).unwrap();
        drop(inherited);
    }
}
