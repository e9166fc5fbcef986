//! The interface between models and training programs.
//!
//! - [`Architecture`] describes everything that the configuration alone determines: parameters and
//!   files.
//! - [`SavedConfig`] reads a configuration from its `config.json`.
//! - [`BuildModel`] builds the Burn module for a configuration on a backend.
//! - [`LanguageModelConfig`] and [`TextClassifierConfig`] add the methods that are specific to
//!   language modeling and to text classification. The corresponding modules implement
//!   [`LanguageModel`](crate::causal_lm::LanguageModel) and
//!   [`TextClassifier`](crate::TextClassifier).
//!
//! A language model is a configuration of the [decoder](crate::decoder): it implements
//! [`DecoderConfig`](crate::decoder::DecoderConfig), and these traits follow. `ARCHITECTURE.md`
//! describes how to add one. A text classifier implements the traits itself. Checkpoints, exports,
//! forecasts and sharded training then work without further code.

use std::fmt;
use std::path::Path;

use burn::module::Module;
use burn::tensor::backend::Backend;
use deepburn_files::safetensors::FloatType;
use deepburn_weights::WeightMap;
use serde_json::{Map, Value};

use crate::batch_shape::BatchShape;
use crate::hf::{
    BaseModel, ClassNames, ClassNamesError, ExtraFields, HfExport, JsonFiles, ModelConfigError,
    ModelFolderError, ModelFolderWriter, ParameterShape, ProblemType,
};
use crate::texts::TextLimits;

/// The configuration of a model.
pub trait Architecture: fmt::Debug + Send + Sync {
    /// Returns the name of the model in logs and reports.
    fn name(&self) -> &'static str;

    /// Returns the map of all parameters, in the order in which the module holds them: their paths,
    /// shapes, initial values, and the tensors that store them in files.
    fn weight_map(&self) -> WeightMap;

    /// Returns all parameters, in the order in which the module holds them. Tied parameters are not
    /// included.
    fn parameters(&self) -> Vec<ParameterShape> {
        self.weight_map().parameters().map(ParameterShape::from).collect()
    }

    /// Returns the number of values; a tied embedding counts once.
    fn num_parameters(&self) -> usize {
        self.parameters().iter().map(ParameterShape::num_elements).sum()
    }

    /// Returns what the matrix at a module path is used for.
    fn matrix_use(&self, path: &str) -> MatrixUse;

    /// Returns the width of the residual stream.
    fn width(&self) -> usize;

    /// Returns the number of tokens of the longest sequence that the model supports.
    fn max_len(&self) -> usize;

    /// Returns the JSON files that are stored next to weights of type `float`: `config.json`, and
    /// any other file that readers need.
    fn documents(&self, float: FloatType) -> JsonFiles;

    /// Reads all initial weights in `folder` once and checks them, without keeping them in memory.
    ///
    /// # Errors
    /// Returns [`ModelFolderError::Tensors`] naming every tensor that does not fit or is not
    /// finite, or an I/O error.
    fn check_weights(&self, folder: &Path) -> Result<(), ModelFolderError>;

    /// Opens the folder of a model that this one was fine-tuned from, to read the values that its
    /// parameters had there.
    ///
    /// # Errors
    /// Returns an error if a file is missing, unreadable or malformed.
    fn base_model(&self, folder: &Path) -> Result<BaseModel, ModelFolderError> {
        BaseModel::open(folder, self.weight_map())
    }

    /// Returns the size in bytes of the logits that the loss holds at any one time inside a fused
    /// op, in addition to the tensors of the model.
    fn logits_bytes(&self, batch: BatchShape) -> u64 {
        // The logits of a classifier, one row for each text, are ordinary tensors of the model.
        _ = batch;
        0
    }

    /// Returns the contents of the model's Hugging Face folder except the weights, and the map of
    /// the weights.
    fn hf_export(&self) -> HfExport {
        HfExport::new(self.weight_map(), self.documents(FloatType::F32))
    }

    /// Starts writing the model to `folder`, which is created if it does not exist.
    ///
    /// # Errors
    /// Returns [`ModelFolderError::Io`] if the folder cannot be written to.
    fn folder_writer(
        &self,
        folder: &Path,
        float: FloatType,
    ) -> Result<ModelFolderWriter, ModelFolderError> {
        let documents = self.documents(float);
        ModelFolderWriter::create(folder, &self.weight_map(), float, documents)
    }
}

