//! Where data or a model lies: a folder, a file, or a repository on the Hub.
//!
//! [`Location::parse`] reads what a user has written. What exists on disk wins over an id of the
//! same name; what is neither is refused with all that it could have been.

use std::path::{Path, PathBuf};

use crate::formats::folder;
use crate::hub::selection::Wanted;
use crate::{DataError, Hub, HubRepo, RepoKind};

/// A place that has files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Location {
    /// A local folder.
    Folder(PathBuf),
    /// A local file.
    File(PathBuf),
    /// A repository on the Hub.
    Hub(HubRepo),
}

/// Endings of names that are files: `data/train.txt` has the form of an id, and is meant as a path.
const FILES: [&str; 8] = ["txt", "jsonl", "json", "csv", "parquet", "bin", "safetensors", "gz"];

impl Location {
    /// What `text` names: an existing folder, an existing file, or else a repository of `kind`
    /// with the id `owner/name`, at the revision after an `@` ([`HubRepo::MAIN`] without one).
    ///
    /// # Errors
    /// [`DataError::NoLocation`].
    pub fn parse(text: &str, kind: RepoKind) -> Result<Self, DataError> {
        let path = Path::new(text);
        if path.is_dir() {
            return Ok(Self::Folder(path.to_owned()));
        }
        if path.exists() {
            return Ok(Self::File(path.to_owned()));
        }
        let ending = path.extension().and_then(|ending| ending.to_str());
        let (id, revision) = text.split_once('@').unwrap_or((text, HubRepo::MAIN));
        let is_file = ending.is_some_and(|ending| FILES.contains(&ending));
        if !HubRepo::is_id(id) || !HubRepo::is_revision(revision) || is_file {
            return Err(DataError::NoLocation { text: text.to_owned() });
        }
        Ok(Self::Hub(HubRepo { kind, id: id.to_owned(), revision: revision.to_owned() }))
    }

    /// The files of a split of a data set, in the configuration `name` where there are several:
    /// of a folder that is laid out as on the Hub, or of a repository.
    ///
    /// # Errors
    /// [`DataError::SplitOfFile`], [`DataError::NotFound`], and those of [`Hub::split`].
    pub fn split(
        &self,
        hub: &Hub,
        name: Option<&str>,
        split: &str,
    ) -> Result<Vec<PathBuf>, DataError> {
        match self {
            Self::Folder(path) => local_split(path, name, split),
            Self::File(path) => {
                Err(DataError::SplitOfFile { path: path.clone(), split: split.to_owned() })
            }
            Self::Hub(repo) => hub.split(repo, name, split),
        }
    }

    /// The folder of a model's configuration and weights. Whether a local one is complete, its
    /// reader says.
    ///
    /// # Errors
    /// Those of [`Hub::model`].
    pub fn model(&self, hub: &Hub) -> Result<PathBuf, DataError> {
        match self {
            Self::Folder(path) | Self::File(path) => Ok(path.clone()),
            Self::Hub(repo) => hub.model(repo),
        }
    }

    /// The folder of a tokenizer's files, or the one file that it is.
    ///
    /// # Errors
    /// Those of [`Hub::tokenizer`].
    pub fn tokenizer(&self, hub: &Hub) -> Result<PathBuf, DataError> {
        match self {
            Self::Folder(path) | Self::File(path) => Ok(path.clone()),
            Self::Hub(repo) => hub.tokenizer(repo),
        }
    }
}

/// The files of a split in a folder.
fn local_split(folder: &Path, name: Option<&str>, split: &str) -> Result<Vec<PathBuf>, DataError> {
    let wanted = Wanted::Split { name, split };
    let listing = folder::listing(folder)?;
    let selected = wanted.select(&listing).map_err(|reason| DataError::NotFound {
        place: folder.display().to_string(),
        wanted: wanted.described(),
        reason,
    })?;
    Ok(selected.into_iter().map(|name| folder.join(name)).collect())
}
