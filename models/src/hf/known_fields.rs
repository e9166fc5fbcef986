//! The fields of a `config.json` that a model knows but does not read.
//!
//! Main types: [`HARMLESS`], the fields of `transformers` that never change what a model computes,
//! and [`FixedField`], a field that changes nothing at one value. A model adds its own fields of
//! both kinds to these. All other fields may change what the model computes.
//!
//! The lists cover what `transformers` 2 to 5 write for any model (`PretrainedConfig` and the
//! defaults of generation), and what other programs add to a file.

use serde_json::Value;

/// A field that is only accepted with the value of a model without the feature.
#[derive(Clone, Copy, Debug)]
pub struct FixedField {
    /// The field.
    pub name: &'static str,
    /// The accepted values.
    pub accepted: Accepted,
    /// Why other values are not supported, and what to do.
    pub remedy: &'static str,
}

/// The values of a [`FixedField`] that are accepted.
#[derive(Clone, Copy, Debug)]
pub enum Accepted {
    /// Null, false, 0 and an empty object. An empty list or string does not mean off.
    Off,
    /// True. Null is not accepted: `transformers` takes it for false.
    True,
}

impl Accepted {
    /// Returns whether `value` is accepted.
    pub fn accepts(self, value: &Value) -> bool {
        match (self, value) {
            (Self::True, value) => *value == Value::Bool(true),
            (Self::Off, Value::Null | Value::Bool(false)) => true,
            (Self::Off, Value::Number(number)) => number.as_f64() == Some(0.0),
            (Self::Off, Value::Object(fields)) => fields.is_empty(),
            (Self::Off, _) => false,
        }
    }
}

/// Returns a field that must be off.
const fn off(name: &'static str, remedy: &'static str) -> FixedField {
    FixedField { name, accepted: Accepted::Off, remedy }
}

/// Fields of unsupported features, which any model of `transformers` may have.
pub(crate) const FIXED: &[FixedField] = &[
    off("add_cross_attention", "this is a decoder on its own; set it to false"),
    off("auto_map", "code shipped with a checkpoint is not run; set it to null"),
    off("chunk_size_feed_forward", "the MLP is not chunked; set it to 0"),
    off("cross_attention_hidden_size", "this is a decoder on its own; set it to null"),
    off("is_encoder_decoder", "this is a decoder on its own; set it to false"),
    off("output_attentions", "attention weights are not returned; set it to false"),
    off("output_hidden_states", "hidden states are not returned; set it to false"),
    off("per_layer_config", "all blocks share one configuration; set it to null"),
    off("pruned_heads", "pruned heads are not supported; export the whole model"),
    off("quantization_config", "quantized weights are not supported; dequantize and save again"),
    off("tie_encoder_decoder", "this is a decoder on its own; set it to false"),
];

/// Fields that do not change what a model computes: the origin of the file, the type of the
/// weights, labels, special tokens, defaults of generation, and settings of implementations that
/// compute the same.
pub(crate) const HARMLESS: &[&str] = &[
    // The file and its origin.
    "_commit_hash",
    "_name_or_path",
    "architectures",
    "custom_pipelines",
    "finetuning_task",
    "model_type",
    "name_or_path",
    "tokenizer_class",
    "transformers.js_config",
    "transformers_version",
    "unsloth_fixed",
    "unsloth_version",
    // The type of the weights.
    "dtype",
    "torch_dtype",
    "use_bfloat16",
    // Labels of classifiers. `_num_labels` is an older name.
    "_num_labels",
    "id2label",
    "label2id",
    "num_labels",
    "problem_type",
    // Special tokens.
    "bos_token_id",
    "cls_token_id",
    "decoder_start_token_id",
    "eos_token_id",
    "mask_token_id",
    "pad_token_id",
    "sep_token_id",
    "unk_token_id",
    // Implementations, and the form of the results. A decoder without cross-attention computes the
    // same with `is_decoder`.
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_attn_implementation_internal",
    "_experts_implementation",
    "_experts_implementation_internal",
    "_flash_attn_2_enabled",
    "_output_attentions",
    "attn_implementation",
    "experts_implementation",
    "gradient_checkpointing",
    "is_decoder",
    "output_past",
    "return_dict",
    "tf_legacy_loss",
    "tie_last_hidden_states",
    "torchscript",
    "use_cache",
    "xla_device",
    // Defaults of generation, which is configured by `generation_config.json` and by options.
    "assistant_confidence_threshold",
    "assistant_early_exit",
    "assistant_lookbehind",
    "bad_words_ids",
    "begin_suppress_tokens",
    "cache_implementation",
    "constraints",
    "diversity_penalty",
    "do_sample",
    "dola_layers",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty",
    "epsilon_cutoff",
    "eta_cutoff",
    "exponential_decay_length_penalty",
    "force_words_ids",
    "forced_bos_token_id",
    "forced_decoder_ids",
    "forced_eos_token_id",
    "guidance_scale",
    "length_penalty",
    "low_memory",
    "max_length",
    "max_matching_ngram_size",
    "max_new_tokens",
    "max_time",
    "min_length",
    "min_new_tokens",
    "min_p",
    "no_repeat_ngram_size",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_logits",
    "output_scores",
    "penalty_alpha",
    "prefill_chunk_size",
    "prefix",
    "prompt_lookup_num_tokens",
    "remove_invalid_values",
    "renormalize_logits",
    "repetition_penalty",
    "return_dict_in_generate",
    "sequence_bias",
    "stop_strings",
    "suppress_tokens",
    "target_lookbehind",
    "task_specific_params",
    "temperature",
    "token_healing",
    "top_h",
    "top_k",
    "top_p",
    "typical_p",
    "watermarking_config",
];

/// The harmless fields that hold ids of several tokens.
pub(super) const LISTS_OF_TOKENS: [&str; 6] = [
    "bad_words_ids",
    "begin_suppress_tokens",
    "force_words_ids",
    "forced_decoder_ids",
    "sequence_bias",
    "suppress_tokens",
];
