//! Reading and writing the `config.json` of `transformers`.
//!
//! A field is one of four kinds: honoured (a field of [`Gpt2Config`]), fixed (accepted only with the
//! value that means "off"), carried (no concern of training; kept and written back) or unknown. The
//! last is an error with the nearest known name, so that no setting is dropped in silence.

use std::str::FromStr;

use serde_json::{Map, Value, json};

use super::activation::Activation;
use super::config::{Carried, ConfigError, Gpt2Config, value_error};

/// Other names of honoured fields: the generic ones of `transformers`, and the historical `n_ctx`.
const ALIASES: [(&str, &str); 5] = [
    ("hidden_size", "n_embd"),
    ("max_position_embeddings", "n_positions"),
    ("n_ctx", "n_positions"),
    ("num_attention_heads", "n_head"),
    ("num_hidden_layers", "n_layer"),
];

const HONOURED: [&str; 16] = [
    "activation_function",
    "attn_pdrop",
    "embd_pdrop",
    "initializer_range",
    "layer_norm_epsilon",
    "n_embd",
    "n_head",
    "n_inner",
    "n_layer",
    "n_positions",
    "reorder_and_upcast_attn",
    "resid_pdrop",
    "scale_attn_by_inverse_layer_idx",
    "scale_attn_weights",
    "tie_word_embeddings",
    "vocab_size",
];

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
const CARRIED: [&str; 57] = [
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

impl Gpt2Config {
    /// The config with `overrides`, fields of `config.json`, in place of its own values.
    ///
    /// # Errors
    /// As for reading: an unknown name (with the nearest known one), a wrong type or range, a
    /// feature that does not exist.
    pub fn with_overrides(&self, overrides: &Map<String, Value>) -> Result<Self, ConfigError> {
        let mut fields = Map::from(self.clone());
        for (name, value) in canonical_names(overrides.clone())? {
            fields.insert(name, value);
        }
        Self::try_from(fields)
    }
}

impl FromStr for Gpt2Config {
    type Err = ConfigError;

    /// Reads the text of a `config.json`. Absent fields have the defaults of `transformers`.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let fields: Map<String, Value> =
            serde_json::from_str(text).map_err(|error| ConfigError::Syntax(error.to_string()))?;
        Self::try_from(fields)
    }
}

impl TryFrom<Map<String, Value>> for Gpt2Config {
    type Error = ConfigError;

    fn try_from(fields: Map<String, Value>) -> Result<Self, ConfigError> {
        let mut fields = Fields(canonical_names(fields)?);
        fields.check_model_type()?;
        fields.check_fixed()?;
        let default = Self::small();
        let config = Self {
            vocab_size: fields.count("vocab_size", default.vocab_size)?,
            n_positions: fields.count("n_positions", default.n_positions)?,
            n_embd: fields.count("n_embd", default.n_embd)?,
            n_layer: fields.count("n_layer", default.n_layer)?,
            n_head: fields.count("n_head", default.n_head)?,
            n_inner: fields.optional_count("n_inner")?,
            activation_function: fields.activation(default.activation_function)?,
            resid_pdrop: fields.number("resid_pdrop", default.resid_pdrop)?,
            embd_pdrop: fields.number("embd_pdrop", default.embd_pdrop)?,
            attn_pdrop: fields.number("attn_pdrop", default.attn_pdrop)?,
            layer_norm_epsilon: fields.number("layer_norm_epsilon", default.layer_norm_epsilon)?,
            initializer_range: fields.number("initializer_range", default.initializer_range)?,
            scale_attn_weights: fields.flag("scale_attn_weights", default.scale_attn_weights)?,
            scale_attn_by_inverse_layer_idx: fields
                .flag("scale_attn_by_inverse_layer_idx", default.scale_attn_by_inverse_layer_idx)?,
            reorder_and_upcast_attn: fields
                .flag("reorder_and_upcast_attn", default.reorder_and_upcast_attn)?,
            tie_word_embeddings: fields.flag("tie_word_embeddings", default.tie_word_embeddings)?,
            carried: fields.into_carried()?,
        };
        config.validate()?;
        Ok(config)
    }
}

