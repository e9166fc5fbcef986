//! Resolves the models, tokenizers and data sets of a job to files: local paths, or repositories on
//! the Hugging Face Hub.
//!
//! Main type: [`Places`]. Repositories are downloaded to the Hub's cache when they are first
//! needed.
//!
//! A local path takes precedence over a repository of the same name ([`Place`]). Offline, only the
//! cache is read, and an error names a missing file.

use std::cell::OnceCell;
use std::path::{Path, PathBuf};

use deepburn_config::{Job, Place, counted};
use deepburn_datasets::{DataError, Hub, Location, RepoKind, unread_texts};

use crate::failure::Failure;
use crate::job::model_folder::{check_pretrained, model_in};

/// Resolves paths and repository names to local files.
#[derive(Debug, Default)]
pub(crate) struct Places {
    /// The client of the Hub. It is created when it is first needed, so that most jobs on local
    /// files need neither the Hub's environment variables nor a home folder.
    hub: OnceCell<Hub>,
}

/// The default training split of a data set.
pub(crate) const TRAIN: &str = "train";

impl Places {
    /// Returns the folder of `model.pretrained`, if the job has one.
    ///
    /// # Errors
    /// Returns a user's mistake if the folder has no model, or if the model cannot be downloaded
    /// from the Hub.
    pub(crate) fn pretrained(&self, job: &Job) -> Result<Option<PathBuf>, Failure> {
        let Some(place) = &job.model.pretrained else { return Ok(None) };
        let folder = self.model(place).map_err(Failure::mistake)?;
        check_pretrained(&folder)?;
        Ok(Some(folder))
    }

    /// Returns the folder of a model.
    ///
    /// # Errors
    /// Returns an error if the model cannot be downloaded from the Hub.
    pub(crate) fn model(&self, place: &Place) -> Result<PathBuf, DataError> {
        match place {
            // The path may be the output folder of a run, which has the model in a subfolder.
            Place::Local(path) => Ok(model_in(path)),
            Place::Hub(text) => self
                .hub()
                .and_then(|hub| Location::parse(text, RepoKind::Model)?.model(hub))
                .map_err(of_key("model.pretrained")),
        }
    }

    /// Returns the folder of a tokenizer, or its only file.
    ///
    /// # Errors
    /// Returns an error if the tokenizer cannot be downloaded from the Hub.
    pub(crate) fn tokenizer(&self, place: &Place) -> Result<PathBuf, DataError> {
        match place {
            Place::Local(path) => Ok(path.clone()),
            Place::Hub(text) => self
                .hub()
                .and_then(|hub| Location::parse(text, RepoKind::Model)?.tokenizer(hub))
                .map_err(of_key("data.tokenizer")),
        }
    }

    /// Returns the files of a split of a data set. `name` is the configuration of the data set.
    ///
    /// # Errors
    /// Returns an error if the files cannot be downloaded from the Hub, or if there is no such
    /// split.
    pub(crate) fn split(
        &self,
        place: &Place,
        name: Option<&str>,
        split: &str,
    ) -> Result<Vec<PathBuf>, DataError> {
        match place {
            Place::Local(path) => Location::Folder(path.clone()).split(self.hub()?, name, split),
            Place::Hub(text) => self
                .hub()
                .and_then(|hub| Location::parse(text, RepoKind::Dataset)?.split(hub, name, split))
                .map_err(of_key("data.path")),
        }
    }

    /// Returns the files of data that the job divides into splits by fractions: the training split
    /// of a data set, or a local file or folder without splits.
    ///
    /// # Errors
    /// Returns the errors of [`Places::split`].
    pub(crate) fn whole(
        &self,
        place: &Place,
        name: Option<&str>,
    ) -> Result<Vec<PathBuf>, DataError> {
        match (place, name) {
            (Place::Local(path), None) if path.is_dir() => {
                // A folder without splits is read as a folder of files.
                if !Location::Folder(path.clone()).has_split(TRAIN)? {
                    return Ok(vec![path.clone()]);
                }
                let files = self.split(place, None, TRAIN)?;
                note_split(path, &unread_texts(path, &files)?);
                Ok(files)
            }
            (Place::Local(path), None) => Ok(vec![path.clone()]),
            // Repositories, and configurations of a data set, always have splits.
            _ => self.split(place, name, TRAIN),
        }
    }

    /// Returns the client of the Hub.
    ///
    /// # Errors
    /// Returns an error if no environment variable names the Hub's cache and there is no home
    /// folder.
    fn hub(&self) -> Result<&Hub, DataError> {
        if let Some(hub) = self.hub.get() {
            return Ok(hub);
        }
        // `get_or_init` alone could not return this error.
        let hub = Hub::from_env()?;
        Ok(self.hub.get_or_init(|| hub))
    }
}

/// Logs that only the training split of a folder is used, with the texts that are not `read`.
fn note_split(folder: &Path, unread: &[PathBuf]) {
    let folder = folder.display();
    match unread {
        [] => tracing::info!("{folder}: using its split `{TRAIN}`"),
        [first, ..] => tracing::warn!(
            "{folder}: using its split `{TRAIN}`; not read: {}, such as {}; data.splits selects other files",
            counted(unread.len(), "other text file"),
            first.display()
        ),
    }
}

/// Returns a function that adds the key that names a repository to an error.
fn of_key(key: &'static str) -> impl FnOnce(DataError) -> DataError {
    move |error| DataError::Repository { key, error: Box::new(error) }
}
