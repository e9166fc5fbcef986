//! Model folders in the layout of Hugging Face: `config.json`, weights as safetensors, names.
//!
//! - [`ModelFolderWriter`] writes a folder tensor by tensor. [`ModelFolderError`] is the reason why
//!   a folder cannot be read or written.
//! - [`GenerationConfig`] reads `generation_config.json`.
//! - [`AdapterFolder`] is a folder with an adapter of PEFT.
//! - [`BaseModel`] reads single parameters of a folder.
//! - [`HfExport`] holds the contents of a folder except the weights. It is stored in training
//!   checkpoints.
//! - [`ParameterShape`] describes a parameter, and [`ClassNames`] and [`ProblemType`] describe the
//!   outputs of a classifier.
//! - [`ExtraFields`] holds the fields of a `config.json` that a model does not use.
//!   [`ModelConfigError`] is the reason why a field is rejected.

mod adapter_folder;
mod base_model;
mod class_names;
mod config;
mod config_error;
mod error;
mod export;
mod generation_config;
mod known_fields;
mod mean_rows;
mod name_prefix;
mod parameter_shape;
mod problem_type;
mod small_file;
mod tensor_file;
#[cfg(test)]
mod tests;
mod weights;
mod writer;

/// The file with the configuration of a model.
pub(crate) const CONFIG: &str = "config.json";
/// The file with the configuration of an adapter.
pub const ADAPTER_CONFIG: &str = "adapter_config.json";

pub(crate) use class_names::{ID2LABEL, LABEL2ID};
pub(crate) use config::{
    MAX_LAYERS, MAX_SIZE, check_deviation, check_positive, check_probability, check_size,
};
pub(crate) use config_error::unquoted;
pub(crate) use weights::{Weights, refuse_adapter};

pub use adapter_folder::AdapterFolder;
pub use base_model::BaseModel;
pub use class_names::{ClassNames, ClassNamesError};
pub use config::{ConfigFields, ExtraFields, FieldNames, is_sequence_classifier};
pub use config_error::ModelConfigError;
pub use error::{ModelFolderError, TensorProblem};
pub use export::HfExport;
pub use generation_config::{DEFAULT_TOP_K, GENERATION_CONFIG, GenerationConfig, GenerationValues};
pub use known_fields::{Accepted, FixedField};
pub use parameter_shape::ParameterShape;
pub use problem_type::ProblemType;
pub use small_file::{read_fields, read_small_file};
pub use writer::{JsonFiles, ModelFolderWriter};
