//! The fields of a `config.json` that are common to the models of `transformers`.
//!
//! Main types: [`ConfigFields`], which reads fields and checks them, and [`ExtraFields`], which keeps the others. A
//! field is one of four kinds: read by the model; *fixed*, accepted only with the value that means "off"; known to
//! change nothing about training; or unknown. The last two are kept and written back. A caller can warn of
//! [unknown](ExtraFields::unknown) ones. A name that looks like a misspelt field of the model is an error.

use serde_json::{Map, Value};
use thiserror::Error;

use super::class_names::{ClassNames, ClassNamesError};

/// The largest value of a width, length or vocabulary: products of two fit 64 bits with room.
pub(crate) const MAX_SIZE: usize = 1 << 24;
/// The largest number of layers. Each has a dozen parameters, which are listed before any is read.
pub(crate) const MAX_LAYERS: usize = 1 << 12;

/// The reason why a configuration is rejected.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ModelConfigError {
    /// The text is not a JSON object.
    #[error("the config is not a JSON object: {0}")]
    Syntax(String),
    /// A field of another type than the model's.
    #[error("{0}")]
    Field(String),
    /// A field that the model does not have.
    #[error("unknown field `{name}` (value {value}){hint}")]
    Unknown {
        /// The field.
        name: String,
        /// Its value, as JSON.
        value: String,
        /// "; did you mean ..?" with the nearest known name, or the names that are read.
        hint: String,
    },
    /// A value that is out of range or of the wrong type.
    #[error("`{name}` is {value}, but it must be {rule}")]
    Value {
        /// The field.
        name: &'static str,
        /// What was found.
        value: String,
        /// What is accepted.
        rule: String,
    },
    /// A value that `transformers` accepts and this implementation does not.
    #[error("`{name}` = {value} is not supported: {remedy}")]
    Unsupported {
        /// The field.
        name: &'static str,
        /// What was found.
        value: String,
        /// What to do about it.
        remedy: &'static str,
    },
    /// Two names of one field disagree.
    #[error(
        "`{alias}` is {alias_value} and `{name}` is {value}, but they name the same field; keep one"
    )]
    Conflict {
        /// The other name.
        alias: &'static str,
        /// Its value, as JSON.
        alias_value: String,
        /// The field.
        name: &'static str,
        /// Its value, as JSON.
        value: String,
    },
}

/// Constructors that several models use.
impl ModelConfigError {
    /// Returns the error of a value that breaks `rule`, which completes "it must be".
    pub(crate) fn value(name: &'static str, value: impl ToString, rule: impl Into<String>) -> Self {
        Self::Value { name, value: value.to_string(), rule: rule.into() }
    }
}

/// Fields whose features do not exist here: absent, null, false, 0 or empty, or refused.
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

/// Fields that change nothing about training: heads of other tasks, generation defaults, labels.
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

/// Fields of a `config.json` that the model does not read. They are written back as they are.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ExtraFields(pub(crate) Map<String, Value>);

impl ExtraFields {
    /// Returns the names of unknown fields. `transformers` may compute something else because of them.
    pub fn unknown(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str).filter(|name| !is_known(name))
    }

    /// Returns the tokens after which generation stops: `eos_token_id`, one or several.
    #[must_use]
    pub fn eos_token_ids(&self) -> Vec<u32> {
        let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
        match self.0.get("eos_token_id") {
            Some(Value::Array(ids)) => ids.iter().filter_map(id).collect(),
            Some(value) => id(value).into_iter().collect(),
            None => Vec::new(),
        }
    }

    /// Returns the names of classes that a classifier's `config.json` has; `None` if they are numbers.
    ///
    /// # Errors
    /// [`ClassNamesError`] for names that do not name each class from 0 once.
    pub fn class_names(&self) -> Result<Option<ClassNames>, ClassNamesError> {
        ClassNames::read(&self.0)
    }

    /// Returns the fields of `generation_config.json`: the special tokens that generation needs.
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

    /// Checks the special tokens, because generation uses them.
    ///
    /// # Errors
    /// [`ModelConfigError::Value`] for a special token that is not an id, null or, for `eos_token_id` alone, a list
    /// of ids.
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

/// The names of the fields that a model reads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FieldNames {
    /// Names in the order of the alphabet.
    pub(crate) read: &'static [&'static str],
    /// Other names of some of them: `(alias, name)`.
    pub(crate) aliases: &'static [(&'static str, &'static str)],
}

impl FieldNames {
    /// Renames aliases to the fields they stand for; both names are allowed if their values agree.
    ///
    /// # Errors
    /// [`ModelConfigError::Conflict`] if both names have values that differ.
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

    /// Returns the fields of a config with `overrides` in place of its own values.
    ///
    /// # Errors
    /// A name that neither the model nor the config has: in an override it is a mistake, unlike in a checkpoint.
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

