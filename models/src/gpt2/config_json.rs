//! Reads and writes the `config.json` of a GPT-2 model.
//!
//! [`ConfigFields`] checks the fields that are common to all models. This module defines the fields
//! that GPT-2 reads and writes.
//!
//! Reading and writing a config preserves its content. Fields that do not change what GPT-2
//! computes are kept in `extra` and written back. Missing fields have the defaults of
//! `transformers`, so a file written by `transformers` describes the same model in both libraries.
//! Aliases are written under the main name of the field.

use serde_json::{Map, Value, json};

use super::config::Gpt2Config;
use crate::activation::Activation;
use crate::architecture::SavedConfig;
use crate::decoder::{DecoderConfig, DecoderParts};
use crate::hf::{Accepted, ConfigFields, ExtraFields, FieldNames, FixedField, ModelConfigError};

/// The field names that GPT-2 knows.
const NAMES: FieldNames =
    FieldNames { read: &[&READ], aliases: &ALIASES, harmless: &HARMLESS, fixed: &FIXED };

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

/// Fields of GPT-2 that do not change what the language model and the classifier compute: they
/// configure the heads of other tasks. `n_special` and `predict_special_tokens` are GPT's.
const HARMLESS: [&str; 10] = [
    "classifier_dropout",
    "hidden_dropout",
    "n_special",
    "predict_special_tokens",
    "summary_activation",
    "summary_first_dropout",
    "summary_last_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
];

/// Fields that change nothing at one value.
const FIXED: [FixedField; 1] = [FixedField {
    name: "is_causal",
    accepted: Accepted::True,
    remedy: "GPT-2's attention is causal; set it to true",
}];

impl DecoderConfig for Gpt2Config {
    const MODEL_TYPE: &'static str = "gpt2";
    const NAME: &'static str = "Gpt2";
    const CLASS: &'static str = "GPT2LMHeadModel";
    const MAX_LEN_FIELD: &'static str = "n_positions";
    const FIELDS: FieldNames = NAMES;

    /// Returns GPT-2 small, 124 million parameters.
    fn default_size() -> Self {
        Self::small()
    }

    fn from_known(fields: Map<String, Value>) -> Result<Self, ModelConfigError> {
        let mut fields = ConfigFields::new(fields, NAMES, "gpt2")?;
        let default = Self::small();
        Ok(Self {
            vocab_size: fields.count("vocab_size", default.vocab_size)?,
            n_positions: fields.count("n_positions", default.n_positions)?,
            n_embd: fields.count("n_embd", default.n_embd)?,
            n_layer: fields.count("n_layer", default.n_layer)?,
            n_head: fields.count("n_head", default.n_head)?,
            n_inner: fields.optional_count("n_inner")?,
            activation_function: Activation::read(
                &mut fields,
                "activation_function",
                default.activation_function,
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
        })
    }

    fn to_fields(&self) -> Map<String, Value> {
        Map::from(self.clone())
    }

    fn check_values(&self) -> Result<(), ModelConfigError> {
        Self::check_values(self)
    }

    fn parts(&self) -> DecoderParts {
        self.decoder_parts()
    }

    fn set_vocab_size(&mut self, vocab_size: usize) {
        self.vocab_size = vocab_size;
    }

    fn extra(&self) -> &ExtraFields {
        &self.extra
    }
}

impl TryFrom<Map<String, Value>> for Gpt2Config {
    /// The first invalid field.
    type Error = ModelConfigError;

