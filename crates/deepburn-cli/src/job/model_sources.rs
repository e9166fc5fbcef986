//! Finds a language model and the folders of its files.
//!
//! Main type: [`ModelSources`]. Tools accept the folder of a model, of an adapter, or the output folder of a run.

use std::path::{Path, PathBuf};

use deepburn_models::decoder::AnyDecoder;
use deepburn_models::hf::GENERATION_CONFIG;

use crate::failure::Failure;
use crate::job::adapted_model::AdaptedModel;
use crate::job::known_model::KnownModel;
use crate::job::model_folder::ModelFolder;

/// A language model, and the folders of its files.
pub(crate) struct ModelSources {
    /// The configuration, with the adapter if there is one.
    pub(crate) model: AnyDecoder,
    /// The folder of the weights. With an adapter, this is the base model.
    pub(crate) base: PathBuf,
    /// The folder of the tokenizer.
    pub(crate) tokenizer: PathBuf,
    /// The folder of `generation_config.json`. An adapter has its own, with the end of text that it was trained with.
    pub(crate) texts: PathBuf,
}

impl ModelSources {
    /// Finds the model in `given`, the folder of a model, of an adapter or of a run. `option` is the argument that errors
    /// name, and `base` the value of `--base`.
    ///
    /// # Errors
    /// Returns a user's mistake if there is no language model.
    pub(crate) fn find(option: &str, given: &Path, base: Option<&Path>) -> Result<Self, Failure> {
        if let Some(AdaptedModel { decoder, base, folder }) = AdaptedModel::find(given, base)? {
            let of = |name: &str| if folder.join(name).is_file() { &folder } else { &base };
            let (tokenizer, texts) = (of("tokenizer.json").clone(), of(GENERATION_CONFIG).clone());
            return Ok(Self { model: decoder, base, tokenizer, texts });
        }
        if base.is_some() {
            return Err(Failure::mistake(format!(
                "--base: has no effect: {} has no adapter; remove it",
                given.display()
            )));
        }
        let folder = ModelFolder::find(given, option)?.path;
        match KnownModel::read_as(option, &folder)? {
            KnownModel::LanguageModel(model) => {
                let [tokenizer, texts] = [&folder, &folder].map(PathBuf::clone);
                Ok(Self { model, tokenizer, texts, base: folder })
            }
            KnownModel::Classifier(_) => Err(Failure::mistake(format!(
                "{option}: {} is a classifier; classify texts with `deepburn predict`, or give a language model",
                folder.display()
            ))),
        }
    }
}
