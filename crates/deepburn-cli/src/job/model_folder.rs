//! Finds the folder of a saved model.
//!
//! Main type: [`ModelFolder`]. Tools accept the folder of a model, or the output folder of a run, which has the model
//! in its folder `model`. The `job.json` of the run has the sequence length and the columns of the texts.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::failure::Failure;

/// The folder of the model in the output folder of a run.
const MODEL: &str = "model";

/// A folder with a `config.json`, and the `job.json` of its run, if it is in the parent folder.
#[derive(Debug)]
pub(crate) struct ModelFolder {
    /// The folder with `config.json` and the weights.
    pub(crate) path: PathBuf,
    /// Content of `job.json`.
    job: Option<Value>,
}

impl ModelFolder {
    /// Finds the model in `given`, the folder of a model or of a run. `option` is the command-line option that errors
    /// name.
    ///
    /// # Errors
    /// Returns a user's mistake if there is no model in the folder.
    pub(crate) fn find(given: &Path, option: &str) -> Result<Self, Failure> {
        let path = model_in(given);
        if !path.join("config.json").is_file() {
            let remedy = if given.join("checkpoints").is_dir() {
                "the run has only saved checkpoints; export one with `deepburn consolidate`"
            } else if given.join("adapter_config.json").exists() {
                "it has a LoRA adapter; merge it into its base model with PEFT's merge_and_unload() and save the model"
            } else {
                "give the folder of a completed run, or of a model"
            };
            return Err(Failure::mistake(format!(
                "{option}: {} has neither config.json nor {MODEL}/config.json; {remedy}",
                given.display()
            )));
        }
        Ok(Self { job: read_job(&path), path })
    }

    /// Returns the sequence length of the run.
    ///
    /// Returns `None` without a `job.json`. Callers then use the maximum length of the model.
    pub(crate) fn sequence_length(&self) -> Option<usize> {
        let length = self.job.as_ref()?["data"]["sequence_length"].as_u64()?;
        usize::try_from(length).ok().filter(|length| *length > 0)
    }

    /// Returns the column of the run's texts or labels. `name` is `text_field` or `label_field`.
    pub(crate) fn column(&self, name: &str) -> Option<&str> {
        self.job.as_ref()?["data"]["kind"]["classification"][name].as_str()
    }
}

/// Returns the model folder of the run `given`, or `given` itself.
pub(crate) fn model_in(given: &Path) -> PathBuf {
    let inner = given.join(MODEL);
    let is_run = !given.join("config.json").exists() && inner.join("config.json").is_file();
    if is_run { inner } else { given.to_owned() }
}

/// Reads `job.json` in the parent folder of a run's model. It is missing if the model was copied, or if another program
/// saved it.
fn read_job(model: &Path) -> Option<Value> {
    let model = fs::canonicalize(model).ok().filter(|path| path.ends_with(MODEL))?;
    let text = fs::read_to_string(model.parent()?.join("job.json")).ok()?;
    serde_json::from_str(&text).ok()
}