    /// Returns whether a name may be set in place of a config's own value.
    fn has(self, name: &str) -> bool {
        let is_fixed = FIXED.iter().any(|(fixed, _)| *fixed == name);
        self.read.contains(&name) || is_fixed || is_known(name)
    }

    /// Returns whether `name` is at most a letter or two away from a field of the model.
    ///
    /// The distance counts insertions, deletions, substitutions and swaps of neighbours (optimal string
    /// alignment). Short names may differ in one letter, names of 8 and more in two.
    fn is_misspelt(self, name: &str) -> bool {
        let allowed = if name.len() < 8 { 1 } else { 2 };
        let aliases = self.aliases.iter().map(|(alias, _)| alias);
        let mut own = self.read.iter().chain(aliases);
        own.any(|own| strsim::osa_distance(name, own) <= allowed)
    }

    /// Returns the error of a name that the model does not have.
    fn refusal(self, name: &str, value: &Value) -> ModelConfigError {
        let (name, value) = (name.to_owned(), value.to_string());
        ModelConfigError::Unknown { hint: self.nearest(&name), name, value }
    }

    /// Returns "; did you mean `x`?" for the known name nearest to `name`. If none is near, returns all that are read.
    ///
    /// Names are compared by Jaro-Winkler similarity, which favours a common beginning; it has to exceed 0.8.
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

/// Returns whether a field is known to change nothing about training. `summary_*` configures heads of other tasks.
fn is_known(name: &str) -> bool {
    NOT_TRAINED.contains(&name) || name.starts_with("summary_")
}

/// The fields of a `config.json` that have not been read yet.
pub(crate) struct ConfigFields {
    /// The fields that are left; each reader takes its own.
    fields: Map<String, Value>,
    /// The names that the model reads, for hints.
    names: FieldNames,
}

impl ConfigFields {
    /// Takes the fields of a model of type `model_type`.
    ///
    /// # Errors
    /// Another model, two values of one field, or a feature that does not exist here.
    pub(crate) fn new(
        fields: Map<String, Value>,
        names: FieldNames,
        model_type: &str,
    ) -> Result<Self, ModelConfigError> {
        let mut fields = names.canonical(fields)?;
        // Old files have no type. Another type means another model, whose fields would be misread.
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

    /// Returns the value of a field, or `default` where it is absent.
    ///
    /// # Errors
    /// `read` does not take its value; `rule` says what it takes.
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

    /// Takes a number of something. [`check_size`] checks its range.
    ///
    /// # Errors
    /// [`ModelConfigError::Value`] for another value than an integer of at least 0.
    pub(crate) fn count(
        &mut self,
        name: &'static str,
        default: usize,
    ) -> Result<usize, ModelConfigError> {
        self.take(name, default, "a positive integer", as_count)
    }

    /// Takes a number of something that may be null.
    ///
    /// # Errors
    /// [`ModelConfigError::Value`] for another value than such an integer or null.
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
    /// [`ModelConfigError::Value`] for another value than a JSON number.
    pub(crate) fn number(
        &mut self,
        name: &'static str,
        default: f64,
    ) -> Result<f64, ModelConfigError> {
        self.take(name, default, "a number", Value::as_f64)
    }

    /// Takes a truth value. 0 and 1 are refused, as `transformers` writes `false` and `true`.
    ///
    /// # Errors
    /// [`ModelConfigError::Value`] for another value than `true` or `false`.
    pub(crate) fn flag(
        &mut self,
        name: &'static str,
        default: bool,
    ) -> Result<bool, ModelConfigError> {
        self.take(name, default, "true or false", Value::as_bool)
    }

    /// Returns the fields that the model does not read.
    ///
    /// # Errors
    /// A misspelt field of the model, or a special token that is not a token id.
    pub(crate) fn into_extra(self) -> Result<ExtraFields, ModelConfigError> {
        let Self { fields, names } = self;
        let mut unknown = fields.iter().filter(|(name, _)| !is_known(name));
        // An unknown field is kept, but a misspelt one of the model would silently have its default.
        if let Some((name, value)) = unknown.find(|(name, _)| names.is_misspelt(name)) {
            return Err(names.refusal(name, value));
        }
        let extra = ExtraFields(fields);
        extra.check_token_ids()?;
        Ok(extra)
    }
}

/// Returns a JSON number that is a count on this machine.
fn as_count(value: &Value) -> Option<usize> {
    value.as_u64().and_then(|count| usize::try_from(count).ok())
}

/// Returns whether the value of a fixed field means that its feature is off.
///
/// Such values are null, false, 0 and an empty object. An empty list or text is not off.
fn is_off(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::Object(fields) => fields.is_empty(),
        _ => false,
    }
}

/// Checks a width, a length or a number of layers.
///
/// # Errors
/// [`ModelConfigError::Value`] if it is 0 or above `max`.
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
