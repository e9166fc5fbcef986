//! Reads checkpoints at any number of ranks and any ZeRO stage.
//!
//! Main type: [`Checkpoint`]. Opening a checkpoint verifies its manifest. The file of a rank is
//! verified before its first value is used, so a reader that needs one file does not read the
//! others. [`Checkpoint::verify`] checks all files. Any range of any array can be read, regardless
//! of the number of ranks that wrote the checkpoint. A damaged file, a file of another save or a
//! file in another format is reported as an error that names the file.

use std::error::Error;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use deepburn_weights::{Component, Composition, Origin, Weight, WeightMap};
use rayon::prelude::*;
use serde_json::Value;

use crate::base_reader::BaseReader;
use crate::manifest::{MANIFEST, Manifest};
use crate::rank_file::RankFile;
use crate::{
    BaseValues, CheckpointError, ElementType, Layout, ParamEntry, Run, StateKind, StoredElement,
    Tag, Values, disk, foreign, store,
};

/// A checkpoint with a verified manifest. Threads can share it; every file is verified once.
#[derive(Debug)]
pub struct Checkpoint {
    /// The folder of the checkpoint.
    path: PathBuf,
    /// The manifest, whose checksum was verified.
    pub(crate) manifest: Manifest,
    /// The files by rank; `None` until a file is verified.
    files: Vec<Mutex<Option<Arc<RankFile>>>>,
    /// The base model, from which omitted parameters are read.
    base: Option<Mutex<BaseReader>>,
}

