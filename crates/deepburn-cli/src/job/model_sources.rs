//! Finds a language model and the folders of its files.
//!
//! Main type: [`ModelSources`]. Tools accept the folder of a model, of an adapter, or the output
//! folder of a run, and some a GGUF file.

use std::path::{Path, PathBuf};

use deepburn_models::decoder::AnyDecoder;
use deepburn_models::hf::GENERATION_CONFIG;

use crate::failure::Failure;
use crate::job::adapted_model::AdaptedModel;
use crate::job::gguf_file::{has_gguf_ending, is_gguf, not_a_folder};
use crate::job::gguf_folder::UnpackedGguf;
use crate::job::known_model::KnownModel;
use crate::job::model_folder::ModelFolder;
use crate::job::saved_model::read_model_as;

/// A language model, and the folders of its files.
pub(crate) struct ModelSources {
    /// The configuration, with the adapter if there is one.
    pub(crate) model: AnyDecoder,
    /// The files of the weights.
    pub(crate) weights: WeightFiles,
    /// The folder of the tokenizer.
    pub(crate) tokenizer: PathBuf,
    /// The folder of `generation_config.json`. An adapter has its own, with the end of text that it
    /// was trained with.
    pub(crate) texts: PathBuf,
}

/// The files of a model's weights.
pub(crate) enum WeightFiles {
    /// A folder. With an adapter, this is the base model.
    Folder(PathBuf),
    /// A GGUF file.
    Gguf(Box<UnpackedGguf>),
}

impl ModelSources {
    /// Returns the folder of the weights. `option` is the argument that errors name.
    ///
    /// # Errors
    /// Returns a user's mistake if the model is a GGUF file.
    pub(crate) fn folder(&self, option: &str) -> Result<&Path, Failure> {
        match &self.weights {
            WeightFiles::Folder(folder) => Ok(folder),
            WeightFiles::Gguf(file) => Err(not_a_folder(option, &file.path)),
        }
    }

    /// Removes the texts of a GGUF file, which have been read.
    pub(crate) fn forget_texts(&mut self) {
        if let WeightFiles::Gguf(file) = &mut self.weights {
            file.remove_folder();
        }
    }

    /// Reads the texts of a GGUF file.
    fn of_file(option: &str, path: &Path) -> Result<Self, Failure> {
        let file = UnpackedGguf::open(path)?;
        let folder = file.texts.clone();
        match read_model_as(option, &folder)? {
            KnownModel::LanguageModel(model) => Ok(Self {
                model,
                tokenizer: folder.clone(),
                texts: folder,
                weights: WeightFiles::Gguf(Box::new(file)),
            }),
            KnownModel::Classifier(_) => Err(Failure::mistake(format!(
                "{option}: {} is a classifier; give a language model",
                path.display()
            ))),
        }
    }

    /// Finds the model in `given`: the folder of a model, of an adapter or of a run, or a GGUF
    /// file. `option` is the argument that errors name, and `base` the value of `--base`.
    ///
    /// # Errors
    /// Returns a user's mistake if there is no language model.
    pub(crate) fn find(option: &str, given: &Path, base: Option<&Path>) -> Result<Self, Failure> {
        if base.is_none() && is_gguf(given) {
            return Self::of_file(option, given);
        }
        if has_gguf_ending(given) && !given.exists() {
            let given = given.display();
            return Err(Failure::mistake(format!("{option}: {given} does not exist")));
        }
        if let Some(AdaptedModel { decoder, base, folder }) = AdaptedModel::find(given, base)? {
            let of = |name: &str| if folder.join(name).is_file() { &folder } else { &base };
            let (tokenizer, texts) = (of("tokenizer.json").clone(), of(GENERATION_CONFIG).clone());
            let weights = WeightFiles::Folder(base);
            return Ok(Self { model: decoder, weights, tokenizer, texts });
        }
        if base.is_some() {
            return Err(Failure::mistake(format!(
                "--base: has no effect: {} has no adapter; remove it",
                given.display()
            )));
        }
        let folder = ModelFolder::find(given, option)?.path;
        match read_model_as(option, &folder)? {
            KnownModel::LanguageModel(model) => {
                let [tokenizer, texts] = [&folder, &folder].map(PathBuf::clone);
                let weights = WeightFiles::Folder(folder);
                Ok(Self { model, tokenizer, texts, weights })
            }
            KnownModel::Classifier(_) => Err(Failure::mistake(format!(
                "{option}: {} is a classifier; classify texts with `deepburn predict`, or give a language model",
                folder.display()
            ))),
        }
    }
}
