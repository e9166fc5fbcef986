//! The `generation_config.json` of a model folder, which configures text generation in
//! `transformers`.
//!
//! Main type: [`GenerationConfig`]. Its `eos_token_id` replaces the one in `config.json`, as in
//! `transformers`. [`GenerationValues`] are the defaults of options. All other fields are kept, so
//! that fine-tuning can export the file unchanged. [`GenerationConfig::unapplied`] lists those that
//! change what `transformers` generates.

use std::path::Path;

use serde_json::{Map, Value};

use super::config_error::ModelConfigError;
use super::error::ModelFolderError;
use super::small_file::{read_fields, read_small_file};

/// The name of the file that configures text generation in `transformers`.
pub const GENERATION_CONFIG: &str = "generation_config.json";

/// The number of most likely tokens that `transformers` samples from if nothing else is set.
pub const DEFAULT_TOP_K: usize = 50;

/// Fields that are read.
const APPLIED: [&str; 9] = [
    "do_sample",
    "eos_token_id",
    "max_length",
    "max_new_tokens",
    "min_p",
    "repetition_penalty",
    "temperature",
    "top_k",
    "top_p",
];

/// Fields that only affect sampling, with the value that has no effect.
const SAMPLING: [(&str, f64); 3] =
    [("typical_p", 1.0), ("epsilon_cutoff", 0.0), ("eta_cutoff", 0.0)];

/// Other fields for which 1 has no effect.
const NEUTRAL_AT_ONE: [&str; 5] = [
    "encoder_repetition_penalty",
    "num_beams",
    "num_beam_groups",
    "num_return_sequences",
    "guidance_scale",
];

/// Fields that do not change the generated tokens, or only if another listed field is set.
const WITHOUT_EFFECT: [&str; 32] = [
    "_commit_hash",
    "_from_model_config",
    "assistant_confidence_threshold",
    "assistant_early_exit",
    "assistant_lookbehind",
    "bos_token_id",
    "cache_config",
    "cache_implementation",
    "compile_config",
    "decoder_start_token_id",
    "disable_compile",
    "early_stopping",
    "is_assistant",
    "length_penalty",
    "low_memory",
    "max_matching_ngram_size",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "output_attentions",
    "output_hidden_states",
    "output_logits",
    "output_scores",
    "pad_token_id",
    "prefill_chunk_size",
    "prompt_lookup_num_tokens",
    "remove_invalid_values",
    "renormalize_logits",
    "return_dict_in_generate",
    "return_legacy_cache",
    "target_lookbehind",
    "transformers_version",
    "use_cache",
];

/// Values that decide how tokens are chosen, and how many. `None` stands for a field that is absent
/// or null. Ranges are not checked.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GenerationValues {
    /// Whether tokens are sampled. If they are, `top_k` is [`DEFAULT_TOP_K`] unless the field is
    /// present.
    pub do_sample: Option<bool>,
    /// The divisor of the logits.
    pub temperature: Option<f64>,
    /// The number of most likely tokens to keep; 0 keeps all.
    pub top_k: Option<usize>,
    /// The total probability of the most likely tokens to keep.
    pub top_p: Option<f64>,
    /// The smallest probability to keep, relative to the most likely token.
    pub min_p: Option<f64>,
    /// The divisor of the positive logits of tokens that occurred before.
    pub repetition_penalty: Option<f64>,
    /// The maximum number of new tokens. It takes precedence over `max_length`.
    pub max_new_tokens: Option<usize>,
    /// The maximum number of tokens, including the prompt.
    pub max_length: Option<usize>,
}

impl GenerationValues {
    /// Reads the values.
    ///
    /// # Errors
    /// Returns [`ModelConfigError::Value`] if one has another type.
    fn new(fields: &Map<String, Value>) -> Result<Self, ModelConfigError> {
        let number = |name| value(fields, name, "a number or null", Value::as_f64);
        let count = |name| {
            let whole = |it: &Value| it.as_u64().and_then(|it| usize::try_from(it).ok());
            value(fields, name, "a whole number, at least 0, or null", whole)
        };
        Ok(Self {
            do_sample: value(fields, "do_sample", "true, false or null", Value::as_bool)?,
            temperature: number("temperature")?,
            top_k: count("top_k")?,
            top_p: number("top_p")?,
            min_p: number("min_p")?,
            repetition_penalty: number("repetition_penalty")?,
            max_new_tokens: count("max_new_tokens")?,
            max_length: count("max_length")?,
        })
    }
}

