//! A checkpoint that is read, at any number of ranks and any stage.
//!
//! Main type: [`Checkpoint`]. Opening it proves the manifest; every rank's file is proved before the
//! first value is taken from it, so a rank that needs one file reads one, and [`Checkpoint::verify`]
//! proves all. Any range of any slot can be read, wherever the ranks that wrote it cut it. What is
//! damaged, mixed or of another format is refused with the file named.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use rayon::prelude::*;
use serde_json::Value;

use crate::manifest::{MANIFEST, Manifest};
use crate::rank_file::RankFile;
use crate::{
    Atom, CheckpointError, Element, ElementType, Layout, Run, Slot, Tag, Values, foreign, store,
};

/// A checkpoint whose manifest is sound. Shared between threads, it verifies every file once.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    manifest: Manifest,
    /// By rank; `None` until it is verified.
    files: Vec<Mutex<Option<Arc<RankFile>>>>,
}

impl Checkpoint {
    /// Opens the checkpoint `tag` in the folder `path`; without a tag, the latest one there, or
    /// `path` itself where that is a checkpoint.
    ///
    /// # Errors
    /// [`CheckpointError::Missing`], [`CheckpointError::Foreign`], [`CheckpointError::Version`],
    /// [`CheckpointError::Damaged`], [`CheckpointError::Mixed`] where `latest` is of another
    /// checkpoint than the one it names, or an I/O error.
    pub fn open(path: &Path, tag: Option<&Tag>) -> Result<Self, CheckpointError> {
        if let Some(tag) = tag {
            let folder = path.join(tag.as_str());
            return match folder.is_dir() {
                true => Self::in_folder(folder),
                false => Err(CheckpointError::missing(&folder, available(path))),
            };
        }
        if !path.is_dir() {
            let reason = match path.exists() {
                true => "it is a file; give the folder of a checkpoint, or the one it lies in",
                false => "there is no such folder",
            };
            return Err(CheckpointError::missing(path, reason));
        }
        if path.join(MANIFEST).exists() {
            return Self::in_folder(path.to_owned());
        }
        match store::latest(path)? {
            Some(entry) => Ok(Self::new(path.join(entry.tag.as_str()), entry.manifest)),
            None => Err(without_manifest(path)),
        }
    }

    /// Like [`Self::open`], and verifies all files. Where that fails and there is an older
    /// checkpoint that is intact, the error says which.
    ///
    /// # Errors
    /// Those of [`Self::open`] and [`Self::verify`], or [`CheckpointError::Superseded`].
    pub fn open_intact(path: &Path, tag: Option<&Tag>) -> Result<Self, CheckpointError> {
        let opened =
            Self::open(path, tag).and_then(|checkpoint| checkpoint.verify().map(|()| checkpoint));
        let error = match opened {
            Ok(checkpoint) => return Ok(checkpoint),
            Err(error) => error,
        };
        let is_checkpoint = tag.is_none() && path.join(MANIFEST).exists();
        let (root, name) = match (is_checkpoint, path.parent()) {
            (true, Some(parent)) => {
                let name = path.file_name().and_then(|name| name.to_str()?.parse().ok());
                (parent, name)
            }
            _ => (path, tag.cloned().or_else(|| store::named_latest(path))),
        };
        match Self::intact_before(root, name.as_ref()) {
            Ok(Some(other)) => {
                Err(CheckpointError::Superseded { error: Box::new(error), intact: other.path })
            }
            _ => Err(error),
        }
    }

    /// The newest intact checkpoint in the folder `root` that is older than `tag`, which may be
    /// damaged beyond reading. Without a tag, or where its step cannot be told, the newest one of
    /// the others.
    ///
    /// # Errors
    /// Where the folder cannot be read.
    pub fn intact_before(root: &Path, tag: Option<&Tag>) -> Result<Option<Self>, CheckpointError> {
        let mut entries = store::entries(root)?;
        let step = tag.and_then(|tag| {
            let entry = entries.iter().find(|entry| entry.tag == *tag);
            entry.map(|entry| entry.manifest.run.step).or_else(|| tag.step())
        });
        entries.retain(|entry| {
            Some(&entry.tag) != tag && step.is_none_or(|step| entry.manifest.run.step < step)
        });
        let checkpoints = entries
            .into_iter()
            .rev()
            .map(|entry| Self::new(root.join(entry.tag.as_str()), entry.manifest));
        Ok(checkpoints.into_iter().find(|checkpoint| checkpoint.verify().is_ok()))
    }

