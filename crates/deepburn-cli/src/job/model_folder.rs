//! Finds the folder of a saved model.
//!
//! Main type: [`ModelFolder`]. Tools accept the folder of a model, or the output folder of a run,
//! which has the model in its folder `model`.
//!
//! A saved model has a [`ModelRecord`] with the sequence length and the columns of the texts that
//! it was trained on. The `job.json` of the run may be newer than the model: a later run in the
//! same folder writes it at its start. So it is only read for models without a record, which older
//! versions saved.

use std::fs;
use std::path::{Path, PathBuf};

use deepburn_models::hf::ADAPTER_CONFIG;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::failure::Failure;
use crate::job::gguf_file::{is_gguf, not_a_folder};

/// The folder of the model in the output folder of a run.
pub(crate) const MODEL: &str = "model";

/// The folder of the adapter in the output folder of a run.
pub(crate) const ADAPTER: &str = "adapter";

/// The data that a model was trained on, which is stored in the folder of the model.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct ModelRecord {
    /// The maximum number of tokens of a text or a sequence.
    pub(crate) sequence_length: Option<usize>,
    /// The column of the texts of a classifier.
    pub(crate) text_field: Option<String>,
    /// The column of the labels of a classifier.
    pub(crate) label_field: Option<String>,
    /// A hash of the training data, as in checkpoints.
    pub(crate) training_data: Option<String>,
    /// A hash of samples of the base model's values, if the folder has an adapter.
    pub(crate) base_model_hash: Option<String>,
}

impl ModelRecord {
    /// The name of the file.
    pub(crate) const FILE: &str = "deepburn.json";

    /// Returns the record of a model of the run with this `job.json`, trained on data with the hash
    /// `training_data`.
    pub(crate) fn of_job(job: &Value, training_data: Option<&str>) -> Self {
        let columns = &job["data"]["kind"]["classification"];
        let column = |name: &str| columns[name].as_str().map(str::to_owned);
        let length = job["data"]["sequence_length"].as_u64();
        Self {
            sequence_length: length.and_then(|length| usize::try_from(length).ok()),
            text_field: column("text_field"),
            label_field: column("label_field"),
            training_data: training_data.map(str::to_owned),
            base_model_hash: None,
        }
    }

    /// Reads the record of the model in `folder`; `None` if it has none.
    pub(crate) fn read(folder: &Path) -> Option<Self> {
        serde_json::from_str(&fs::read_to_string(folder.join(Self::FILE)).ok()?).ok()
    }

    /// Returns the fields of the file.
    pub(crate) fn fields(&self) -> Map<String, Value> {
        match serde_json::to_value(self) {
            Ok(Value::Object(mut fields)) => {
                // Unknown values are left out, as in the files of versions that did not have them.
                fields.retain(|_, value| !value.is_null());
                fields
            }
            _ => unreachable!("a struct of texts and numbers is a JSON object"),
        }
    }
}

/// A folder with a `config.json`, and the record of its training, if it is known.
#[derive(Debug)]
pub(crate) struct ModelFolder {
    /// The folder with `config.json` and the weights.
    pub(crate) path: PathBuf,
    /// The record of the model.
    pub(crate) record: ModelRecord,
}

impl ModelFolder {
    /// Finds the model in `given`, the folder of a model or of a run. `option` is the command-line
    /// option that errors name.
    ///
    /// # Errors
    /// Returns a user's mistake if there is no model in the folder.
    pub(crate) fn find(given: &Path, option: &str) -> Result<Self, Failure> {
        if is_gguf(given) {
            return Err(not_a_folder(option, given));
        }
        let path = model_in(given);
        if !path.join("config.json").is_file() {
            let remedy = remedy_without_model(given);
            return Err(Failure::mistake(format!(
                "{option}: {} has neither config.json nor {MODEL}/config.json; {remedy}",
                given.display()
            )));
        }
        let of_run = || read_job(&path).map(|job| ModelRecord::of_job(&job, None));
        let record = ModelRecord::read(&path).or_else(of_run).unwrap_or_default();
        Ok(Self { record, path })
    }
}

/// Returns what to do with a folder that has no model.
pub(crate) fn remedy_without_model(given: &Path) -> &'static str {
    if trained_adapter_in(given).is_some() {
        "it has a LoRA adapter, which is not a model of its own; merge it into its base model with `deepburn merge`"
    } else if given.join("checkpoints").is_dir() {
        "the run has only saved checkpoints; export one with `deepburn consolidate`"
    } else {
        "give the folder of a completed run, or of a model"
    }
}

