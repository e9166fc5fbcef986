//! Phi 3 and 4.

use super::config::Family;
use super::rope::Rope;
use super::settings::{Defaults, Dropouts, LayerForm, LayerSettings, Settings};
use super::windows::{num_layers, window};
use crate::activation::Activation;
use crate::hf::{ConfigFields, FieldNames, ModelConfigError};

/// The fields that Phi 3 reads.
const READ: [&str; 20] = [
    "attention_dropout",
    "embd_pdrop",
    "hidden_act",
    "hidden_size",
    "initializer_range",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "resid_pdrop",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "tie_word_embeddings",
    "vocab_size",
];

/// Phi 3 and 4.
#[derive(Clone, Debug, PartialEq)]
pub struct Phi3;

impl Family for Phi3 {
    const MODEL_TYPE: &'static str = "phi3";
    const NAME: &'static str = "Phi3";
    const CLASS: &'static str = "Phi3ForCausalLM";
    const FIELDS: FieldNames = FieldNames {
        read: &READ,
        aliases: &[],
        // Biases of other models: Phi 3 has none.
        harmless: &["attention_bias", "lm_head_bias"],
        fixed: &[],
    };

    /// All layers have the window. `embd_pdrop` is not used by `transformers`, and neither here.
    fn settings(fields: &mut ConfigFields) -> Result<Settings, ModelConfigError> {
        let default = Defaults {
            vocab_size: 32_064,
            hidden_size: 3072,
            intermediate_size: 8192,
            heads: 32,
            key_value_heads: None,
            head_width: None,
            max_len: 4096,
            epsilon: 1e-5,
            is_tied: false,
            activation: ("hidden_act", Activation::Silu),
        };
        let settings = Settings::read(fields, LayerForm::Joint, default)?;
        let dropout = Dropouts { residual: fields.number("resid_pdrop", 0.0)?, ..settings.dropout };
        fields.number("embd_pdrop", 0.0)?;
        let rotary = Rope::new(&settings, 1e4).of_phi3().read(fields)?;
        let layer = LayerSettings { window: window(fields, None)?, rotary };
        let layers = vec![layer; num_layers(fields, 32)?];
        Ok(Settings { dropout, layers, ..settings })
    }
}