    /// The checkpoints in the folder `root` whose manifests are sound, by step.
    ///
    /// # Errors
    /// Where the folder cannot be read.
    pub fn all(root: &Path) -> Result<Vec<Self>, CheckpointError> {
        let open = |entry: store::Entry| Self::new(root.join(entry.tag.as_str()), entry.manifest);
        Ok(store::entries(root)?.into_iter().map(open).collect())
    }

    fn in_folder(path: PathBuf) -> Result<Self, CheckpointError> {
        if !path.join(MANIFEST).exists() {
            return Err(without_manifest(&path));
        }
        let (manifest, _) = Manifest::read(&path)?;
        Ok(Self::new(path, manifest))
    }

    fn new(path: PathBuf, manifest: Manifest) -> Self {
        let files = manifest.ranks.iter().map(|_| Mutex::new(None)).collect();
        Self { path, manifest, files }
    }

    /// Proves every byte of every rank's file, several files at a time.
    ///
    /// # Errors
    /// [`CheckpointError::Damaged`] or [`CheckpointError::Mixed`] for the first file that is not as
    /// it was written; an I/O error.
    pub fn verify(&self) -> Result<(), CheckpointError> {
        let outcomes: Vec<_> =
            (0..self.files.len()).into_par_iter().map(|rank| self.file(rank).map(drop)).collect();
        outcomes.into_iter().collect()
    }

    /// The checkpoint's folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The tag it was saved under.
    pub fn tag(&self) -> &Tag {
        &self.manifest.tag
    }

    /// What all ranks agreed on.
    pub fn run(&self) -> &Run {
        &self.manifest.run
    }

    /// The parameters, and the number of ranks that wrote them.
    pub fn layout(&self) -> &Layout {
        &self.manifest.layout
    }

    /// What `rank` alone knew; `None` for a rank that did not write.
    pub fn rank_state(&self, rank: usize) -> Option<&Value> {
        Some(&self.manifest.ranks.get(rank)?.state)
    }

    pub(crate) fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Elements `range` of the flat parameter at `path` (or an alias of it), as they are stored.
    ///
    /// # Errors
    /// [`CheckpointError::NotInside`] for a parameter, slot or range that the checkpoint has not;
    /// [`CheckpointError::Damaged`] or [`CheckpointError::Mixed`] for a file that is not as it was
    /// written; an I/O error.
    pub fn read(
        &self,
        path: &str,
        slot: &Slot,
        range: Range<usize>,
    ) -> Result<Values, CheckpointError> {
        let place = self.find(path, slot, &range)?;
        // Before there is memory for the values: a file that is there is as large as they are.
        self.verify_owners(place.0, &range)?;
        let mut values = Values::zeros(self.element(place), range.len());
        self.fill(place, range.start, values.bytes_mut())?;
        if !values.is_sound() {
            let reason = format!("{path} has bools other than 0 and 1");
            return Err(CheckpointError::damaged(&self.path, reason));
        }
        Ok(values)
    }

    /// Fills `values` with the elements of a slot from `start` on, which are stored in this type.
    ///
    /// # Errors
    /// As [`Self::read`]; also where the slot is of another type.
    pub fn read_into<T: Element>(
        &self,
        path: &str,
        slot: &Slot,
        start: usize,
        values: &mut [T],
    ) -> Result<(), CheckpointError> {
        let end = start.saturating_add(values.len());
        let place = self.find(path, slot, &(start..end))?;
        if self.element(place) != T::TYPE {
            return Err(self.not_inside(format!(
                "{path}:{slot} is stored as {} and was to be read as {}",
                self.element(place),
                T::TYPE
            )));
        }
        self.fill(place, start, bytemuck::cast_slice_mut(values))
    }

