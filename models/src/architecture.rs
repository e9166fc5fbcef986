//! The interface between models and training programs.
//!
//! - [`Architecture`] is what follows from a configuration alone: parameters, files and the shape of a training pass.
//! - [`BuildModel`] makes the module of a configuration on a backend.
//! - [`LanguageModelConfig`] and [`TextClassifierConfig`] add what the two tasks need. Their modules are a
//!   [`LanguageModel`](crate::causal_lm::LanguageModel) and a [`TextClassifier`](crate::TextClassifier).
//!
//! # A new language model
//!
//! It is a folder beside [`gpt2`](crate::gpt2), and a line where the programs list their models. The folder has:
//!
//! - a configuration with [`Architecture`]: the list of parameters, their names in files, `config.json`, and
//!   [`describe`](Architecture::describe), which repeats the forward pass for memory forecasts;
//! - [`LanguageModelConfig`] for it: reading and overriding fields, the limits on token sequences;
//! - a Burn module with [`LanguageModel`](crate::causal_lm::LanguageModel): the loss, and the logits of the next token;
//! - [`BuildModel`], which makes the module with drawn weights, zeros, or the weights of a folder.
//!
//! Checkpoints, exports, generation, estimates and sharded training follow from these.

use std::fmt;
use std::path::Path;

use burn::module::Module;
use burn::tensor::backend::Backend;
use deepburn_safetensors::FloatType;
use serde_json::{Map, Value};

use crate::forward_pass::{BatchShape, ForwardPass};
use crate::hf::{
    ClassNames, ClassNamesError, ExtraFields, HfExport, JsonFiles, ModelConfigError,
    ModelFolderError, ModelFolderWriter, Names, ParameterShape,
};
use crate::texts::TextLimits;

/// The configuration of a model.
pub trait Architecture: fmt::Debug + Send + Sync {
    /// Returns the name of the model in logs and reports.
    fn name(&self) -> &'static str;

    /// Returns all parameters, in the order in which the module holds them.
    fn parameters(&self) -> Vec<ParameterShape>;

    /// Returns the number of trainable values; a tied embedding counts once.
    fn num_parameters(&self) -> usize {
        self.parameters().iter().map(ParameterShape::num_elements).sum()
    }

    /// Returns the width of the residual stream.
    fn width(&self) -> usize;

    /// Returns the number of tokens of the longest sequence that the model supports.
    fn max_len(&self) -> usize;

    /// Returns how parameters are named in weight files.
    fn names(&self) -> Names;

    /// Returns the JSON files beside weights of type `float`: `config.json` and what else readers need.
    fn documents(&self, float: FloatType) -> JsonFiles;

    /// Reads the weights in `folder` from which training starts once, and keeps none.
    ///
    /// # Errors
    /// [`ModelFolderError::Tensors`] naming every tensor that does not fit or is not finite, or an I/O error.
    fn check_weights(&self, folder: &Path) -> Result<(), ModelFolderError>;

    /// Repeats the forward pass and the loss of a micro-batch op by op, without values. Memory and step times are
    /// predicted from it.
    fn describe(&self, pass: &mut dyn ForwardPass, batch: BatchShape);

    /// Returns the bytes of the logits that the loss computes at a time, beyond what [`describe`](Self::describe)
    /// says.
    fn logits_bytes(&self, batch: BatchShape) -> u64 {
        _ = batch;
        0
    }

    /// Returns everything but the weights that a Hugging Face folder of the model contains.
    fn hf_export(&self) -> HfExport {
        HfExport::new(&self.parameters(), self.names(), self.documents(FloatType::F32))
    }

    /// Starts writing the model to `folder`, which is created if need be.
    ///
    /// # Errors
    /// [`ModelFolderError::Io`] if the folder cannot be written to.
    fn folder_writer(
        &self,
        folder: &Path,
        float: FloatType,
    ) -> Result<ModelFolderWriter, ModelFolderError> {
        let documents = self.documents(float);
        ModelFolderWriter::create(folder, self.parameters(), self.names(), float, documents)
    }
}

/// Makes the module of a configuration on a backend.
pub trait BuildModel<B: Backend>: Architecture {
    /// The module.
    type Model: Module<B>;

    /// Returns a model with initial weights that depend on `seed` and each parameter's path alone. They are drawn
    /// when first used.
    ///
    /// # Errors
    /// [`ModelConfigError`] if the configuration is inconsistent.
    fn init(&self, seed: u64, device: &B::Device) -> Result<Self::Model, ModelConfigError>;

    /// Returns a model with all weights 0, for callers that replace them.
    ///
    /// # Errors
    /// [`ModelConfigError`] if the configuration is inconsistent.
    fn zeros(&self, device: &B::Device) -> Result<Self::Model, ModelConfigError>;

    /// Returns a trained model, with the weights in `folder`.
    ///
    /// # Errors
    /// [`ModelFolderError::Tensors`] naming every tensor that does not fit or is not finite, or an I/O error.
    fn load(&self, folder: &Path, device: &B::Device) -> Result<Self::Model, ModelFolderError>;

    /// Returns a model to train further, with the weights in `folder`, which are read when first used. Weights that
    /// are not in the folder because they belong to a new task are drawn from `seed`.
    ///
    /// # Errors
    /// [`ModelFolderError::Tensors`] naming every tensor that does not fit, or an I/O error.
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
    /// Number of tokens; ids are below it.
    pub vocab_size: usize,
    /// Longest sequence in tokens.
    pub max_len: usize,
    /// The field of `config.json` that says so.
    pub max_len_field: &'static str,
}

/// The configuration of a language model.
pub trait LanguageModelConfig: Architecture + Clone + Sized {
    /// `model_type` in `config.json`.
    const MODEL_TYPE: &'static str;

    /// Returns the configuration of a job that gives neither a pretrained model nor sizes.
    fn default_size() -> Self;

    /// Reads the fields of a `config.json`.
    ///
    /// # Errors
    /// [`ModelConfigError`] for a field of another model, of another type or out of range.
    fn from_fields(fields: Map<String, Value>) -> Result<Self, ModelConfigError>;

    /// Reads the configuration of a folder and checks that its weight files have sound headers.
    ///
    /// # Errors
    /// A file that is missing, unreadable or malformed.
    fn open(folder: &Path) -> Result<Self, ModelFolderError>;

    /// Returns the configuration with some fields of a `config.json` in place of its own.
    ///
    /// # Errors
    /// As [`from_fields`](Self::from_fields), and for an unknown field.
    fn with_overrides(&self, overrides: &Map<String, Value>) -> Result<Self, ModelConfigError>;

    /// Checks every value against its range and the values it has to agree with.
    ///
    /// # Errors
    /// [`ModelConfigError::Value`] for the first field that is wrong.
    fn validate(&self) -> Result<(), ModelConfigError>;

    /// Returns the limits on token sequences.
    fn limits(&self) -> TokenLimits;

    /// Changes the number of tokens.
    fn set_vocab_size(&mut self, vocab_size: usize);

    /// Fields of its `config.json` that it does not read.
    fn extra(&self) -> &ExtraFields;
}

/// The configuration of a model that classifies texts.
pub trait TextClassifierConfig: Architecture {
    /// Returns the limits on texts and labels.
    fn limits(&self) -> TextLimits;

    /// Returns the names of its classes; `None` if they are numbers.
    ///
    /// # Errors
    /// [`ClassNamesError`] for names that do not name each class from 0 once.
    fn class_names(&self) -> Result<Option<ClassNames>, ClassNamesError>;
}
