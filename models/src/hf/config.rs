//! The fields of a `config.json` that are common to the models of `transformers`.
//!
//! Main types: [`ConfigFields`], which reads fields and checks them, and [`ExtraFields`], which keeps the others. There
//! are four kinds of fields: fields that the model reads; *fixed* fields, which enable unsupported features and are
//! only accepted with a value that means "off"; fields that are known not to affect training; and unknown fields. The
//! last two kinds are kept and written back. Callers can warn about [unknown](ExtraFields::unknown) fields. A name that
//! looks like a misspelt field of the model is an error.

use serde_json::{Map, Value};
use thiserror::Error;

use super::class_names::{ClassNames, ClassNamesError, ID2LABEL};
use super::problem_type::ProblemType;

/// The maximum width, length or vocabulary size. The limit ensures that the product of two sizes fits in 64 bits.
pub(crate) const MAX_SIZE: usize = 1 << 24;
/// The maximum number of layers. Each layer has a dozen parameters, and all of them are listed before any is read.
pub(crate) const MAX_LAYERS: usize = 1 << 12;

/// The reason why a configuration is rejected.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ModelConfigError {
    /// The text is not a JSON object.
    #[error("the config is not a JSON object: {0}")]
    Syntax(String),
    /// A field has the wrong type.
    #[error("{0}")]
    Field(String),
    /// The model does not have this field.
    #[error("unknown field `{name}` (value {value}){hint}")]
    Unknown {
        /// The field.
        name: String,
        /// Its value, as JSON.
        value: String,
        /// "; did you mean ..?" with the nearest known name, or the list of all names that the model reads.
        hint: String,
    },
    /// A value is out of range or has the wrong type.
    #[error("`{name}` is {value}, but it must be {rule}")]
    Value {
        /// The field.
        name: &'static str,
        /// What was found.
        value: String,
        /// The accepted values.
        rule: String,
    },
    /// `transformers` supports this value, but this implementation does not.
    #[error("`{name}` = {value} is not supported: {remedy}")]
    Unsupported {
        /// The field.
        name: &'static str,
        /// What was found.
        value: String,
        /// How to fix the problem.
        remedy: &'static str,
    },
    /// A field is given under two names with different values.
    #[error(
        "`{alias}` is {alias_value} and `{name}` is {value}, but they name the same field; keep one"
    )]
    Conflict {
        /// The alias.
        alias: &'static str,
        /// Its value, as JSON.
        alias_value: String,
        /// The field.
        name: &'static str,
        /// Its value, as JSON.
        value: String,
    },
}

/// Constructors that are shared by the models.
impl ModelConfigError {
    /// Returns the error for a value that violates `rule`, the end of a sentence that starts with "it must be".
    pub(crate) fn value(name: &'static str, value: impl ToString, rule: impl Into<String>) -> Self {
        Self::Value { name, value: value.to_string(), rule: rule.into() }
    }
}

/// Fields of unsupported features. They must be missing, null, false, 0 or an empty object; other values are rejected.
const FIXED: [(&str, &str); 10] = [
    ("add_cross_attention", "this is a decoder on its own; set it to false"),
    ("auto_map", "code shipped with a checkpoint is not run; remove it"),
    ("chunk_size_feed_forward", "the MLP is not chunked; set it to 0"),
    ("cross_attention_hidden_size", "this is a decoder on its own; remove it"),
    ("is_encoder_decoder", "this is a decoder on its own; set it to false"),
    ("output_attentions", "attention weights are not returned; set it to false"),
    ("output_hidden_states", "hidden states are not returned; set it to false"),
    ("per_layer_config", "all blocks share one configuration; remove it"),
    ("pruned_heads", "pruned heads are not supported; export the whole model"),
    ("quantization_config", "quantised weights are not supported; dequantise and save again"),
];

/// Fields that do not affect training: heads of other tasks, generation defaults, labels.
const NOT_TRAINED: [&str; 57] = [
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_commit_hash",
    "_name_or_path",
    "architectures",
    "attn_implementation",
    "bad_words_ids",
    "begin_suppress_tokens",
    "bos_token_id",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "dtype",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "eos_token_id",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "gradient_checkpointing",
    "id2label",
    "is_decoder",
    "label2id",
    "length_penalty",
    "max_length",
    "min_length",
    "model_type",
    "n_special",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_labels",
    "num_return_sequences",
    "output_past",
    "output_scores",
    "pad_token_id",
    "predict_special_tokens",
    "prefix",
    "problem_type",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict",
    "return_dict_in_generate",
    "sep_token_id",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "transformers_version",
    "typical_p",
    "use_cache",
];

/// Fields of a `config.json` that the model does not use. They are written back unchanged.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ExtraFields(pub(crate) Map<String, Value>);