/// What a matrix is used for, which says along which axis a product adds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MatrixUse {
    /// The weight of a linear layer, `[in, out]`.
    Linear,
    /// A row for each token, `[vocab, width]`: an embedding or a head.
    TokenTable,
    /// Anything else, such as a table of positions.
    Other,
}

/// Builds the Burn module for a configuration on a backend.
pub trait BuildModel<B: Backend>: Architecture {
    /// The module.
    type Model: Module<B>;

    /// Returns a model with random initial weights. The values of a parameter depend only on `seed`
    /// and its path, and are generated when the parameter is first used.
    ///
    /// # Errors
    /// Returns [`ModelConfigError`] if the configuration is inconsistent.
    fn init(&self, seed: u64, device: &B::Device) -> Result<Self::Model, ModelConfigError>;

    /// Returns a model with all weights set to 0, for callers that overwrite them.
    ///
    /// # Errors
    /// Returns [`ModelConfigError`] if the configuration is inconsistent.
    fn zeros(&self, device: &B::Device) -> Result<Self::Model, ModelConfigError>;

    /// Returns a trained model, with the weights in `folder`.
    ///
    /// # Errors
    /// Returns [`ModelFolderError::Tensors`] naming every tensor that does not fit or is not
    /// finite, or an I/O error.
    fn load(&self, folder: &Path, device: &B::Device) -> Result<Self::Model, ModelFolderError>;

    /// Returns a model for fine-tuning with the weights in `folder`. Each weight is read when it is
    /// first used. Weights of a new task, which the folder does not contain, are initialized
    /// randomly from `seed`.
    ///
    /// # Errors
    /// Returns [`ModelFolderError::Tensors`] naming every tensor that does not fit, or an I/O
    /// error.
    fn load_lazily(
        &self,
        folder: &Path,
        seed: u64,
        device: &B::Device,
    ) -> Result<Self::Model, ModelFolderError>;
}

/// The limits of a language model on token sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenLimits {
    /// Number of tokens in the vocabulary; token ids are smaller.
    pub vocab_size: usize,
    /// Longest sequence in tokens.
    pub max_len: usize,
    /// The field of `config.json` that contains `max_len`.
    pub max_len_field: &'static str,
}

/// A configuration that is saved as a `config.json`.
pub trait SavedConfig: Architecture + Sized {
    /// `model_type` in the file.
    const MODEL_TYPE: &'static str;

    /// Reads the fields of the file.
    ///
    /// # Errors
    /// Returns [`ModelConfigError`] if a field belongs to another model, has the wrong type or is
    /// out of range.
    fn from_fields(fields: Map<String, Value>) -> Result<Self, ModelConfigError>;
}

/// The configuration of a language model.
pub trait LanguageModelConfig: Architecture {
    /// Returns the configuration with the given `config.json` fields overridden. Null removes a
    /// field that the model does not read.
    ///
    /// # Errors
    /// Returns the errors of [`from_fields`](SavedConfig::from_fields), and an error if a field is
    /// unknown.
    fn with_overrides(&self, overrides: &Map<String, Value>) -> Result<Self, ModelConfigError>
    where
        Self: Sized;

    /// Checks the range of every value, the consistency of related values, and that no field that
    /// the model does not read may change what it computes.
    ///
    /// # Errors
    /// Returns [`ModelConfigError`] for the first invalid field.
    fn validate(&self) -> Result<(), ModelConfigError>;

    /// Returns the limits on token sequences.
    fn limits(&self) -> TokenLimits;

    /// Sets the number of tokens in the vocabulary.
    fn set_vocab_size(&mut self, vocab_size: usize);

    /// Returns the `config.json` fields that the model does not read.
    fn extra(&self) -> &ExtraFields;
}

/// The configuration of a text classifier.
pub trait TextClassifierConfig: Architecture {
    /// Returns the limits on texts and labels.
    fn limits(&self) -> TextLimits;

    /// Returns the class names; `None` if the classes are only numbered.
    ///
    /// # Errors
    /// Returns [`ClassNamesError`] if the names do not cover each class from 0 exactly once.
    fn class_names(&self) -> Result<Option<ClassNames>, ClassNamesError>;

    /// Returns what the model predicts.
    fn problem_type(&self) -> ProblemType;
}