    /// The atom and slot of what is to be read.
    fn find(
        &self,
        path: &str,
        slot: &Slot,
        range: &Range<usize>,
    ) -> Result<(usize, usize), CheckpointError> {
        let layout = self.layout();
        let Some(atom) = layout.find(path) else {
            return Err(self.not_inside(format!("it has no parameter {path}")));
        };
        let Atom { slots, shape, .. } = &layout.atoms()[atom];
        let Some(slot) = slots.iter().position(|stored| stored.slot == *slot) else {
            let found: Vec<_> = slots.iter().map(|stored| stored.slot.as_str()).collect();
            let found = found.join(", ");
            return Err(self.not_inside(format!("parameter {path} has no {slot}, only {found}")));
        };
        if range.start > range.end || range.end > layout.numel(atom) {
            return Err(self.not_inside(format!(
                "parameter {path} of shape {shape:?} has no elements {range:?}"
            )));
        }
        Ok((atom, slot))
    }

    fn element(&self, (atom, slot): (usize, usize)) -> ElementType {
        self.layout().atoms()[atom].slots[slot].element
    }

    /// The ranks whose files have the elements of this range.
    fn owners(&self, atom: usize, range: &Range<usize>) -> Range<usize> {
        if range.is_empty() {
            return 0..0;
        }
        let chunk = self.layout().chunk_len(atom);
        range.start / chunk..(range.end - 1) / chunk + 1
    }

    fn verify_owners(&self, atom: usize, range: &Range<usize>) -> Result<(), CheckpointError> {
        self.owners(atom, range).try_for_each(|rank| self.file(rank).map(drop))
    }

    /// Fills `bytes` with the elements from `start` on of a slot that has as many.
    fn fill(
        &self,
        place: (usize, usize),
        start: usize,
        bytes: &mut [u8],
    ) -> Result<(), CheckpointError> {
        let size = self.element(place).size();
        let range = start..start + bytes.len() / size;
        self.verify_owners(place.0, &range)?;
        let mut rest = bytes;
        for rank in self.owners(place.0, &range) {
            let owned = self.layout().owned(place.0, rank);
            let part = range.start.max(owned.start)..range.end.min(owned.end);
            let (bytes, after) = rest.split_at_mut(part.len() * size);
            let offset = (part.start - owned.start) as u64 * size as u64;
            self.file(rank)?.read(place, offset, bytes)?;
            rest = after;
        }
        Ok(())
    }

    /// The file of `rank`, which is verified the first time. Others who want it wait meanwhile.
    fn file(&self, rank: usize) -> Result<Arc<RankFile>, CheckpointError> {
        // Nothing is left half done in there by a panic.
        let mut file = self.files[rank].lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(file) = &*file {
            return Ok(file.clone());
        }
        let verified = Arc::new(RankFile::open(&self.path, &self.manifest, rank)?);
        Ok(file.insert(verified).clone())
    }

    fn not_inside(&self, reason: String) -> CheckpointError {
        CheckpointError::NotInside { path: self.path.clone(), reason }
    }
}

/// Why a folder that has no manifest is no checkpoint.
fn without_manifest(folder: &Path) -> CheckpointError {
    if let Some(error) = foreign::explain(folder) {
        return error;
    }
    let names = store::names(folder).unwrap_or_default();
    if names.iter().any(|name| name.starts_with("rank-")) {
        return CheckpointError::damaged(&folder.join(MANIFEST), "it is missing");
    }
    CheckpointError::missing(folder, available(folder))
}

/// What there is in a folder instead of what was looked for.
fn available(root: &Path) -> String {
    let entries = store::entries(root).unwrap_or_default();
    let tags: Vec<_> = entries.iter().map(|entry| entry.tag.as_str()).collect();
    match &tags[..] {
        [] => format!("and no other one in {}", root.display()),
        tags => format!("but there are {}; name one of them", tags.join(", ")),
    }
}
