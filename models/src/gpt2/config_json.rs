//! Reads and writes the `config.json` of a GPT-2 model.
//!
//! [`ConfigFields`] checks the fields that are common to all models. This module defines the fields that GPT-2 reads
//! and writes.
//!
//! Reading and writing a config preserves its content. Fields that GPT-2 does not use are kept in `extra` and written
//! back. Missing fields have the defaults of `transformers`, so a file written by `transformers` describes the same
//! model in both libraries. Aliases are written under the main name of the field.

use std::str::FromStr;

use serde_json::{Map, Value, json};

use super::activation::Activation;
use super::config::Gpt2Config;
use crate::hf::{ConfigFields, FieldNames, ModelConfigError, read_fields};

/// The field names that GPT-2 reads.
const NAMES: FieldNames = FieldNames { read: &READ, aliases: &ALIASES };

/// Aliases of fields: the generic names of `transformers`, and the obsolete `n_ctx`.
const ALIASES: [(&str, &str); 5] = [
    ("hidden_size", "n_embd"),
    ("max_position_embeddings", "n_positions"),
    ("n_ctx", "n_positions"),
    ("num_attention_heads", "n_head"),
    ("num_hidden_layers", "n_layer"),
];

/// The fields that [`Gpt2Config`] has.
const READ: [&str; 16] = [
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

impl Gpt2Config {
    /// Returns the config with the `config.json` fields in `overrides` replaced.
    ///
    /// # Errors
    /// Returns the errors of reading a config: an unknown field name (the message suggests the nearest known one), a
    /// wrong type, a value out of range, or an unsupported feature.
    pub fn with_overrides(&self, overrides: &Map<String, Value>) -> Result<Self, ModelConfigError> {
        Self::try_from(NAMES.overridden(Map::from(self.clone()), overrides)?)
    }
}

impl FromStr for Gpt2Config {
    /// The first error found.
    type Err = ModelConfigError;

    /// Parses the text of a `config.json`. Missing fields have the defaults of `transformers`.
    ///
    /// # Errors
    /// Returns [`ModelConfigError::Syntax`] if the text is not a JSON object, or the error of an invalid field.
    fn from_str(text: &str) -> Result<Self, ModelConfigError> {
        Self::try_from(read_fields(text)?)
    }
}

impl TryFrom<Map<String, Value>> for Gpt2Config {
    /// The first invalid field.
    type Error = ModelConfigError;

    /// Reads the fields of a `config.json` and validates them together.
    ///
    /// # Errors
    /// Returns [`ModelConfigError`] if the config belongs to another model, a field has the wrong type or is out of
    /// range, a feature is unsupported, or a name is misspelt.
    fn try_from(fields: Map<String, Value>) -> Result<Self, ModelConfigError> {
        let mut fields = ConfigFields::new(fields, NAMES, "gpt2")?;
        let default = Self::small();
        let functions = format!("one of {}", Activation::ALL.map(Activation::name).join(", "));
        let function = |value: &Value| value.as_str().and_then(Activation::from_name);
        let config = Self {
            vocab_size: fields.count("vocab_size", default.vocab_size)?,
            n_positions: fields.count("n_positions", default.n_positions)?,
            n_embd: fields.count("n_embd", default.n_embd)?,
            n_layer: fields.count("n_layer", default.n_layer)?,
            n_head: fields.count("n_head", default.n_head)?,
            n_inner: fields.optional_count("n_inner")?,
            activation_function: fields.take(
                "activation_function",
                default.activation_function,
                &functions,
                function,
            )?,
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
            extra: fields.into_extra()?,
        };
        config.validate()?;
        Ok(config)
    }
}

impl From<Gpt2Config> for Map<String, Value> {
    /// Returns all fields sorted by name, the order in which `transformers` writes them.
    ///
    /// The result includes the fields that the model does not use. `model_type` and `add_cross_attention` always have
    /// GPT-2's values.
    fn from(config: Gpt2Config) -> Self {
        let mut fields = config.extra.0;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hf::ExtraFields;

    fn read(text: &str) -> Result<Gpt2Config, ModelConfigError> {
        text.parse()
    }

    /// The config of `openai-community/gpt2`, as published in 2019.
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
        let bare = Gpt2Config { extra: Gpt2Config::small().extra, ..config.clone() };
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
        let config = Gpt2Config { extra: ExtraFields::default(), ..Gpt2Config::small() };
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
    fn unknown_fields_are_written_back() {
        let config = read(r#"{"rope_theta": 1e4, "n_heads_kv": 2}"#).unwrap();
        assert_eq!(config.extra.unknown().collect::<Vec<_>>(), ["rope_theta", "n_heads_kv"]);
        assert_eq!(Map::from(config)["rope_theta"], 1e4);
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
        assert_eq!(config.extra, base.extra);
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
