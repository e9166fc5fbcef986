//! The configuration of a decoder.
//!
//! Main trait: [`DecoderConfig`]. A configuration says how its `config.json` is read and written,
//! and what parts the model consists of. The model traits are implemented for all configurations at
//! once. [`AnyDecoder`](super::AnyDecoder) builds the module.

use std::fmt;

use deepburn_files::safetensors::FloatType;
use serde_json::{Map, Value, json};

use super::parts::DecoderParts;
use crate::hf::{ExtraFields, FieldNames, ModelConfigError};

/// The configuration of a decoder.
pub trait DecoderConfig: Clone + fmt::Debug + Send + Sync + 'static {
    /// `model_type` in `config.json`.
    const MODEL_TYPE: &'static str;
    /// The name in logs.
    const NAME: &'static str;
    /// The class of `transformers` that loads the model.
    const CLASS: &'static str;
    /// The field of `config.json` that contains the length of the longest sequence.
    const MAX_LEN_FIELD: &'static str;
    /// The fields of `config.json`.
    const FIELDS: FieldNames;

    /// Returns the configuration for a job that specifies neither a pretrained model nor sizes.
    fn default_size() -> Self;

    /// Reads the fields of a `config.json`. Ranges, and fields that the model does not know, are
    /// not checked.
    ///
    /// # Errors
    /// Returns [`ModelConfigError`] if the config belongs to another model, or if a field has the
    /// wrong type.
    fn from_known(fields: Map<String, Value>) -> Result<Self, ModelConfigError>;

    /// Returns all fields of the `config.json`, sorted by name, including those that the model does
    /// not read.
    fn to_fields(&self) -> Map<String, Value>;

    /// Checks the range of every value and the consistency of related values.
    ///
    /// # Errors
    /// Returns [`ModelConfigError`] for the first invalid field.
    fn check_values(&self) -> Result<(), ModelConfigError>;

    /// Returns the parts of the model. The values were checked.
    fn parts(&self) -> DecoderParts;

    /// Sets the number of tokens in the vocabulary.
    fn set_vocab_size(&mut self, vocab_size: usize);

    /// Returns the fields that the model does not read.
    fn extra(&self) -> &ExtraFields;
}

/// Returns the `config.json` for weights of type `float`. `class` is the `transformers` class that
/// loads them. Older versions of `transformers` store the type as `torch_dtype`. If a config has
/// that field, it is updated too.
pub(crate) fn document(
    mut fields: Map<String, Value>,
    class: &str,
    float: FloatType,
) -> Map<String, Value> {
    fields.insert("architectures".into(), json!([class]));
    fields.insert("dtype".into(), json!(float.torch_name()));
    // A stale value would make older readers cast the weights.
    if let Some(older_name) = fields.get_mut("torch_dtype") {
        *older_name = json!(float.torch_name());
    }
    fields.sort_keys();
    fields
}
