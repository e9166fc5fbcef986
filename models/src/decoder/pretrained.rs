//! Reads and writes decoders in the layout of `transformers`.
//!
//! Main type: [`PretrainedDecoder`].

use std::path::Path;

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Tensor, backend::Backend};
use deepburn_safetensors::FloatType;
use deepburn_weights::Origin;

use super::any::AnyDecoder;
use super::config::DecoderConfig;
use super::model::Decoder;
use super::parts::DecoderParts;
use crate::architecture::{Architecture, BuildModel, LanguageModelConfig};
use crate::hf::{
    CONFIG, ModelConfigError, ModelFolderError, ModelFolderWriter, TensorProblem, Weights,
    read_fields, read_small_file, refuse_adapter,
};
use crate::weights::WeightInit;

/// The classification head of `transformers`, which files of classifiers contain.
pub(crate) const SCORE: &str = "score.weight";

/// A folder with a pretrained decoder. Its `config.json` has been read, and the headers of its weight files have been
/// checked.
#[derive(Debug)]
pub struct PretrainedDecoder<C> {
    /// The configuration of the folder.
    config: C,
    /// The files in the folder.
    pub(crate) files: DecoderFiles,
}

impl<C: DecoderConfig> PretrainedDecoder<C> {
    /// Reads the config and the file headers of a checkpoint, but not the weights. Fields of the config that may change
    /// what the model computes, and that it does not read, are errors when the model is built.
    ///
    /// # Errors
    /// Returns [`ModelFolderError`] if a file is missing, unreadable or malformed, a tensor occurs twice, tensor names
    /// have an unknown prefix, or the folder has a LoRA adapter.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self, ModelFolderError> {
        let folder = folder.as_ref();
        refuse_adapter(folder)?;
        let path = folder.join(CONFIG);
        let text = read_small_file(&path).map_err(|e| ModelFolderError::io("read", &path, e))?;
        let config = read_fields(&text).and_then(C::from_known);
        let config = config
            .and_then(|config| config.check_values().map(|()| config))
            .map_err(|source| ModelFolderError::Config { path, source })?;
        let weights = Weights::open(folder, config.weight_map(), &[SCORE])?;
        let files = DecoderFiles { own: config.parts(), weights };
        Ok(Self { config, files })
    }

    /// Returns the configuration of the folder.
    #[must_use]
    pub fn config(&self) -> &C {
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
        self,
        config: &C,
        device: &B::Device,
    ) -> Result<Decoder<B>, ModelFolderError> {
        self.files.load(&AnyDecoder::new(config.clone()), device)
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
        self,
        config: &C,
        device: &B::Device,
    ) -> Result<Decoder<B>, ModelFolderError> {
        self.files.load_lazily(&AnyDecoder::new(config.clone()), device)
    }

    /// Reads and checks all weights once, without keeping them in memory. Afterwards only a disk error can make
    /// [`load_lazily`](Self::load_lazily) fail. Uses 8 MiB of memory.
    ///
    /// # Errors
    /// Returns the errors of [`load`](Self::load).
    pub fn check_values(&mut self, config: &C) -> Result<(), ModelFolderError> {
        self.files.check_values(&AnyDecoder::new(config.clone()))
    }
}

/// The files of a pretrained decoder of any family.
#[derive(Debug)]
pub(crate) struct DecoderFiles {
    /// The parts according to the `config.json` of the folder.
    own: DecoderParts,
    /// The weights in the folder. Only the file headers have been read.
    pub(crate) weights: Weights,
}

/// [`PretrainedDecoder`]'s methods, without its type.
impl DecoderFiles {
    pub(crate) fn load<B: Backend>(
        mut self,
        decoder: &AnyDecoder,
        device: &B::Device,
    ) -> Result<Decoder<B>, ModelFolderError> {
        let model = decoder.zeros(device).map_err(|source| self.misconfigured(source))?;
        let parts = decoder.parts();
        self.check_shapes(&parts)?;
        self.check_repeated_head(&parts)?;
        self.weights.fill(model)
    }

    pub(crate) fn load_lazily<B: Backend>(
        self,
        decoder: &AnyDecoder,
        device: &B::Device,
    ) -> Result<Decoder<B>, ModelFolderError> {
        let path = self.weights.folder().join(CONFIG);
        let init = self.reading(decoder, device)?;
        Decoder::with(decoder, init).map_err(|source| ModelFolderError::Config { path, source })
    }