impl From<Gpt2Config> for Map<String, Value> {
    /// All fields, sorted by name as `transformers` writes them.
    fn from(config: Gpt2Config) -> Self {
        let mut fields = config.carried.0;
        let own = [
            ("activation_function", json!(config.activation_function.name())),
            ("add_cross_attention", json!(false)),
            ("attn_pdrop", json!(config.attn_pdrop)),
            ("embd_pdrop", json!(config.embd_pdrop)),
            ("initializer_range", json!(config.initializer_range)),
            ("layer_norm_epsilon", json!(config.layer_norm_epsilon)),
            ("model_type", json!("gpt2")),
            ("n_embd", json!(config.n_embd)),
            ("n_head", json!(config.n_head)),
            ("n_inner", json!(config.n_inner)),
            ("n_layer", json!(config.n_layer)),
            ("n_positions", json!(config.n_positions)),
            ("reorder_and_upcast_attn", json!(config.reorder_and_upcast_attn)),
            ("resid_pdrop", json!(config.resid_pdrop)),
            ("scale_attn_by_inverse_layer_idx", json!(config.scale_attn_by_inverse_layer_idx)),
            ("scale_attn_weights", json!(config.scale_attn_weights)),
            ("tie_word_embeddings", json!(config.tie_word_embeddings)),
            ("vocab_size", json!(config.vocab_size)),
        ];
        fields.extend(own.map(|(name, value)| (name.to_owned(), value)));
        fields.sort_keys();
        fields
    }
}

/// Renames aliases to the fields they stand for; both names are fine when they agree.
fn canonical_names(mut fields: Map<String, Value>) -> Result<Map<String, Value>, ConfigError> {
    for (alias, name) in ALIASES {
        let Some(alias_value) = fields.remove(alias) else { continue };
        match fields.get(name) {
            Some(value) if *value != alias_value => {
                let (value, alias_value) = (value.to_string(), alias_value.to_string());
                return Err(ConfigError::Conflict { alias, alias_value, name, value });
            }
            _ => _ = fields.insert(name.to_owned(), alias_value),
        }
    }
    Ok(fields)
}

/// The fields that have not been read yet.
struct Fields(Map<String, Value>);