impl ExtraFields {
    /// Returns the names of unknown fields. They might change what `transformers` computes.
    pub fn unknown(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str).filter(|name| !is_known(name))
    }

    /// Returns the tokens after which generation stops, from `eos_token_id`.
    #[must_use]
    pub fn eos_token_ids(&self) -> Vec<u32> {
        let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
        match self.0.get("eos_token_id") {
            Some(Value::Array(ids)) => ids.iter().filter_map(id).collect(),
            Some(value) => id(value).into_iter().collect(),
            None => Vec::new(),
        }
    }

    /// Returns the class names in a classifier's `config.json`; `None` if the classes are only numbered.
    ///
    /// # Errors
    /// Returns [`ClassNamesError`] if the names do not cover each class from 0 exactly once.
    pub fn class_names(&self) -> Result<Option<ClassNames>, ClassNamesError> {
        ClassNames::read(&self.0)
    }

    /// Returns the `problem_type` in a classifier's `config.json`; `None` if it is missing or null.
    ///
    /// # Errors
    /// Returns [`ModelConfigError::Value`] for an unknown value.
    pub fn problem_type(&self) -> Result<Option<ProblemType>, ModelConfigError> {
        ProblemType::read(&self.0)
    }

    /// Returns the number of outputs of a classifier, as `transformers` reads it: the number of names in `id2label`, or
    /// else `num_labels`.
    #[must_use]
    pub fn num_labels(&self) -> Option<usize> {
        match self.0.get(ID2LABEL).and_then(Value::as_object) {
            Some(names) => Some(names.len()),
            None => self.0.get("num_labels").and_then(as_count),
        }
    }

    /// Returns whether the fields are from a text classifier of `transformers`, and not from a language model.
    #[must_use]
    pub fn is_sequence_classifier(&self) -> bool {
        is_sequence_classifier(&self.0)
    }

    /// Returns the fields of `generation_config.json`, which holds the special tokens for generation.
    pub(crate) fn generation_config(&self) -> Map<String, Value> {
        let mut fields = Map::new();
        fields.insert("_from_model_config".into(), true.into());
        for name in ["bos_token_id", "eos_token_id", "pad_token_id", "transformers_version"] {
            if let Some(value) = self.0.get(name).filter(|value| !value.is_null()) {
                fields.insert(name.into(), value.clone());
            }
        }
        fields
    }

    /// Checks the special tokens, which are used for generation.
    ///
    /// # Errors
    /// Returns [`ModelConfigError::Value`] if a special token is neither a token id nor null. `eos_token_id` may also
    /// be a list of ids.
    fn check_token_ids(&self) -> Result<(), ModelConfigError> {
        let is_id = |value: &Value| value.as_u64().is_some_and(|id| u32::try_from(id).is_ok());
        for name in ["bos_token_id", "eos_token_id", "pad_token_id"] {
            let fits = self.0.get(name).is_none_or(|value| match value {
                Value::Null => true,
                Value::Array(ids) => name == "eos_token_id" && ids.iter().all(is_id),
                id => is_id(id),
            });
            if !fits {
                return Err(ModelConfigError::value(name, &self.0[name], "a token id or null"));
            }
        }
        Ok(())
    }
}

/// Returns whether the fields of a `config.json` are from a text classifier of `transformers`, and not from a language
/// model.
#[must_use]
pub fn is_sequence_classifier(fields: &Map<String, Value>) -> bool {
    let all = fields.get("architectures").and_then(Value::as_array).into_iter().flatten();
    all.filter_map(Value::as_str).any(|name| name.ends_with("ForSequenceClassification"))
}

/// The names of the fields that a model reads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FieldNames {
    /// The names, in alphabetical order.
    pub(crate) read: &'static [&'static str],
    /// Aliases of these fields: `(alias, name)`.
    pub(crate) aliases: &'static [(&'static str, &'static str)],
}

impl FieldNames {
    /// Replaces aliases by the main names of the fields. Both names may be present if their values are equal.
    ///
    /// # Errors
    /// Returns [`ModelConfigError::Conflict`] if both names are given with different values.
    fn canonical(
        self,
        mut fields: Map<String, Value>,
    ) -> Result<Map<String, Value>, ModelConfigError> {
        for &(alias, name) in self.aliases {
            let Some(alias_value) = fields.remove(alias) else { continue };
            match fields.get(name) {
                Some(value) if *value != alias_value => {
                    let (value, alias_value) = (value.to_string(), alias_value.to_string());
                    return Err(ModelConfigError::Conflict { alias, alias_value, name, value });
                }
                _ => _ = fields.insert(name.to_owned(), alias_value),
            }
        }
        Ok(fields)
    }