/// Returns a field; `None` if it is absent or null.
///
/// # Errors
/// Returns [`ModelConfigError::Value`] if `read` does not accept it.
fn value<T>(
    fields: &Map<String, Value>,
    name: &'static str,
    rule: &str,
    read: impl Fn(&Value) -> Option<T>,
) -> Result<Option<T>, ModelConfigError> {
    match fields.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(found) => {
            let wrong = || ModelConfigError::value(name, found, rule);
            read(found).map(Some).ok_or_else(wrong)
        }
    }
}

/// The fields of a `generation_config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerationConfig {
    /// All fields.
    fields: Map<String, Value>,
    /// The end tokens; `None` if the file does not name any.
    eos_token_ids: Option<Vec<u32>>,
    /// The values that decide how tokens are chosen.
    values: GenerationValues,
}

impl GenerationConfig {
    /// Reads the file in a model folder. Returns `None` if the folder does not have one.
    ///
    /// # Errors
    /// Returns [`ModelFolderError`] naming the file if it cannot be read, is not a JSON object, or
    /// has a field of another type, such as an `eos_token_id` that is neither a token id, a list of
    /// token ids nor null.
    pub fn read(folder: &Path) -> Result<Option<Self>, ModelFolderError> {
        let path = folder.join(GENERATION_CONFIG);
        if !path.exists() {
            return Ok(None);
        }
        let text = read_small_file(&path).map_err(|e| ModelFolderError::io("read", &path, e))?;
        let config = read_fields(&text).and_then(Self::new);
        config.map(Some).map_err(|source| ModelFolderError::Config { path, source })
    }

    /// Reads the fields that are used.
    ///
    /// # Errors
    /// Returns [`ModelConfigError::Value`] if one has another form.
    pub fn new(fields: Map<String, Value>) -> Result<Self, ModelConfigError> {
        let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
        let rule = "a token id, a list of token ids or null";
        let eos_token_ids = value(&fields, "eos_token_id", rule, |found| match found {
            Value::Array(ids) => ids.iter().map(id).collect::<Option<Vec<_>>>(),
            found => id(found).map(|id| vec![id]),
        })?;
        let values = GenerationValues::new(&fields)?;
        Ok(Self { fields, eos_token_ids, values })
    }

    //= transformers 5.23.0 generation/configuration_utils.py eos_token_id
    /// Returns the tokens after which generation stops; `None` if the file does not name any.
    #[must_use]
    pub fn eos_token_ids(&self) -> Option<&[u32]> {
        self.eos_token_ids.as_deref()
    }

    /// Returns the values that decide how tokens are chosen, and how many.
    #[must_use]
    pub fn values(&self) -> &GenerationValues {
        &self.values
    }

    /// Returns all fields, in the order of the file.
    #[must_use]
    pub fn fields(&self) -> &Map<String, Value> {
        &self.fields
    }

    /// Returns the names of the fields that change what `transformers` generates, except for the
    /// end tokens, for [`GenerationValues`] and for `given`, the fields that options of the caller
    /// replace.
    ///
    /// `samples` is whether the caller samples. Fields of sampling have an effect only then.
    /// Unknown fields are listed, because they might have an effect.
    #[must_use]
    pub fn unapplied(&self, given: &[&str], samples: bool) -> Vec<&str> {
        let changes = |name: &str, value: &Value| {
            // 0 does not turn them off: `typical_p`, for example, is neutral at 1.
            if let Some((_, neutral)) = SAMPLING.iter().find(|(field, _)| *field == name) {
                return samples && value.as_f64() != Some(*neutral);
            }
            let is_neutral = NEUTRAL_AT_ONE.contains(&name) && value.as_f64() == Some(1.0);
            !is_neutral && !is_off(value)
        };
        let listed = self.fields.iter().filter(|(name, value)| {
            let name = name.as_str();
            let is_known = APPLIED.contains(&name) || WITHOUT_EFFECT.contains(&name);
            !is_known && !given.contains(&name) && changes(name, value)
        });
        listed.map(|(name, _)| name.as_str()).collect()
    }
}

