//! Locations of data and models: a folder, a file, or a repository on the Hub.
//!
//! [`Location::parse`] parses user input. An existing path takes precedence over an id of the same
//! name. Any other text is an error that lists the possible forms.

use std::path::{Path, PathBuf};

use crate::formats::folder;
use crate::hub::file_selection::FileSelection;
use crate::hub::split_selection::has_split;
use crate::{DataError, Hub, HubRepo, RepoKind, Result};

/// The location of files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Location {
    /// A local folder.
    Folder(PathBuf),
    /// A local file.
    File(PathBuf),
    /// A repository on the Hub.
    Hub(HubRepo),
}

impl Location {
    /// Parses `text`: an existing folder, an existing file, or else a repository of `kind` with the
    /// id `owner/name`, at the revision after an `@` ([`HubRepo::MAIN`] without one).
    ///
    /// # Errors
    /// Returns [`DataError::InvalidFile`] if `text` is neither an existing path nor a repository
    /// id.
    pub fn parse(text: &str, kind: RepoKind) -> Result<Self> {
        let path = Path::new(text);
        if path.is_dir() {
            return Ok(Self::Folder(path.to_owned()));
        }
        if path.exists() {
            return Ok(Self::File(path.to_owned()));
        }
        let (id, revision) = text.split_once('@').unwrap_or((text, HubRepo::MAIN));
        if !HubRepo::is_id(id) || !HubRepo::is_revision(revision) {
            let reason = "is not an existing folder, an existing file or a Hub id of the form `owner/name` or `owner/name@revision`; correct the path or the id";
            return Err(DataError::invalid(path, reason));
        }
        Ok(Self::Hub(HubRepo { kind, id: id.to_owned(), revision: revision.to_owned() }))
    }

    /// Returns the files of one split of a data set, from a folder with the Hub's layout or from a
    /// repository. `name` is the configuration, if there are several.
    ///
    /// # Errors
    /// Returns [`DataError::InvalidFile`] for a single file, [`DataError::NotFound`] if the split
    /// of a folder is missing, ambiguous or incomplete, and the errors of [`Hub::split`].
    pub fn split(&self, hub: &Hub, name: Option<&str>, split: &str) -> Result<Vec<PathBuf>> {
        match self {
            Self::Folder(path) => {
                // With broken links, which are an error if they belong to the split.
                let listing = folder::full_listing(path)?;
                let place = path.display().to_string();
                let selected = FileSelection::Split { name, split }.select_in(&place, &listing)?;
                Ok(selected.into_iter().map(|name| path.join(name)).collect())
            }
            Self::File(path) => Err(DataError::invalid(
                path,
                format!(
                    "is a single file and has no split `{split}`; give fractions of it in data.splits, or the folder or Hub id of a data set"
                ),
            )),
            Self::Hub(repo) => hub.split(repo, name, split),
        }
    }

    /// Returns whether a local folder has a text file of the split. A file and a repository do not.
    ///
    /// # Errors
    /// Returns [`DataError::Unreadable`] if the folder cannot be read.
    pub fn has_split(&self, split: &str) -> Result<bool> {
        match self {
            Self::Folder(path) => Ok(has_split(&folder::full_listing(path)?, split)),
            Self::File(_) | Self::Hub(_) => Ok(false),
        }
    }

    /// Returns the folder of a model's configuration and weights. A local path is not checked.
    ///
    /// # Errors
    /// Returns the errors of [`Hub::model`].
    pub fn model(&self, hub: &Hub) -> Result<PathBuf> {
        match self {
            Self::Folder(path) | Self::File(path) => Ok(path.clone()),
            Self::Hub(repo) => hub.model(repo),
        }
    }

    /// Returns the folder of a tokenizer's files, or its single file.
    ///
    /// # Errors
    /// Returns the errors of [`Hub::tokenizer`].
    pub fn tokenizer(&self, hub: &Hub) -> Result<PathBuf> {
        match self {
            Self::Folder(path) | Self::File(path) => Ok(path.clone()),
            Self::Hub(repo) => hub.tokenizer(repo),
        }
    }
}