impl Fields {
    fn take<T>(
        &mut self,
        name: &'static str,
        default: T,
        rule: &str,
        read: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<T, ConfigError> {
        match self.0.remove(name) {
            None => Ok(default),
            Some(value) => read(&value).ok_or_else(|| value_error(name, value, rule)),
        }
    }

    fn count(&mut self, name: &'static str, default: usize) -> Result<usize, ConfigError> {
        self.take(name, default, "a positive integer", as_count)
    }

    fn optional_count(&mut self, name: &'static str) -> Result<Option<usize>, ConfigError> {
        self.take(name, None, "a positive integer or null", |value| match value {
            Value::Null => Some(None),
            value => as_count(value).map(Some),
        })
    }

    fn number(&mut self, name: &'static str, default: f64) -> Result<f64, ConfigError> {
        self.take(name, default, "a number", Value::as_f64)
    }

    fn flag(&mut self, name: &'static str, default: bool) -> Result<bool, ConfigError> {
        self.take(name, default, "true or false", Value::as_bool)
    }

    fn activation(&mut self, default: Activation) -> Result<Activation, ConfigError> {
        let rule = format!("one of {}", Activation::ALL.map(Activation::name).join(", "));
        let read = |value: &Value| value.as_str().and_then(Activation::from_name);
        self.take("activation_function", default, &rule, read)
    }

    fn check_model_type(&self) -> Result<(), ConfigError> {
        match self.0.get("model_type") {
            None => Ok(()),
            Some(Value::String(kind)) if kind == "gpt2" => Ok(()),
            Some(other) => Err(value_error("model_type", other, "\"gpt2\"")),
        }
    }

    fn check_fixed(&mut self) -> Result<(), ConfigError> {
        for (name, remedy) in FIXED {
            match self.0.remove(name) {
                Some(value) if !is_off(&value) => {
                    let value = value.to_string();
                    return Err(ConfigError::Unsupported { name, value, remedy });
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// What is left must be carried; of it, token ids are used, so they are checked.
    fn into_carried(self) -> Result<Carried, ConfigError> {
        for (name, value) in &self.0 {
            if !CARRIED.contains(&name.as_str()) && !name.starts_with("summary_") {
                let (name, value) = (name.clone(), value.to_string());
                return Err(ConfigError::Unknown { hint: nearest(&name), name, value });
            }
        }
        let is_id = |value: &Value| value.as_u64().is_some_and(|id| u32::try_from(id).is_ok());
        for name in ["bos_token_id", "eos_token_id", "pad_token_id"] {
            let fits = self.0.get(name).is_none_or(|value| match value {
                Value::Null => true,
                Value::Array(ids) => name == "eos_token_id" && ids.iter().all(is_id),
                id => is_id(id),
            });
            if !fits {
                return Err(value_error(name, &self.0[name], "a token id or null"));
            }
        }
        Ok(Carried(self.0))
    }
}

fn as_count(value: &Value) -> Option<usize> {
    value.as_u64().and_then(|count| usize::try_from(count).ok())
}

fn is_off(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::Object(fields) => fields.is_empty(),
        _ => false,
    }
}

/// "; did you mean `x`?" for the known name nearest to `name`, if one is near.
fn nearest(name: &str) -> String {
    let known = HONOURED.iter().chain(ALIASES.iter().map(|(alias, _)| alias)).chain(&CARRIED);
    known
        .map(|candidate| (strsim::jaro_winkler(name, candidate), candidate))
        .filter(|(similarity, _)| *similarity > 0.8)
        .max_by(|(a, _), (b, _)| a.total_cmp(b))
        .map(|(_, candidate)| format!("; did you mean `{candidate}`?"))
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Gpt2Config, ConfigError> {
        text.parse()
    }

    /// `openai-community/gpt2` as it was published in 2019.
    const PUBLISHED: &str = r#"{
        "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1, "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256,
        "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "gpt2",
        "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024,
        "resid_pdrop": 0.1, "summary_activation": null, "summary_first_dropout": 0.1,
        "summary_proj_to_labels": true, "summary_type": "cls_index", "summary_use_proj": true,
        "task_specific_params": {"text-generation": {"do_sample": true, "max_length": 50}},
        "vocab_size": 50257
    }"#;

    #[test]
    fn the_published_config_is_small() {
        let config = read(PUBLISHED).unwrap();
        let bare = Gpt2Config { carried: Gpt2Config::small().carried, ..config.clone() };
        assert_eq!(bare, Gpt2Config::small());
        assert_eq!(config.eos_token_ids(), [50256]);
        let written = Map::from(config.clone());
        assert_eq!(written["task_specific_params"]["text-generation"]["max_length"], 50);
        assert_eq!(written.keys().collect::<Vec<_>>(), {
            let mut names: Vec<_> = written.keys().collect();
            names.sort();
            names
        });
        assert_eq!(Gpt2Config::try_from(written).unwrap(), config);
    }

    #[test]
    fn an_empty_object_is_the_default() {
        let config = Gpt2Config { carried: Carried::default(), ..Gpt2Config::small() };
        assert_eq!(read("{}").unwrap(), config);
    }

    #[test]
    fn serde_goes_through_the_same_checks() {
        let config: Gpt2Config = serde_json::from_str(PUBLISHED).unwrap();
        let text = serde_json::to_string(&config).unwrap();
        assert_eq!(serde_json::from_str::<Gpt2Config>(&text).unwrap(), config);
        let error = serde_json::from_str::<Gpt2Config>(r#"{"n_layers": 2}"#).unwrap_err();
        assert!(error.to_string().contains("did you mean `n_layer`?"), "{error}");
    }

    #[test]
    fn refusals_name_field_value_and_remedy() {
        let table = [
            ("[]", "not a JSON object"),
            ("{\"n_embd\": 7", "not a JSON object"),
            (r#"{"n_embd": "768"}"#, "`n_embd` is \"768\", but it must be a positive integer"),
            (r#"{"n_embd": 768.5}"#, "`n_embd` is 768.5"),
            (r#"{"n_embd": null}"#, "`n_embd` is null"),
            (r#"{"n_embd": -768}"#, "`n_embd` is -768"),
            (r#"{"n_embd": 1e300}"#, "`n_embd` is"),
            (r#"{"n_embd": 99999999999999}"#, "from 1 to 16777216"),
            (r#"{"n_embd": 770}"#, "`n_head` is 12, but it must be a divisor of `n_embd` = 770"),
            (r#"{"n_layer": 0}"#, "`n_layer` is 0"),
            (r#"{"n_inner": "auto"}"#, "`n_inner` is \"auto\""),
            (r#"{"activation_function": "gelu_fast"}"#, "must be one of gelu_new, gelu_pytorch"),
            (r#"{"activation_function": 3}"#, "`activation_function` is 3"),
            (r#"{"resid_pdrop": 1}"#, "a probability in [0, 1)"),
            (r#"{"attn_pdrop": "0.1"}"#, "`attn_pdrop` is \"0.1\", but it must be a number"),
            (r#"{"layer_norm_epsilon": -1e-5}"#, "`layer_norm_epsilon`"),
            (r#"{"layer_norm_epsilon": 1e-60}"#, "`layer_norm_epsilon`"),
            (r#"{"tie_word_embeddings": 1}"#, "true or false"),
            (
                r#"{"model_type": "gpt_neo"}"#,
                "`model_type` is \"gpt_neo\", but it must be \"gpt2\"",
            ),
            (r#"{"model_type": null}"#, "`model_type` is null"),
            (r#"{"add_cross_attention": true}"#, "`add_cross_attention` = true is not supported"),
            (r#"{"quantization_config": {"bits": 4}}"#, "dequantise and save again"),
            (r#"{"pruned_heads": {"1": [0]}}"#, "`pruned_heads` = {\"1\":[0]} is not supported"),
            (r#"{"chunk_size_feed_forward": 64}"#, "set it to 0"),
            (r#"{"auto_map": {"AutoConfig": "x"}}"#, "remove it"),
            (r#"{"n_heads": 12}"#, "unknown field `n_heads` (value 12); did you mean `n_head`?"),
            (r#"{"vocabsize": 1}"#, "did you mean `vocab_size`?"),
            (r#"{"rope_theta": 1e4}"#, "unknown field `rope_theta`"),
            (r#"{"n_ctx": 512, "n_positions": 1024}"#, "`n_ctx` is 512 and `n_positions` is 1024"),
            (r#"{"hidden_size": 8, "n_embd": 16}"#, "keep one"),
            (r#"{"eos_token_id": "</s>"}"#, "`eos_token_id` is \"</s>\""),
            (r#"{"bos_token_id": [1]}"#, "`bos_token_id` is [1]"),
            (r#"{"eos_token_id": [1, -1]}"#, "`eos_token_id` is [1,-1]"),
        ];
        for (text, expected) in table {
            let message = read(text).expect_err(text).to_string();
            assert!(message.contains(expected), "{text}: {message}");
        }
    }

    #[test]
    fn features_that_are_off_are_accepted() {
        let text = r#"{"add_cross_attention": false, "pruned_heads": {}, "auto_map": null,
            "chunk_size_feed_forward": 0, "eos_token_id": [1, 2], "pad_token_id": null}"#;
        assert_eq!(read(text).unwrap().eos_token_ids(), [1, 2]);
    }

    #[test]
    fn generic_names_are_understood() {
        let config = read(
            r#"{"hidden_size": 48, "num_attention_heads": 4, "num_hidden_layers": 3,
                "max_position_embeddings": 64, "n_embd": 48}"#,
        )
        .unwrap();
        let sizes = (config.n_embd, config.n_head, config.n_layer, config.n_positions);
        assert_eq!(sizes, (48, 4, 3, 64));
    }

    #[test]
    fn overrides_replace_and_are_checked() {
        let base = read(PUBLISHED).unwrap();
        let map = |value: Value| value.as_object().unwrap().clone();
        let changed = json!({"attn_pdrop": 0.0, "n_ctx": 512, "n_inner": 40, "hidden_size": 24});
        let config = base.with_overrides(&map(changed)).unwrap();
        let sizes = (config.n_positions, config.n_inner, config.n_embd, config.attn_pdrop);
        assert_eq!(sizes, (512, Some(40), 24, 0.0));
        assert_eq!(config.carried, base.carried);
        for (overrides, expected) in [
            (json!({"dropout": 0.1}), "unknown field `dropout`"),
            (json!({"resid_drop": 0.1}), "did you mean `resid_pdrop`?"),
            (json!({"n_head": 5}), "a divisor of `n_embd` = 768"),
        ] {
            let message = base.with_overrides(&map(overrides)).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        }
    }
}