/// Returns whether a value turns a feature off: false, 0 or empty.
fn is_off(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Bool(on) => !on,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn config(value: Value) -> Result<GenerationConfig, ModelConfigError> {
        GenerationConfig::new(value.as_object().unwrap().clone())
    }

    //= transformers 5.23.0 generation/configuration_utils.py eos_token_id
    #[test]
    fn end_tokens_are_one_id_or_a_list() {
        for (value, expected) in [
            (json!({"eos_token_id": 7}), Some(vec![7])),
            (json!({"eos_token_id": [128001, 128009]}), Some(vec![128001, 128009])),
            (json!({"eos_token_id": []}), Some(vec![])),
            (json!({"eos_token_id": null}), None),
            (json!({"bos_token_id": 1}), None),
        ] {
            let found = config(value.clone()).unwrap();
            assert_eq!(found.eos_token_ids(), expected.as_deref(), "{value}");
        }
        for wrong in [json!("</s>"), json!([1, "</s>"]), json!(-1), json!(1.5), json!(1_u64 << 32)]
        {
            let message = config(json!({"eos_token_id": wrong})).unwrap_err().to_string();
            assert!(message.contains("a token id, a list of token ids or null"), "{message}");
        }
    }

    #[test]
    fn values_are_read() {
        let values = |fields: Value| config(fields).map(|config| *config.values());
        let all = json!({
            "do_sample": true, "temperature": 0.6, "top_k": 40, "top_p": 1, "min_p": 0.05,
            "repetition_penalty": 1.1, "max_new_tokens": 64, "max_length": null,
        });
        let expected = GenerationValues {
            do_sample: Some(true),
            temperature: Some(0.6),
            top_k: Some(40),
            top_p: Some(1.0),
            min_p: Some(0.05),
            repetition_penalty: Some(1.1),
            max_new_tokens: Some(64),
            max_length: None,
        };
        assert_eq!(values(all), Ok(expected));
        assert_eq!(values(json!({"eos_token_id": 1})), Ok(GenerationValues::default()));
        for (name, wrong) in [
            ("do_sample", json!("yes")),
            ("temperature", json!("hot")),
            ("top_k", json!(-1)),
            ("top_k", json!(1.5)),
            ("max_length", json!([20])),
        ] {
            let message = values(json!({name: wrong})).unwrap_err().to_string();
            assert!(message.starts_with(&format!("`{name}` is ")), "{message}");
        }
    }

    #[test]
    fn fields_that_would_change_the_output_are_listed() {
        let llama = json!({
            "_from_model_config": true, "bos_token_id": 1, "do_sample": true, "eos_token_id": [2, 3],
            "max_length": 4096, "pad_token_id": 0, "temperature": 0.6, "top_p": 0.9,
            "transformers_version": "4.42.3",
        });
        let neutral = json!({
            "typical_p": 1.0, "num_beams": 1, "no_repeat_ngram_size": 0, "suppress_tokens": [],
            "min_length": null, "length_penalty": 2.0,
        });
        let sampled = json!({"typical_p": 0.9, "epsilon_cutoff": 0.1, "eta_cutoff": 0.0});
        let others = json!({
            "repetition_penalty": 1.05, "num_beams": 4, "bad_words_ids": [[5]], "stop_strings": "\n",
            "a_later_field": 3, "renormalize_logits": true,
        });
        for (value, given, samples, expected) in [
            (&llama, &[][..], true, &[][..]),
            (&neutral, &[], true, &[]),
            (&sampled, &[], false, &[]),
            (&sampled, &[], true, &["typical_p", "epsilon_cutoff"]),
            (&others, &[], false, &["num_beams", "bad_words_ids", "stop_strings", "a_later_field"]),
            (&others, &["stop_strings"], true, &["num_beams", "bad_words_ids", "a_later_field"]),
        ] {
            let config = config(value.clone()).unwrap();
            assert_eq!(config.unapplied(given, samples), expected, "{value}");
        }
    }

    #[test]
    fn a_damaged_file_is_named() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(GenerationConfig::read(folder.path()).unwrap(), None);
        for text in ["", "[]", "{\"eos_token_id\": \"end\"}"] {
            std::fs::write(folder.path().join(GENERATION_CONFIG), text).unwrap();
            let message = GenerationConfig::read(folder.path()).unwrap_err().to_string();
            assert!(message.contains("generation_config.json: "), "{message}");
        }
    }
}