    /// Returns the fields of a config with `overrides` applied.
    ///
    /// # Errors
    /// Returns an error if neither the model nor the config has a field with this name. Unknown fields are accepted in
    /// a checkpoint, but in an override they are a mistake.
    pub(crate) fn overridden(
        self,
        mut fields: Map<String, Value>,
        overrides: &Map<String, Value>,
    ) -> Result<Map<String, Value>, ModelConfigError> {
        for (name, value) in self.canonical(overrides.clone())? {
            if !self.has(&name) && !fields.contains_key(&name) {
                return Err(self.refusal(&name, &value));
            }
            fields.insert(name, value);
        }
        Ok(fields)
    }

    /// Returns whether a field with this name may be overridden.
    fn has(self, name: &str) -> bool {
        let is_fixed = FIXED.iter().any(|(fixed, _)| *fixed == name);
        self.read.contains(&name) || is_fixed || is_known(name)
    }

    /// Returns whether `name` looks like a misspelt field of the model.
    ///
    /// Names are compared by their optimal string alignment distance, which counts insertions, deletions, substitutions
    /// and transpositions of adjacent letters. The maximum distance is 1 for names with fewer than 8 letters and 2 for
    /// longer names.
    fn is_misspelt(self, name: &str) -> bool {
        let allowed = if name.len() < 8 { 1 } else { 2 };
        let aliases = self.aliases.iter().map(|(alias, _)| alias);
        let mut own = self.read.iter().chain(aliases);
        own.any(|own| strsim::osa_distance(name, own) <= allowed)
    }

    /// Returns the error for an unknown field.
    fn refusal(self, name: &str, value: &Value) -> ModelConfigError {
        let (name, value) = (name.to_owned(), value.to_string());
        ModelConfigError::Unknown { hint: self.nearest(&name), name, value }
    }

    /// Returns "; did you mean `x`?" with the known name that is most similar to `name`. If no name is similar, returns
    /// a list of all names that the model reads.
    ///
    /// Names are compared by Jaro-Winkler similarity, which favours a common prefix. The similarity must exceed 0.8.
    fn nearest(self, name: &str) -> String {
        let aliases = self.aliases.iter().map(|(alias, _)| alias);
        let known = self.read.iter().chain(aliases).chain(&NOT_TRAINED);
        known
            .map(|candidate| (strsim::jaro_winkler(name, candidate), candidate))
            .filter(|(similarity, _)| *similarity > 0.8)
            .max_by(|(a, _), (b, _)| a.total_cmp(b))
            .map(|(_, candidate)| format!("; did you mean `{candidate}`?"))
            .unwrap_or_else(|| format!("; remove it, or use one of {}", self.read.join(", ")))
    }
}

/// Returns whether a field is known not to affect training. `summary_*` fields configure heads of other tasks.
fn is_known(name: &str) -> bool {
    NOT_TRAINED.contains(&name) || name.starts_with("summary_")
}

/// The fields of a `config.json` that have not been read yet.
pub(crate) struct ConfigFields {
    /// The remaining fields. Reading a field removes it.
    fields: Map<String, Value>,
    /// The names that the model reads, for hints.
    names: FieldNames,
}

impl ConfigFields {
    /// Starts reading the fields of a model with the given `model_type`.
    ///
    /// # Errors
    /// Returns an error if the config belongs to another model, gives two values for one field, or enables an
    /// unsupported feature.
    pub(crate) fn new(
        fields: Map<String, Value>,
        names: FieldNames,
        model_type: &str,
    ) -> Result<Self, ModelConfigError> {
        let mut fields = names.canonical(fields)?;
        // Old files have no `model_type`. Another type means another model, whose fields would be misinterpreted.
        match fields.get("model_type") {
            None => {}
            Some(Value::String(kind)) if kind == model_type => {}
            Some(other) => {
                return Err(ModelConfigError::value(
                    "model_type",
                    other,
                    format!("\"{model_type}\""),
                ));
            }
        }
        for (name, remedy) in FIXED {
            if let Some(value) = fields.remove(name).filter(|value| !is_off(value)) {
                let value = value.to_string();
                return Err(ModelConfigError::Unsupported { name, value, remedy });
            }
        }
        Ok(Self { fields, names })
    }

