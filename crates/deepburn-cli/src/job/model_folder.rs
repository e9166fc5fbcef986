//! The folder of a saved model, given as such or as the folder of the run that saved it.
//!
//! Main type: [`ModelFolder`].

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::failure::Failure;

/// Where a run leaves its model.
const MODEL: &str = "model";

/// A folder with a `config.json`, and the record of the run that it belongs to, where it lies beside.
#[derive(Debug)]
pub(crate) struct ModelFolder {
    pub(crate) path: PathBuf,
    job: Option<Value>,
}

impl ModelFolder {
    /// Finds the model in `given`: a model's folder or a run's. `option` names it in errors.
    ///
    /// # Errors
    /// A user's mistake: there is no model.
    pub(crate) fn find(given: &Path, option: &str) -> Result<Self, Failure> {
        let path = model_in(given);
        if !path.join("config.json").is_file() {
            let remedy = match given.join("checkpoints").is_dir() {
                true => {
                    "the run has saved checkpoints alone; `deepburn consolidate` makes a model of one"
                }
                false => "give the folder of a run that has ended, or of a model",
            };
            return Err(Failure::mistake(format!(
                "{option}: {} has neither config.json nor {MODEL}/config.json; {remedy}",
                given.display()
            )));
        }
        Ok(Self { job: read_job(&path), path })
    }

    /// Tokens to which the run cut its samples.
    pub(crate) fn sequence_length(&self) -> Option<usize> {
        let length = self.job.as_ref()?["data"]["sequence_length"].as_u64()?;
        usize::try_from(length).ok().filter(|length| *length > 0)
    }

    /// The column that the run took its texts or labels from: `name` is `text_field` or `label_field`.
    pub(crate) fn column(&self, name: &str) -> Option<&str> {
        self.job.as_ref()?["data"]["kind"]["classification"][name].as_str()
    }
}

/// The model of a run whose folder is `given`, else `given` itself.
pub(crate) fn model_in(given: &Path) -> PathBuf {
    let inner = given.join(MODEL);
    let is_run = !given.join("config.json").exists() && inner.join("config.json").is_file();
    if is_run { inner } else { given.to_owned() }
}

/// `job.json` beside the model of a run. Without one the model was copied, or is of another program.
fn read_job(model: &Path) -> Option<Value> {
    let model = fs::canonicalize(model).ok().filter(|path| path.ends_with(MODEL))?;
    let text = fs::read_to_string(model.parent()?.join("job.json")).ok()?;
    serde_json::from_str(&text).ok()
}