/// Returns what to do with a folder that has no adapter.
pub(crate) fn remedy_without_adapter(given: &Path) -> &'static str {
    if model_in(given).join("config.json").is_file() {
        "it has a whole model, which needs no adapter"
    } else if given.join("checkpoints").is_dir() {
        "the run has only saved checkpoints: `deepburn consolidate` exports the adapter of one"
    } else {
        "give the folder of an adapter, or of a run with model.lora"
    }
}

/// Refuses the output folder of a run as the place of an exported model. Tools would take that
/// model for the run's, even after the run has trained further.
///
/// # Errors
/// Returns a user's mistake.
pub(crate) fn refuse_run(out: &Path) -> Result<(), Failure> {
    let is_run = out.join("metrics.jsonl").exists() || out.join(ADAPTER).exists();
    match is_run {
        false => Ok(()),
        true => Err(Failure::mistake(format!(
            "{} is the output folder of a run, whose results the model would hide; give another folder",
            out.display()
        ))),
    }
}

/// Refuses a folder without a model as the value of `model.pretrained`. A path without a folder is
/// reported when its files are read.
///
/// # Errors
/// Returns a user's mistake with the remedy.
pub(crate) fn check_pretrained(folder: &Path) -> Result<(), Failure> {
    if folder.join("config.json").exists() || !folder.is_dir() {
        return Ok(());
    }
    let further = match trained_adapter_in(folder) {
        Some(adapter) => format!(
            ", or train it further: give it as model.adapter, and the base model that {} names as model.pretrained",
            adapter.join(ADAPTER_CONFIG).display()
        ),
        None => String::new(),
    };
    Err(Failure::mistake(format!(
        "model.pretrained: {} has neither config.json nor {MODEL}/config.json; {}{further}",
        folder.display(),
        remedy_without_model(folder)
    )))
}

/// Returns the model folder of the run `given`, or `given` itself.
pub(crate) fn model_in(given: &Path) -> PathBuf {
    // A model in the folder itself comes first: people may have copied it there.
    let inner = given.join(MODEL);
    let is_run = !given.join("config.json").exists() && inner.join("config.json").is_file();
    if is_run { inner } else { given.to_owned() }
}

/// Returns the folder of the adapter in `given`, which is that folder or a run's; `None` if it has
/// none.
pub(crate) fn trained_adapter_in(given: &Path) -> Option<PathBuf> {
    let mut places = [given.to_owned(), given.join(ADAPTER)].into_iter();
    places.find(|it| it.join(ADAPTER_CONFIG).is_file())
}

/// Returns the folder of the adapter in `given`; `None` if it has none, or a model that the same
/// run saved.
pub(crate) fn adapter_in(given: &Path) -> Option<PathBuf> {
    if given.join(ADAPTER_CONFIG).is_file() {
        return Some(given.to_owned());
    }
    let inner = given.join(ADAPTER);
    let has_adapter = inner.join(ADAPTER_CONFIG).is_file() && !given.join("config.json").exists();
    // A run with `save_merged` has both. Its model contains the adapter already.
    let is_merged = model_in(given) != given && saves_model(given);
    (has_adapter && !is_merged).then_some(inner)
}

/// Returns whether the last run in a folder saves a whole model. A model of an earlier run may
/// still be there.
fn saves_model(run: &Path) -> bool {
    let text = fs::read_to_string(run.join("job.json")).ok();
    let job: Option<Value> = text.and_then(|text| serde_json::from_str(&text).ok());
    // Without a readable job.json, the model in the folder counts.
    let Some(job) = job else { return true };
    let has_adapter = !job["model"]["lora"].is_null() || !job["model"]["adapter"].is_null();
    !has_adapter || job["training"]["save_merged"] == true
}

/// Reads `job.json` in the parent folder of a run's model. It is missing if the model was copied,
/// or if another program saved it.
fn read_job(model: &Path) -> Option<Value> {
    // The path may be a link, and only the real folder is beside the job.json of its run.
    let model = fs::canonicalize(model).ok().filter(|path| path.ends_with(MODEL))?;
    let text = fs::read_to_string(model.parent()?.join("job.json")).ok()?;
    serde_json::from_str(&text).ok()
}