    /// Returns an initialiser that reads each weight when it is first used.
    pub(crate) fn reading<'d, B: Backend>(
        mut self,
        decoder: &AnyDecoder,
        device: &'d B::Device,
    ) -> Result<WeightInit<'d, B>, ModelFolderError> {
        decoder.validate().map_err(|source| self.misconfigured(source))?;
        self.check_shapes(&decoder.parts())?;
        Ok(WeightInit::reading(decoder.weight_map(), self.weights.into_reader(), device))
    }

    pub(crate) fn check_values(&mut self, decoder: &AnyDecoder) -> Result<(), ModelFolderError> {
        decoder.validate().map_err(|source| self.misconfigured(source))?;
        let parts = decoder.parts();
        self.check_shapes(&parts)?;
        self.check_repeated_head(&parts)?;
        self.weights.check_values()
    }

    /// Returns the error for an inconsistent configuration.
    fn misconfigured(&self, source: ModelConfigError) -> ModelFolderError {
        ModelFolderError::Config { path: self.weights.folder().join(CONFIG), source }
    }

    /// Returns the number of rows that the vocabulary of `wanted` adds to the checkpoint's, and the number of rows in the
    /// file.
    ///
    /// # Errors
    /// Returns [`ModelFolderError::SmallerVocabulary`] if it is smaller than the embedding in the file.
    pub(super) fn new_rows(
        &self,
        wanted: &DecoderParts,
    ) -> Result<(usize, usize), ModelFolderError> {
        let own = &self.own;
        let unchanged = Ok((0, wanted.vocab_size));
        let Some(rows) = self.weights.num_rows(&stored_embedding(own)) else { return unchanged };
        // A file with fewer rows than its own `config.json` is damaged, which `check_shapes` reports.
        if wanted.vocab_size == own.vocab_size || rows < own.vocab_size {
            return unchanged;
        }
        let Some(new_rows) = wanted.vocab_size.checked_sub(rows) else {
            let (folder, vocab_size) = (self.weights.folder().to_owned(), wanted.vocab_size);
            return Err(ModelFolderError::SmallerVocabulary { folder, rows, vocab_size });
        };
        Ok((new_rows, rows))
    }

    /// Returns an error if tensors are missing, unknown, or have the wrong shape or type. The file of a tied model may
    /// contain a copy of the head. If the vocabulary of `wanted` is larger than the checkpoint's, the embedding and an
    /// untied head get new rows.
    fn check_shapes(&mut self, wanted: &DecoderParts) -> Result<(), ModelFolderError> {
        let (new_rows, vocab_size) = self.new_rows(wanted)?;
        let parts = DecoderParts { vocab_size, ..wanted.clone() };
        let rows = [parts.embedding_path(), parts.head_path()];
        let stored = parts.weight_map();
        let map = stored.with_origins(|weight| match weight.origin() {
            Origin::Tied { .. } => None,
            _ if new_rows > 0 && rows.iter().any(|path| path == weight.path()) => {
                Some(Origin::Extended { new_rows })
            }
            _ => Some(Origin::File),
        });
        self.weights.check_shapes(map.expect("a vocabulary of this size was checked"))
    }

    /// If the file of a tied model contains both embedding and head, checks that their values are equal.
    fn check_repeated_head(&mut self, parts: &DecoderParts) -> Result<(), ModelFolderError> {
        let (embedding, head) = (stored_embedding(parts), parts.head_path());
        if !parts.head.is_tied || !self.weights.contains(&head) {
            return Ok(());
        }
        // Only the rows of the file are compared. Both tensors get the same new rows.
        let numel = self.weights.num_rows(&embedding).unwrap_or(0) * parts.width;
        let count = self.weights.count_differences([&embedding, &head], numel)?;
        let problem = (count > 0).then(|| TensorProblem {
            name: head,
            expected: format!(
                "the values of `{embedding}`, to which it is tied (or `tie_word_embeddings`: false)"
            ),
            found: format!("{count} of {numel} values that differ"),
        });
        self.weights.refuse(problem.into_iter().collect())
    }
}

/// Returns the name of the token embedding in files.
fn stored_embedding(parts: &DecoderParts) -> String {
    format!("{}{}", parts.files.prefix, parts.embedding_path())
}

impl<B: Backend> Decoder<B> {
    /// Writes the model as a checkpoint that [`PretrainedDecoder`] and `transformers` can load.
    ///
    /// # Errors
    /// Returns [`ModelFolderError::Io`] if a file cannot be written.
    pub fn save(&self, folder: impl AsRef<Path>, float: FloatType) -> Result<(), ModelFolderError> {
        let writer = self.config.folder_writer(folder.as_ref(), float)?;
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