impl Checkpoint {
    /// Opens the checkpoint `tag` in the folder `path`. Without a tag, opens the latest checkpoint
    /// there, or `path` itself if it is a checkpoint.
    ///
    /// # Errors
    /// Returns [`CheckpointError::Missing`], [`CheckpointError::Foreign`],
    /// [`CheckpointError::Version`] or [`CheckpointError::Damaged`]; [`CheckpointError::Mixed`] if
    /// `latest` refers to a different checkpoint than the one with its tag; or an I/O error.
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
            Some(listed) => Ok(Self::listed(path, listed)),
            None => Err(without_manifest(path)),
        }
    }

    /// Opens a checkpoint like [`Self::open`] and verifies all files. If that fails and an older
    /// checkpoint is intact, the error names it.
    ///
    /// # Errors
    /// Returns the errors of [`Self::open`] and [`Self::verify`], or
    /// [`CheckpointError::Superseded`].
    pub fn open_intact(path: &Path, tag: Option<&Tag>) -> Result<Self, CheckpointError> {
        let opened =
            Self::open(path, tag).and_then(|checkpoint| checkpoint.verify().map(|()| checkpoint));
        let error = match opened {
            Ok(checkpoint) => return Ok(checkpoint),
            // It lists the checkpoints that exist.
            Err(error @ CheckpointError::Missing { .. }) => return Err(error),
            Err(error) => error,
        };
        // `path` is either one checkpoint, whose sibling folders are the alternatives, or the
        // folder that contains all checkpoints.
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
                let step = name.and_then(|tag| step_of(&store::checkpoints(root).ok()?, &tag));
                let which = if step.is_some() { "older" } else { "other" };
                let (error, intact) = (Box::new(error), other.path);
                Err(CheckpointError::Superseded { error, which, intact })
            }
            _ => Err(error),
        }
    }

    /// Returns the newest intact checkpoint in the folder `root` that is older than `tag`. The
    /// checkpoint `tag` itself may be unreadable. Without a tag, or if the step of `tag` is
    /// unknown, returns the newest intact checkpoint other than `tag`.
    ///
    /// # Errors
    /// Returns an error if the folder cannot be read.
    pub fn intact_before(root: &Path, tag: Option<&Tag>) -> Result<Option<Self>, CheckpointError> {
        let mut checkpoints = store::checkpoints(root)?;
        let step = tag.and_then(|tag| step_of(&checkpoints, tag));
        checkpoints.retain(|listed| {
            Some(&listed.tag) != tag && step.is_none_or(|step| listed.manifest.run.step < step)
        });
        let mut checkpoints =
            checkpoints.into_iter().rev().map(|listed| Self::listed(root, listed));
        Ok(checkpoints.find(|checkpoint| checkpoint.verify().is_ok()))
    }

    /// Returns the checkpoints in the folder `root` whose manifests are intact, sorted by step.
    ///
    /// # Errors
    /// Returns an error if the folder cannot be read.
    pub fn all(root: &Path) -> Result<Vec<Self>, CheckpointError> {
        let listed = store::checkpoints(root)?.into_iter();
        Ok(listed.map(|listed| Self::listed(root, listed)).collect())
    }

    /// Opens the checkpoint whose manifest is in the folder `path`.
    fn in_folder(path: PathBuf) -> Result<Self, CheckpointError> {
        if !path.join(MANIFEST).exists() {
            return Err(without_manifest(&path));
        }
        let (manifest, _) = Manifest::read(&path)?;
        Ok(Self::new(path, manifest))
    }

    /// Opens a checkpoint of the folder `root`, whose manifest has been read.
    fn listed(root: &Path, listed: store::ListedCheckpoint) -> Self {
        Self::new(root.join(listed.tag.as_str()), listed.manifest)
    }

    /// Returns a checkpoint whose files are not verified yet.
    fn new(path: PathBuf, manifest: Manifest) -> Self {
        let files = manifest.ranks.iter().map(|_| Mutex::new(None)).collect();
        Self { path, manifest, files, base: None }
    }

    /// Verifies every byte of every rank's file, several files in parallel.
    ///
    /// # Errors
    /// Returns [`CheckpointError::Damaged`] or [`CheckpointError::Mixed`] for the first file that
    /// differs from the manifest, or an I/O error.
    pub fn verify(&self) -> Result<(), CheckpointError> {
        // The outcomes are collected in rank order, so that the error is the same whichever file is
        // read first.
        let outcomes: Vec<_> =
            (0..self.files.len()).into_par_iter().map(|rank| self.file(rank).map(drop)).collect();
        outcomes.into_iter().collect()
    }

    /// Sets the base model, from which [`read`](Self::read) returns the values of omitted
    /// parameters. `read` gets a module path and returns all values of this parameter. They are
    /// verified whenever they are read.
    pub fn set_base(
        &mut self,
        read: impl FnMut(&str) -> Result<Vec<f32>, Box<dyn Error + Send + Sync>> + Send + 'static,
    ) {
        self.base = Some(Mutex::new(BaseReader::new(Box::new(read))));
    }

    /// Returns the parameters that the checkpoint omits, with the hashes of their values.
    pub fn omitted(&self) -> impl Iterator<Item = (&ParamEntry, &BaseValues)> {
        let entries = self.layout().entries().iter();
        entries.filter_map(|entry| Some((entry, entry.base.as_ref()?)))
    }

    /// Reads all omitted parameters from the base model and verifies them.
    ///
    /// # Errors
    /// Returns [`CheckpointError::OtherBase`] for the first parameter that the base model does not
    /// have, or has with other values.
    pub fn verify_base(&self) -> Result<(), CheckpointError> {
        self.omitted()
            .try_for_each(|(entry, base)| self.base_of(entry)?.read(entry, base).map(drop))
    }

    /// Returns the base model, which has the parameter `entry`.
    ///
    /// # Errors
    /// Returns [`CheckpointError::OtherBase`] if it is not set.
    pub(crate) fn base_of(
        &self,
        entry: &ParamEntry,
    ) -> Result<MutexGuard<'_, BaseReader>, CheckpointError> {
        match &self.base {
            Some(base) => Ok(base.lock().unwrap_or_else(PoisonError::into_inner)),
            None => {
                let reason = "set it with Checkpoint::set_base".to_owned();
                Err(CheckpointError::OtherBase { path: entry.path.clone(), reason })
            }
        }
    }

    /// Returns the checkpoint's folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the tag under which the checkpoint was saved.
    pub fn tag(&self) -> &Tag {
        &self.manifest.tag
    }

    /// Returns the state on which all ranks agree.
    pub fn run(&self) -> &Run {
        &self.manifest.run
    }

    /// Returns the layout: the parameters and the number of ranks that wrote them.
    pub fn layout(&self) -> &Layout {
        &self.manifest.layout
    }

    /// Returns the map in which parameters and buffers are stored as they were trained, under their
    /// module paths. Aliases are tied to their parameters.
    ///
    /// # Errors
    /// Returns [`CheckpointError::Layout`] if a shape overflows.
    pub fn weight_map(&self) -> Result<WeightMap, CheckpointError> {
        let mut weights = vec![];
        for entry in self.layout().entries() {
            for path in [&entry.path].into_iter().chain(&entry.aliases) {
                let composition = Composition::join(0, vec![Component::whole(path, &entry.shape)]);
                let weight = Weight::new(path, composition.map_err(CheckpointError::map)?);
                weights.push(match *path == entry.path {
                    true => weight,
                    false => weight.with_origin(Origin::Tied { to: entry.path.clone() }),
                });
            }
        }
        WeightMap::new(weights).map_err(CheckpointError::map)
    }

    /// Returns the state of one rank; `None` if no such rank wrote the checkpoint.
    pub fn rank_state(&self, rank: usize) -> Option<&Value> {
        Some(&self.manifest.ranks.get(rank)?.state)
    }

    /// Reads elements `range` of the flat parameter at `path` (or at an alias of it), in the stored
    /// type.
    ///
    /// # Errors
    /// Returns [`CheckpointError::NotInside`] for a parameter, array or range that the checkpoint
    /// does not have; [`CheckpointError::OtherBase`] for an omitted parameter that the base model
    /// does not have; [`CheckpointError::Damaged`] or [`CheckpointError::Mixed`] for a file that
    /// differs from the manifest; or an I/O error.
    pub fn read(
        &self,
        path: &str,
        kind: &StateKind,
        range: Range<usize>,
    ) -> Result<Values, CheckpointError> {
        if let Some(index) = self.layout().find(path).filter(|_| *kind == StateKind::Weights)
            && let Some(base) = &self.layout().entries()[index].base
        {
            return self.read_base(index, base, range);
        }
        let place = self.find(path, kind, &range)?;
        // Files are verified before memory is allocated for their values. The verification checks
        // that each file is as large as the manifest says, so a forged size cannot allocate more
        // memory than there is on disk.
        self.verify_owners(place.0, &range)?;
        let mut values = Values::zeros(self.element(place), range.len());
        self.fill(place, range.start, values.bytes_mut())?;
        if !values.is_sound() {
            let reason = format!("{path} has bools other than 0 and 1");
            return Err(CheckpointError::damaged(&self.path, reason));
        }
        Ok(values)
    }

    /// Reads elements `range` of an omitted parameter from the base model.
    ///
    /// # Errors
    /// Returns the errors of [`read`](Self::read).
    fn read_base(
        &self,
        index: usize,
        base: &BaseValues,
        range: Range<usize>,
    ) -> Result<Values, CheckpointError> {
        self.check_range(index, &range)?;
        let entry = &self.layout().entries()[index];
        let mut reader = self.base_of(entry)?;
        let (bytes, size) = (reader.values(entry, base)?, base.element.size());
        let mut values = Values::zeros(base.element, range.len());
        // The range was checked against the shape, and the reader against the number of values.
        values.bytes_mut().copy_from_slice(&bytes[range.start * size..range.end * size]);
        Ok(values)
    }

    /// Fills `values` with the elements of an array from `start` on, which must be stored in type
    /// `T`.
    ///
    /// # Errors
    /// Returns the errors of [`Self::read`], and an error if the array has another type.
    pub fn read_into<T: StoredElement>(
        &self,
        path: &str,
        kind: &StateKind,
        start: usize,
        values: &mut [T],
    ) -> Result<(), CheckpointError> {
        let end = start.saturating_add(values.len());
        let place = self.find(path, kind, &(start..end))?;
        if self.element(place) != T::TYPE {
            return Err(self.not_inside(format!(
                "{path}:{kind} is stored as {} and was to be read as {}",
                self.element(place),
                T::TYPE
            )));
        }
        self.fill(place, start, bytemuck::cast_slice_mut(values))
    }

    /// Returns the index of the entry at `path` and the index of its array of this kind, after
    /// checking the range.
    fn find(
        &self,
        path: &str,
        kind: &StateKind,
        range: &Range<usize>,
    ) -> Result<(usize, usize), CheckpointError> {
        let layout = self.layout();
        let Some(entry) = layout.find(path) else {
            return Err(self.not_inside(format!("it has no parameter {path}")));
        };
        let ParamEntry { states, .. } = &layout.entries()[entry];
        let Some(state) = states.iter().position(|stored| stored.kind == *kind) else {
            let found: Vec<_> = states.iter().map(|stored| stored.kind.as_str()).collect();
            let found = found.join(", ");
            return Err(self.not_inside(format!("parameter {path} has no {kind}, only {found}")));
        };
        self.check_range(entry, range)?;
        Ok((entry, state))
    }

    /// Checks that the parameter with this index has the elements `range`.
    fn check_range(&self, index: usize, range: &Range<usize>) -> Result<(), CheckpointError> {
        let ParamEntry { path, shape, .. } = &self.layout().entries()[index];
        match range.start > range.end || range.end > self.layout().numel(index) {
            true => Err(self.not_inside(format!(
                "parameter {path} of shape {shape:?} has no elements {range:?}"
            ))),
            false => Ok(()),
        }
    }

    /// Returns the element type of an array, by the indices of entry and array.
    fn element(&self, (entry, state): (usize, usize)) -> ElementType {
        self.layout().entries()[entry].states[state].element
    }

    /// Verifies the files that contain elements of this range.
    fn verify_owners(&self, entry: usize, range: &Range<usize>) -> Result<(), CheckpointError> {
        self.layout().owners(entry, range).try_for_each(|rank| self.file(rank).map(drop))
    }

    /// Fills `bytes` with the elements of an array from `start` on.
    fn fill(
        &self,
        place: (usize, usize),
        start: usize,
        bytes: &mut [u8],
    ) -> Result<(), CheckpointError> {
        let size = self.element(place).size();
        let range = start..start + bytes.len() / size;
        self.verify_owners(place.0, &range)?;
        // Chunks of consecutive ranks are consecutive in the parameter, so the buffer is filled
        // from front to back.
        let mut rest = bytes;
        for rank in self.layout().owners(place.0, &range) {
            let owned = self.layout().owned(place.0, rank);
            let part = range.start.max(owned.start)..range.end.min(owned.end);
            let (bytes, after) = rest.split_at_mut(part.len() * size);
            let offset = (part.start - owned.start) as u64 * size as u64;
            self.file(rank)?.read(place, offset, bytes)?;
            rest = after;
        }
        Ok(())
    }

    /// Returns the file of `rank` and verifies it on first use. Other threads that need the file
    /// wait.
    fn file(&self, rank: usize) -> Result<Arc<RankFile>, CheckpointError> {
        // A panic cannot leave the value in an intermediate state, so a poisoned lock is usable.
        let mut file = self.files[rank].lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(file) = &*file {
            return Ok(file.clone());
        }
        let verified = Arc::new(RankFile::open(&self.path, &self.manifest, rank)?);
        Ok(file.insert(verified).clone())
    }

    /// Returns the error for data that the checkpoint does not have.
    fn not_inside(&self, reason: String) -> CheckpointError {
        CheckpointError::NotInside { path: self.path.clone(), reason }
    }
}

/// Returns the step of the checkpoint `tag`: of its manifest, or of its name if that is unreadable.
fn step_of(checkpoints: &[store::ListedCheckpoint], tag: &Tag) -> Option<u64> {
    let listed = checkpoints.iter().find(|listed| listed.tag == *tag);
    listed.map(|listed| listed.manifest.run.step).or_else(|| tag.step())
}

/// Returns the error for a folder without a manifest.
fn without_manifest(folder: &Path) -> CheckpointError {
    if let Some(error) = foreign::explain(folder) {
        return error;
    }
    let names = disk::names(folder).unwrap_or_default();
    if names.iter().any(|name| name.starts_with("rank-")) {
        return CheckpointError::damaged(&folder.join(MANIFEST), "it is missing");
    }
    CheckpointError::missing(folder, available(folder))
}

/// Describes the checkpoints that are in a folder, for an error message.
fn available(root: &Path) -> String {
    let checkpoints = store::checkpoints(root).unwrap_or_default();
    let tags: Vec<_> = checkpoints.iter().map(|it| it.tag.as_str()).collect();
    match &tags[..] {
        [] => "give the output folder of a run that saved one (training.save_steps)".to_owned(),
        tags => format!("choose one of {}", tags.join(", ")),
    }
}
