//! Reads and writes GPT-2 models in the layout of `transformers`.
//!
//! Main type: [`PretrainedGpt2`].

use std::path::Path;

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Tensor, backend::Backend};
use deepburn_safetensors::FloatType;
use deepburn_weights::Origin;

use super::config::Gpt2Config;
use super::model::Gpt2;
use super::parameters::{EMBEDDING, HEAD, SCORE, hf_name, weight_map};
use crate::Architecture;
use crate::hf::{
    CONFIG, ModelConfigError, ModelFolderError, ModelFolderWriter, TensorProblem, Weights,
    read_small_file, refuse_adapter,
};
use crate::weights::WeightInit;

/// A folder with a pretrained GPT-2. Its `config.json` has been read, and the headers of its weight files have been
/// checked.
#[derive(Debug)]
pub struct PretrainedGpt2 {
    /// The configuration of the folder.
    config: Gpt2Config,
    /// The weights in the folder. Only the file headers have been read.
    pub(super) weights: Weights,
}

impl PretrainedGpt2 {
    /// Reads the config and the file headers of a checkpoint, but not the weights. Fields of the config that may change
    /// what the model computes, and that GPT-2 does not read, are errors when the model is built.
    ///
    /// # Errors
    /// Returns [`ModelFolderError`] if a file is missing, unreadable or malformed, a tensor occurs twice, tensor names
    /// have an unknown prefix, or the folder has a LoRA adapter.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self, ModelFolderError> {
        let folder = folder.as_ref();
        refuse_adapter(folder)?;
        let path = folder.join(CONFIG);
        let text = read_small_file(&path).map_err(|e| ModelFolderError::io("read", &path, e))?;
        let config =
            Gpt2Config::read(&text).map_err(|source| ModelFolderError::Config { path, source })?;
        let weights = Weights::open(folder, weight_map(&config), &[SCORE])?;
        Ok(Self { config, weights })
    }

    /// Returns the configuration of the folder.
    #[must_use]
    pub fn config(&self) -> &Gpt2Config {
        &self.config
    }

    /// Returns a model with the given `config` and the checkpoint's weights, converted to f32. `config` is the
    /// checkpoint's config or derived from it. If its vocabulary is larger than the checkpoint's, the new rows of the
    /// embedding and of an untied head are the mean of the existing rows. In addition to the model, one tensor is in
    /// memory at a time.
    ///
    /// # Errors
    /// Returns [`ModelFolderError::Tensors`] naming every tensor that does not fit,
    /// [`ModelFolderError::SmallerVocabulary`], or an I/O error.
    pub fn load<B: Backend>(
        mut self,
        config: &Gpt2Config,
        device: &B::Device,
    ) -> Result<Gpt2<B>, ModelFolderError> {
        let model = Gpt2::zeros(config, device).map_err(|source| self.misconfigured(source))?;
        self.check_shapes(config)?;
        self.check_repeated_head(config)?;
        self.weights.fill(model)
    }

    /// Loads the same model as [`load`](Self::load), but reads each weight when it is first used. Names, shapes and
    /// types are checked immediately. [`check_values`](Self::check_values) checks the values.
    ///
    /// If a weight cannot be read later or is not finite, the first use panics with the error message, because Burn's
    /// lazy parameters cannot return errors. Sharded training converts the panic to an error.
    ///
    /// # Errors
    /// Returns [`ModelFolderError::Tensors`] naming every tensor that does not fit, or
    /// [`ModelFolderError::SmallerVocabulary`].
    pub fn load_lazily<B: Backend>(
        mut self,
        config: &Gpt2Config,
        device: &B::Device,
    ) -> Result<Gpt2<B>, ModelFolderError> {
        config.validate().map_err(|source| self.misconfigured(source))?;
        self.check_shapes(config)?;
        let path = self.weights.folder().join(CONFIG);
        let init = WeightInit::reading(weight_map(config), self.weights.into_reader(), device);
        Gpt2::with(config, &init).map_err(|source| ModelFolderError::Config { path, source })
    }

    /// Reads and checks all weights once, without keeping them in memory. Afterwards only a disk error can make
    /// [`load_lazily`](Self::load_lazily) fail. Uses 8 MiB of memory.
    ///
    /// # Errors
    /// Returns the errors of [`load`](Self::load).
    pub fn check_values(&mut self, config: &Gpt2Config) -> Result<(), ModelFolderError> {
        config.validate().map_err(|source| self.misconfigured(source))?;
        self.check_shapes(config)?;
        self.check_repeated_head(config)?;
        self.weights.check_values()
    }

    /// Returns the error for an inconsistent configuration.
    fn misconfigured(&self, source: ModelConfigError) -> ModelFolderError {
        ModelFolderError::Config { path: self.weights.folder().join(CONFIG), source }
    }

    /// Returns the number of rows that the vocabulary of `config` adds to the checkpoint's, and the number of rows in the
    /// file.
    ///
    /// # Errors
    /// Returns [`ModelFolderError::SmallerVocabulary`] if it is smaller than the embedding in the file.
    fn new_rows(&self, config: &Gpt2Config) -> Result<(usize, usize), ModelFolderError> {
        let unchanged = Ok((0, config.vocab_size));
        let Some(rows) = self.weights.num_rows(&hf_name(EMBEDDING)) else { return unchanged };
        // A file with fewer rows than its own `config.json` is damaged, which `check_shapes` reports.
        if config.vocab_size == self.config.vocab_size || rows < self.config.vocab_size {
            return unchanged;
        }
        let Some(new_rows) = config.vocab_size.checked_sub(rows) else {
            let (folder, vocab_size) = (self.weights.folder().to_owned(), config.vocab_size);
            return Err(ModelFolderError::SmallerVocabulary { folder, rows, vocab_size });
        };
        Ok((new_rows, rows))
    }

    /// Returns an error if tensors are missing, unknown, or have the wrong shape or type. The file of a tied model may
    /// contain a copy of the head. If the vocabulary of `config` is larger than the checkpoint's, the embedding and an
    /// untied head get new rows.
    fn check_shapes(&mut self, config: &Gpt2Config) -> Result<(), ModelFolderError> {
        let (new_rows, vocab_size) = self.new_rows(config)?;
        let stored = weight_map(&Gpt2Config { vocab_size, ..config.clone() });
        let map = stored.with_origins(|weight| match weight.origin() {
            Origin::Tied { .. } => None,
            _ if new_rows > 0 && [EMBEDDING, HEAD].contains(&weight.path()) => {
                Some(Origin::Extended { new_rows })
            }
            _ => Some(Origin::File),
        });
        self.weights.check_shapes(map.expect("a vocabulary of this size was checked"))
    }

    /// Returns whether the model is tied but the file contains a separate head.
    fn repeats_head(&self, config: &Gpt2Config) -> bool {
        config.tie_word_embeddings && self.weights.contains(HEAD)
    }

    /// If the file of a tied model contains both embedding and head, checks that their values are equal.
    fn check_repeated_head(&mut self, config: &Gpt2Config) -> Result<(), ModelFolderError> {
        if !self.repeats_head(config) {
            return Ok(());
        }
        // Only the rows of the file are compared. Both tensors get the same new rows.
        let numel = self.weights.num_rows(&hf_name(EMBEDDING)).unwrap_or(0) * config.n_embd;
        let count = self.weights.count_differences([&hf_name(EMBEDDING), HEAD], numel)?;
        let problem = (count > 0).then(|| TensorProblem {
            name: HEAD.to_owned(),
            expected: format!(
                "the values of `{}`, to which it is tied (or `tie_word_embeddings`: false)",
                hf_name(EMBEDDING)
            ),
            found: format!("{count} of {numel} values that differ"),
        });
        self.weights.refuse(problem.into_iter().collect())
    }
}

impl<B: Backend> Gpt2<B> {
    /// Writes the model as a checkpoint that [`PretrainedGpt2`] and `transformers` can load.
    ///
    /// # Errors
    /// Returns [`ModelFolderError::Io`] if a file cannot be written.
    pub fn save(&self, folder: impl AsRef<Path>, float: FloatType) -> Result<(), ModelFolderError> {
        let writer = self.config().folder_writer(folder.as_ref(), float)?;
        let mut saver = ParameterWriter { writer, path: Vec::new(), outcome: Ok(()) };
        self.visit(&mut saver);
        saver.outcome?;
        saver.writer.finish()
    }
}

/// Writes a module's parameters as it visits them.
struct ParameterWriter {
    /// The folder that is written.
    writer: ModelFolderWriter,
    /// The names of the modules on the path to the visited parameter.
    path: Vec<String>,
    /// The first error. Nothing is written after it, because a visitor cannot stop.
    outcome: Result<(), ModelFolderError>,
}

impl<B: Backend> ModuleVisitor<B> for ParameterWriter {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if self.outcome.is_ok() {
            self.outcome = self.writer.write(&self.path.join("."), param.val().into_data());
        }
    }
}