    /// Reads the fields of a `config.json` and validates them together.
    ///
    /// # Errors
    /// Returns [`ModelConfigError`] if the config belongs to another model, a field has the wrong
    /// type or is out of range, or a field that is not read may change what the model computes.
    fn try_from(fields: Map<String, Value>) -> Result<Self, ModelConfigError> {
        Self::from_fields(fields)
    }
}

impl From<Gpt2Config> for Map<String, Value> {
    /// Returns all fields sorted by name, the order in which `transformers` writes them.
    ///
    /// The result includes the fields that the model does not read. `model_type` and
    /// `add_cross_attention` are always written.
    fn from(config: Gpt2Config) -> Self {
        let mut fields = config.extra.0;
        // A value that was not accepted is kept until it is refused or removed.
        fields.entry("add_cross_attention").or_insert(json!(false));
        let own = [
            ("activation_function", json!(config.activation_function.name())),
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
    use crate::architecture::LanguageModelConfig;
    use crate::hf::{ExtraFields, read_fields};

    fn read(text: &str) -> Result<Gpt2Config, ModelConfigError> {
        Gpt2Config::try_from(read_fields(text)?)
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
            (
                r#"{"n_embd": "768"}"#,
                "`n_embd` is \"768\", but it must be a positive integer; write 768",
            ),
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
            (
                r#"{"attn_pdrop": "0.1"}"#,
                "`attn_pdrop` is \"0.1\", but it must be a number; write 0.1",
            ),
            (r#"{"layer_norm_epsilon": -1e-5}"#, "`layer_norm_epsilon`"),
            (r#"{"layer_norm_epsilon": 1e-60}"#, "`layer_norm_epsilon`"),
            (r#"{"tie_word_embeddings": 1}"#, "true or false"),
            (
                r#"{"model_type": "gpt_neo"}"#,
                "`model_type` is \"gpt_neo\", but it must be \"gpt2\"",
            ),
            (r#"{"model_type": null}"#, "`model_type` is null"),
            (r#"{"add_cross_attention": true}"#, "`add_cross_attention` = true is not supported"),
            (r#"{"quantization_config": {"bits": 4}}"#, "dequantize and save again"),
            (r#"{"pruned_heads": {"1": [0]}}"#, "`pruned_heads` = {\"1\":[0]} is not supported"),
            (r#"{"chunk_size_feed_forward": 64}"#, "set it to 0"),
            (r#"{"auto_map": {"AutoConfig": "x"}}"#, "set it to null"),
            (r#"{"n_heads": 12}"#, "unknown field `n_heads` (value 12); did you mean `n_head`?"),
            (r#"{"vocabsize": 1}"#, "did you mean `vocab_size`?"),
            (r#"{"n_ctx": 512, "n_positions": 1024}"#, "`n_ctx` is 512 and `n_positions` is 1024"),
            (r#"{"hidden_size": 8, "n_embd": 16}"#, "keep one"),
            (r#"{"scale_attn_weights": "True"}"#, "it must be true or false; write true"),
            (r#"{"eos_token_id": "3"}"#, "it must be a token id or null; write 3"),
            (r#"{"eos_token_id": "</s>"}"#, "`eos_token_id` is \"</s>\""),
            (r#"{"bos_token_id": [1]}"#, "`bos_token_id` is [1]"),
            (r#"{"eos_token_id": [1, -1]}"#, "`eos_token_id` is [1,-1]"),
        ];
        for (text, expected) in table {
            let message = read(text).expect_err(text).to_string();
            assert!(message.contains(expected), "{text}: {message}");
        }
    }

    /// What `GPT2Config().to_dict()` of `transformers` 5.24 returns, which has more fields than the
    /// file that it saves.
    const TO_DICT: &str = r#"{
        "transformers_version": "5.24.0", "architectures": null, "output_hidden_states": false,
        "return_dict": true, "dtype": null, "chunk_size_feed_forward": 0, "is_encoder_decoder": false,
        "id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "label2id": {"LABEL_0": 0, "LABEL_1": 1},
        "problem_type": null, "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12,
        "n_head": 12, "n_inner": null, "activation_function": "gelu_new", "resid_pdrop": 0.1,
        "embd_pdrop": 0.1, "attn_pdrop": 0.1, "layer_norm_epsilon": 1e-05, "initializer_range": 0.02,
        "summary_type": "cls_index", "summary_use_proj": true, "summary_activation": null,
        "summary_proj_to_labels": true, "summary_first_dropout": 0.1, "scale_attn_weights": true,
        "use_cache": true, "bos_token_id": 50256, "eos_token_id": 50256, "pad_token_id": null,
        "scale_attn_by_inverse_layer_idx": false, "reorder_and_upcast_attn": false,
        "add_cross_attention": false, "tie_word_embeddings": true, "_name_or_path": "",
        "model_type": "gpt2", "output_attentions": false
    }"#;

    /// What `GPT2Config().to_dict()` of `transformers` 4.30 returns, except for the fields of
    /// [`TO_DICT`].
    const OLDER: &str = r#"{
        "torchscript": false, "torch_dtype": null, "use_bfloat16": false, "tf_legacy_loss": false,
        "pruned_heads": {}, "is_decoder": false, "cross_attention_hidden_size": null,
        "tie_encoder_decoder": false, "max_length": 20, "min_length": 0, "do_sample": false,
        "early_stopping": false, "num_beams": 1, "num_beam_groups": 1, "diversity_penalty": 0.0,
        "temperature": 1.0, "top_k": 50, "top_p": 1.0, "typical_p": 1.0, "repetition_penalty": 1.0,
        "length_penalty": 1.0, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0,
        "bad_words_ids": null, "num_return_sequences": 1, "output_scores": false,
        "return_dict_in_generate": false, "forced_bos_token_id": null, "forced_eos_token_id": null,
        "remove_invalid_values": false, "exponential_decay_length_penalty": null,
        "suppress_tokens": null, "begin_suppress_tokens": null, "finetuning_task": null,
        "tokenizer_class": null, "prefix": null, "sep_token_id": null,
        "decoder_start_token_id": null, "task_specific_params": null
    }"#;

    #[test]
    fn every_field_of_transformers_is_known() {
        for text in [TO_DICT, OLDER] {
            let fields = read_fields(text).unwrap();
            // Null is accepted for any field, so it is replaced.
            let fixed = ["cross_attention_hidden_size", "dtype", "n_inner", "problem_type"];
            let fields = fields.into_iter().map(|(name, value)| match value {
                Value::Null if name.ends_with("_token_id") => (name, json!(3)),
                Value::Null if !fixed.contains(&&*name) => (name, json!("x")),
                value => (name, value),
            });
            Gpt2Config::try_from(fields.collect::<Map<_, _>>()).unwrap();
        }
        // Fields of published models: distilgpt2, GPT-2 of 2019, and conversions for other
        // programs.
        let published = r#"{"_num_labels": 1, "n_special": 0, "predict_special_tokens": true,
            "output_past": true, "gradient_checkpointing": false, "xla_device": null,
            "transformers.js_config": {"kv_cache_dtype": "float32"}, "unsloth_version": "2025.1"}"#;
        read(published).unwrap();
    }

    #[test]
    fn fields_that_may_change_the_outputs_are_refused_and_can_be_removed() {
        let table = [
            ("rope_theta", json!(1e4)),
            ("rope_scaling", json!({"type": "linear", "factor": 2.0})),
            ("sliding_window", json!(4096)),
            ("attention_bias", json!(false)),
            ("num_key_value_heads", json!(4)),
            ("n_heads_kv", json!(2)),
            ("summary_x", json!(1)),
            ("is_causal", json!(false)),
            ("add_cross_attention", json!(true)),
            ("quantization_config", json!({"bits": 4})),
            ("n_heads", json!(12)),
        ];
        for (name, value) in table {
            let text = json!({ name: value }).to_string();
            let message = read(&text).expect_err(name).to_string();
            assert!(message.contains(&format!("`{name}`")), "{message}");
            // The file of a model is read, so that an override can remove the field.
            let kept = Gpt2Config::from_known(read_fields(&text).unwrap()).unwrap();
            assert_eq!(kept.validate().unwrap_err().to_string(), message);
            let replaced = if name == "is_causal" { json!(true) } else { json!(null) };
            let overrides = json!({ name: replaced });
            let without = kept.with_overrides(overrides.as_object().unwrap()).unwrap();
            assert_eq!(Map::from(without), Map::from(read("{}").unwrap()), "{name}");
            // An override of another field keeps it.
            let overrides = json!({ "n_layer": 2 });
            let other = kept.with_overrides(overrides.as_object().unwrap());
            assert_eq!(other.unwrap_err().to_string(), message);
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
