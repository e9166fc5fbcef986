//! Finds an adapter and its base model.
//!
//! Main type: [`AdaptedModel`]. Tools accept the folder of an adapter, or the output folder of a
//! run, which has the adapter in its folder `adapter`. The base model is the one that
//! `adapter_config.json` names, unless another folder is given.

use std::path::{Path, PathBuf};

use deepburn_config::Place;
use deepburn_models::decoder::AnyDecoder;
use deepburn_models::hf::{ADAPTER_CONFIG, AdapterFolder};
use deepburn_models::lora::LoraConfig;

use crate::data::places::Places;
use crate::failure::Failure;
use crate::job::adapter_base::{check_base, named_folder, warn_of_unused};
use crate::job::known_model::KnownModel;
use crate::job::model_folder::{ModelFolder, adapter_in};
use crate::job::saved_model::read_model_as;

/// A trained adapter and the folder of its base model.
#[derive(Debug)]
pub(crate) struct AdaptedModel {
    /// The configuration of the model with its adapter.
    pub(crate) decoder: AnyDecoder,
    /// The folder of the base model.
    pub(crate) base: PathBuf,
    /// The folder of the adapter.
    pub(crate) folder: PathBuf,
}

impl AdaptedModel {
    /// Finds the adapter in `given`; `None` if it has none, or a whole model. `base` is the value
    /// of `--base`.
    ///
    /// # Errors
    /// Returns a user's mistake if the adapter or its base model cannot be used.
    pub(crate) fn find(given: &Path, base: Option<&Path>) -> Result<Option<Self>, Failure> {
        let Some(folder) = adapter_in(given) else { return Ok(None) };
        let adapter = AdapterFolder::open(&folder).map_err(Failure::mistake)?;
        let (option, base) = match base {
            Some(base) => ("--base".to_owned(), ModelFolder::find(base, "--base")?.path),
            None => {
                let file = folder.join(ADAPTER_CONFIG).display().to_string();
                (format!("{file}: base_model_name_or_path"), base_of(&file, adapter.config())?)
            }
        };
        let KnownModel::LanguageModel(decoder) = read_model_as(&option, &base)? else {
            return Err(Failure::mistake(format!(
                "{}: its base model {} is a classifier; adapters are supported for language models only",
                folder.display(),
                base.display()
            )));
        };
        check_base(&option, &adapter, &decoder, (None, &base))?;
        let decoder = decoder.with_trained_adapter(adapter).map_err(Failure::mistake)?;
        warn_of_unused(&folder.display().to_string(), &decoder)?;
        Ok(Some(Self { decoder, base, folder }))
    }
}

/// Returns the folder of the base model that an adapter names. `file` is the path of its
/// configuration.
///
/// # Errors
/// Returns a user's mistake if the adapter names none, or one that does not exist.
fn base_of(file: &str, config: &LoraConfig) -> Result<PathBuf, Failure> {
    let remedy = "give its folder with --base";
    let Some(name) = config.base_model.as_deref().filter(|name| !name.is_empty()) else {
        return Err(Failure::mistake(format!(
            "{file}: base_model_name_or_path is empty, so the base model is not known; {remedy}"
        )));
    };
    let adapter = Path::new(file).parent().unwrap_or(Path::new(""));
    match named_folder(adapter, name) {
        Some(path) => Ok(path),
        // A repository is OWNER/NAME. Any other name was a path where the adapter was trained.
        None if Path::new(name).is_absolute() || name.matches('/').count() != 1 => {
            Err(Failure::mistake(format!(
                "{file}: base_model_name_or_path is {name:?}, which does not exist; {remedy}"
            )))
        }
        None => {
            // PEFT stores the revision beside the name.
            let revision = config.revision.as_ref().map(|revision| format!("@{revision}"));
            let place = Place::Hub(format!("{name}{}", revision.unwrap_or_default()));
            Places::default().model(&place).map_err(|error| {
                Failure::mistake(format!(
                    "{file}: base_model_name_or_path is {name:?}: {error}; {remedy}"
                ))
            })
        }
    }
}
