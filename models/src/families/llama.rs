//! Llama 2 and 3, and SmolLM2.

use super::config::Family;
use super::rope::Rope;
use super::settings::{Biases, Defaults, LayerForm, LayerSettings, Settings};
use super::windows::num_layers;
use crate::activation::Activation;
use crate::hf::{Accepted, ConfigFields, FieldNames, FixedField, ModelConfigError};

/// The fields that Llama reads.
const READ: [&str; 18] = [
    "attention_bias",
    "attention_dropout",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "initializer_range",
    "intermediate_size",
    "max_position_embeddings",
    "mlp_bias",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "tie_word_embeddings",
    "vocab_size",
];

/// Llama 2 and 3, and SmolLM2.
#[derive(Clone, Debug, PartialEq)]
pub struct Llama;

impl Family for Llama {
    const MODEL_TYPE: &'static str = "llama";
    const NAME: &'static str = "Llama";
    const CLASS: &'static str = "LlamaForCausalLM";
    const FIELDS: FieldNames = FieldNames {
        read: &READ,
        aliases: &[],
        // Slices the products of a layer, which changes their order of addition only.
        harmless: &["pretraining_tp"],
        fixed: &[FixedField {
            name: "rope_interleaved",
            accepted: Accepted::Off,
            remedy: "the rotation pairs the halves of a head; set it to false",
        }],
    };

    fn settings(fields: &mut ConfigFields) -> Result<Settings, ModelConfigError> {
        let default = Defaults {
            vocab_size: 32_000,
            hidden_size: 4096,
            intermediate_size: 11_008,
            heads: 32,
            key_value_heads: None,
            head_width: None,
            max_len: 2048,
            epsilon: 1e-6,
            is_tied: false,
            activation: ("hidden_act", Activation::Silu),
        };
        let settings = Settings::read(fields, LayerForm::Llama, default)?;
        let attention = fields.flag("attention_bias", false)?;
        let biases = Biases {
            inputs: attention,
            output: attention,
            feed_forward: fields.flag("mlp_bias", false)?,
        };
        let rotary = Rope::new(&settings, 1e4).read(fields)?;
        let layer = LayerSettings { window: None, rotary };
        let layers = vec![layer; num_layers(fields, 32)?];
        Ok(Settings { biases, layers, ..settings })
    }
}
