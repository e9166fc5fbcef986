//! Reading and writing a GPT-2 in the layout of `transformers`.
//!
//! Main type: [`PretrainedGpt2`].

use std::path::Path;

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Tensor, backend::Backend};
use deepburn_safetensors::FloatType;

use super::config::Gpt2Config;
use super::model::Gpt2;
use super::parameters::{EMBEDDING, HEAD, NAMES, hf_name};
use crate::Architecture;
use crate::hf::{
    CONFIG, ModelConfigError, ModelFolderError, ModelFolderWriter, ParameterShape, TensorProblem,
    Weights, read_small_file,
};
use crate::weights::WeightInit;

/// A folder with the `config.json` of a GPT-2, which has been read, and weights, whose files have sound headers.
#[derive(Debug)]
pub struct PretrainedGpt2 {
    /// The configuration of the folder.
    config: Gpt2Config,
    /// The tensors of the folder, of which only headers have been read.
    pub(super) weights: Weights,
}

impl PretrainedGpt2 {
    /// Reads the config and the headers of a checkpoint; no weights yet.
    ///
    /// # Errors
    /// [`ModelFolderError`] if a file is missing, unreadable or malformed, or a tensor occurs twice.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self, ModelFolderError> {
        let folder = folder.as_ref();
        let path = folder.join(CONFIG);
        let text = read_small_file(&path).map_err(|e| ModelFolderError::io("read", &path, e))?;
        let config = text.parse().map_err(|source| ModelFolderError::Config { path, source })?;
        Ok(Self { config, weights: Weights::open(folder, NAMES)? })
    }

    /// Returns the configuration of the folder.
    #[must_use]
    pub fn config(&self) -> &Gpt2Config {
        &self.config
    }

    /// Returns the model of `config`, which is the checkpoint's own or derived from it, with the checkpoint's
    /// weights as f32. Memory beyond the model: one tensor.
    ///
    /// # Errors
    /// [`ModelFolderError::Tensors`] naming every tensor that does not fit, or an I/O error.
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

    /// Loads the same model as [`load`](Self::load), but reads each weight when it is first used.
    /// Names, shapes and types are checked now; [`check_values`](Self::check_values) checks the rest.
    ///
    /// A weight that later cannot be read, or is not finite, causes a panic with that message, because Burn's
    /// lazy parameters cannot return errors. Sharded training turns the panic into an error.
    ///
    /// # Errors
    /// [`ModelFolderError::Tensors`] naming every tensor that does not fit.
    pub fn load_lazily<B: Backend>(
        self,
        config: &Gpt2Config,
        device: &B::Device,
    ) -> Result<Gpt2<B>, ModelFolderError> {
        self.check_shapes(config)?;
        let path = self.weights.folder().join(CONFIG);
        Gpt2::with(config, &WeightInit::reading(self.weights.into_reader(), device))
            .map_err(|source| ModelFolderError::Config { path, source })
    }

    /// Reads all weights of the model of `config` once and keeps none. Afterwards only a disk error can
    /// make [`load_lazily`](Self::load_lazily) fail. Memory: 8 MiB.
    ///
    /// # Errors
    /// The errors of [`load`](Self::load).
    pub fn check_values(&mut self, config: &Gpt2Config) -> Result<(), ModelFolderError> {
        self.check_shapes(config)?;
        self.check_repeated_head(config)?;
        self.weights.check_values(&config.parameters())
    }

    /// Returns the error of an inconsistent configuration.
    fn misconfigured(&self, source: ModelConfigError) -> ModelFolderError {
        ModelFolderError::Config { path: self.weights.folder().join(CONFIG), source }
    }

    /// Refuses tensors that are missing, left over or of the wrong shape or type. A tied model's file may have the
    /// head all the same.
    fn check_shapes(&self, config: &Gpt2Config) -> Result<(), ModelFolderError> {
        let mut expected = config.parameters();
        if self.repeats_head(config) {
            expected.push(ParameterShape::new(HEAD, &[config.vocab_size, config.n_embd]));
        }
        self.weights.check_shapes(&expected)
    }

    /// Returns whether the file has the head of a model whose head is its embedding.
    fn repeats_head(&self, config: &Gpt2Config) -> bool {
        config.tie_word_embeddings && self.weights.contains(HEAD)
    }

    /// Checks that a file with both matrices of a tied model has the same values in both.
    fn check_repeated_head(&mut self, config: &Gpt2Config) -> Result<(), ModelFolderError> {
        if !self.repeats_head(config) {
            return Ok(());
        }
        let numel = config.vocab_size * config.n_embd;
        let count = self.weights.count_differences([EMBEDDING, HEAD], numel)?;
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
    /// Writes the model as a checkpoint that [`PretrainedGpt2`] and `transformers` load.
    ///
    /// # Errors
    /// [`ModelFolderError::Io`].
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
    /// The names of the modules that the visit is in.
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
