//! From what a job names to files on this machine.
//!
//! Main type: [`Places`]. What is on the Hub is brought through its cache when it is first asked for.

use std::cell::OnceCell;
use std::path::PathBuf;

use deepburn_config::Place;
use deepburn_datasets::{DataError, Hub, Location, RepoKind};

use crate::job::model_folder::model_in;

/// Finds the files behind a job's places.
#[derive(Debug, Default)]
pub(crate) struct Places {
    /// Made when it is first needed: a job on local files asks nothing of the environment.
    hub: OnceCell<Hub>,
}

/// The split of a data set that trains where none is named.
pub(crate) const TRAIN: &str = "train";

impl Places {
    /// The folder of a checkpoint.
    ///
    /// # Errors
    /// What the Hub says.
    pub(crate) fn model(&self, place: &Place) -> Result<PathBuf, DataError> {
        match place {
            // A run's folder stands for the model in it.
            Place::Local(path) => Ok(model_in(path)),
            Place::Hub(text) => Location::parse(text, RepoKind::Model)?.model(self.hub()?),
        }
    }

    /// The folder of a tokenizer, or its one file.
    ///
    /// # Errors
    /// What the Hub says.
    pub(crate) fn tokenizer(&self, place: &Place) -> Result<PathBuf, DataError> {
        match place {
            Place::Local(path) => Ok(path.clone()),
            Place::Hub(text) => Location::parse(text, RepoKind::Model)?.tokenizer(self.hub()?),
        }
    }

    /// The files of one split of a data set, in its configuration `name`.
    ///
    /// # Errors
    /// What the Hub says, or a folder without such a split.
    pub(crate) fn split(
        &self,
        place: &Place,
        name: Option<&str>,
        split: &str,
    ) -> Result<Vec<PathBuf>, DataError> {
        let location = match place {
            Place::Local(path) => Location::Folder(path.clone()),
            Place::Hub(text) => Location::parse(text, RepoKind::Dataset)?,
        };
        location.split(self.hub()?, name, split)
    }

    /// All files of data that is cut by share: the split that trains of a data set, or the file or
    /// folder as it is where it has no such split.
    ///
    /// # Errors
    /// Those of [`Places::split`].
    pub(crate) fn whole(
        &self,
        place: &Place,
        name: Option<&str>,
    ) -> Result<Vec<PathBuf>, DataError> {
        match (place, name) {
            (Place::Local(path), None) if path.is_dir() => {
                let Ok(files) = self.split(place, None, TRAIN) else {
                    return Ok(vec![path.clone()]);
                };
                tracing::info!("{}: its split train is taken", path.display());
                Ok(files)
            }
            (Place::Local(path), None) => Ok(vec![path.clone()]),
            _ => self.split(place, name, TRAIN),
        }
    }

    fn hub(&self) -> Result<&Hub, DataError> {
        if let Some(hub) = self.hub.get() {
            return Ok(hub);
        }
        let hub = Hub::from_env()?;
        Ok(self.hub.get_or_init(|| hub))
    }
}
