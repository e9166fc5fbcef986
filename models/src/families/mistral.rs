//! Mistral.

use super::config::Family;
use super::rope::Rope;
use super::settings::{Defaults, LayerForm, LayerSettings, Settings};
use super::windows::{num_layers, window};
use crate::activation::Activation;
use crate::hf::{ConfigFields, FieldNames, ModelConfigError};

/// The fields that Mistral reads.
const READ: [&str; 17] = [
    "attention_dropout",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "initializer_range",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "tie_word_embeddings",
    "vocab_size",
];

/// Mistral.
#[derive(Clone, Debug, PartialEq)]
pub struct Mistral;

impl Family for Mistral {
    const MODEL_TYPE: &'static str = "mistral";
    const NAME: &'static str = "Mistral";
    const CLASS: &'static str = "MistralForCausalLM";
    const FIELDS: FieldNames = FieldNames { read: &READ, aliases: &[], harmless: &[], fixed: &[] };

    /// All layers have the window.
    fn settings(fields: &mut ConfigFields) -> Result<Settings, ModelConfigError> {
        let default = Defaults {
            vocab_size: 32_000,
            hidden_size: 4096,
            intermediate_size: 14_336,
            heads: 32,
            key_value_heads: Some(8),
            head_width: None,
            max_len: 4096 * 32,
            epsilon: 1e-6,
            is_tied: false,
            activation: ("hidden_act", Activation::Silu),
        };
        let settings = Settings::read(fields, LayerForm::Llama, default)?;
        let rotary = Rope::new(&settings, 1e4).read(fields)?;
        let layer = LayerSettings { window: window(fields, Some(4096))?, rotary };
        let layers = vec![layer; num_layers(fields, 32)?];
        Ok(Settings { layers, ..settings })
    }
}