    /// Takes the value of a field, or returns `default` if the field is missing.
    ///
    /// # Errors
    /// Returns [`ModelConfigError::Value`] if `read` rejects the value; `rule` describes the accepted values.
    pub(crate) fn take<T>(
        &mut self,
        name: &'static str,
        default: T,
        rule: &str,
        read: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<T, ModelConfigError> {
        match self.fields.remove(name) {
            None => Ok(default),
            Some(value) => read(&value).ok_or_else(|| ModelConfigError::value(name, value, rule)),
        }
    }

    /// Takes a non-negative integer. [`check_size`] checks its range.
    ///
    /// # Errors
    /// Returns [`ModelConfigError::Value`] if the value is not a non-negative integer.
    pub(crate) fn count(
        &mut self,
        name: &'static str,
        default: usize,
    ) -> Result<usize, ModelConfigError> {
        self.take(name, default, "a positive integer", as_count)
    }

    /// Takes a non-negative integer or null.
    ///
    /// # Errors
    /// Returns [`ModelConfigError::Value`] if the value is neither a non-negative integer nor null.
    pub(crate) fn optional_count(
        &mut self,
        name: &'static str,
    ) -> Result<Option<usize>, ModelConfigError> {
        self.take(name, None, "a positive integer or null", |value| match value {
            Value::Null => Some(None),
            value => as_count(value).map(Some),
        })
    }

    /// Takes a number.
    ///
    /// # Errors
    /// Returns [`ModelConfigError::Value`] if the value is not a JSON number.
    pub(crate) fn number(
        &mut self,
        name: &'static str,
        default: f64,
    ) -> Result<f64, ModelConfigError> {
        self.take(name, default, "a number", Value::as_f64)
    }

    /// Takes a boolean. 0 and 1 are rejected, because `transformers` writes `false` and `true`.
    ///
    /// # Errors
    /// Returns [`ModelConfigError::Value`] if the value is neither `true` nor `false`.
    pub(crate) fn flag(
        &mut self,
        name: &'static str,
        default: bool,
    ) -> Result<bool, ModelConfigError> {
        self.take(name, default, "true or false", Value::as_bool)
    }

    /// Returns the remaining fields, which the model does not use.
    ///
    /// # Errors
    /// Returns an error if a field looks like a misspelt field of the model, or a special token is not a token id.
    pub(crate) fn into_extra(self) -> Result<ExtraFields, ModelConfigError> {
        let Self { fields, names } = self;
        let mut unknown = fields.iter().filter(|(name, _)| !is_known(name));
        // An unknown field is kept. If a misspelt field were also kept, the model would silently use the default of
        // that field.
        if let Some((name, value)) = unknown.find(|(name, _)| names.is_misspelt(name)) {
            return Err(names.refusal(name, value));
        }
        let extra = ExtraFields(fields);
        extra.check_token_ids()?;
        Ok(extra)
    }
}

/// Returns the value if it is a non-negative integer that fits in a `usize`.
fn as_count(value: &Value) -> Option<usize> {
    value.as_u64().and_then(|count| usize::try_from(count).ok())
}

/// Returns whether the value of a fixed field means that the feature is off.
///
/// These values are null, false, 0 and an empty object. An empty list or string does not mean off.
fn is_off(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::Object(fields) => fields.is_empty(),
        _ => false,
    }
}

/// Checks the range of a width, a length or a number of layers.
///
/// # Errors
/// Returns [`ModelConfigError::Value`] if it is 0 or above `max`.
pub(crate) fn check_size(
    name: &'static str,
    value: usize,
    max: usize,
) -> Result<(), ModelConfigError> {
    if (1..=max).contains(&value) {
        return Ok(());
    }
    Err(ModelConfigError::value(name, value, format!("an integer from 1 to {max}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const NAMES: FieldNames =
        FieldNames { read: &["n_head", "n_positions"], aliases: &[("n_ctx", "n_positions")] };

    fn extra(fields: Value) -> Result<ExtraFields, ModelConfigError> {
        ConfigFields::new(fields.as_object().unwrap().clone(), NAMES, "test")?.into_extra()
    }

    #[test]
    fn unknown_fields_are_kept_unless_they_are_misspelt() {
        let fields = json!({"rope_theta": 1e4, "top_k": 3, "summary_x": 1, "n_heads_kv": 2});
        let kept = extra(fields.clone()).unwrap();
        assert_eq!(kept.unknown().collect::<Vec<_>>(), ["rope_theta", "n_heads_kv"]);
        assert_eq!(Value::from(kept.0), fields);
        for name in ["n_heads", "nhead", "n_cxt", "n_postions", "n_position"] {
            let message = extra(json!({ name: 1 })).unwrap_err().to_string();
            assert!(message.contains(&format!("unknown field `{name}`")), "{message}");
        }
    }

    #[test]
    fn overrides_must_be_known_or_replace_a_field() {
        let own = json!({"rope_theta": 1e4});
        let overridden = |fields: Value| {
            NAMES.overridden(own.as_object().unwrap().clone(), fields.as_object().unwrap())
        };
        assert_eq!(overridden(json!({"rope_theta": 2})).unwrap()["rope_theta"], 2);
        assert_eq!(overridden(json!({"n_ctx": 8})).unwrap()["n_positions"], 8);
        let message = overridden(json!({"dropout": 0.1})).unwrap_err().to_string();
        assert!(message.contains("unknown field `dropout`"), "{message}");
    }
}
