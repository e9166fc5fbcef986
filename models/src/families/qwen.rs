//! Qwen 2, 2.5 and 3.

use super::config::Family;
use super::rope::Rope;
use super::settings::{Biases, Defaults, LayerForm, LayerSettings, Settings};
use super::windows::{LayerType, layer_types, num_layers, window};
use crate::activation::Activation;
use crate::hf::{Accepted, ConfigFields, FieldNames, FixedField, ModelConfigError};

/// The fields that Qwen 3 reads. Qwen 2 has no `attention_bias`.
const READ: [&str; 21] = [
    "attention_bias",
    "attention_dropout",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "initializer_range",
    "intermediate_size",
    "layer_types",
    "max_position_embeddings",
    "max_window_layers",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "tie_word_embeddings",
    "use_sliding_window",
    "vocab_size",
];

/// Fields of other models of the family.
const FIXED: [FixedField; 1] = [FixedField {
    name: "use_mrope",
    accepted: Accepted::Off,
    remedy: "this is a text model; set it to false",
}];

/// Qwen 2 and 2.5.
#[derive(Clone, Debug, PartialEq)]
pub struct Qwen2;

/// Qwen 3.
#[derive(Clone, Debug, PartialEq)]
pub struct Qwen3;

impl Family for Qwen2 {
    const MODEL_TYPE: &'static str = "qwen2";
    const NAME: &'static str = "Qwen2";
    const CLASS: &'static str = "Qwen2ForCausalLM";
    const FIELDS: FieldNames =
        FieldNames { read: READ.split_at(1).1, aliases: &[], harmless: &[], fixed: &FIXED };

    /// Queries, keys and values always have biases.
    fn settings(fields: &mut ConfigFields) -> Result<Settings, ModelConfigError> {
        let settings = read(fields, LayerForm::Llama, None)?;
        Ok(Settings { biases: Biases { inputs: true, ..Biases::default() }, ..settings })
    }
}

impl Family for Qwen3 {
    const MODEL_TYPE: &'static str = "qwen3";
    const NAME: &'static str = "Qwen3";
    const CLASS: &'static str = "Qwen3ForCausalLM";
    const FIELDS: FieldNames =
        FieldNames { read: &READ, aliases: &[], harmless: &[], fixed: &FIXED };

    fn settings(fields: &mut ConfigFields) -> Result<Settings, ModelConfigError> {
        let settings = read(fields, LayerForm::HeadNorms, Some(128))?;
        let bias = fields.flag("attention_bias", false)?;
        let biases = Biases { inputs: bias, output: bias, feed_forward: false };
        Ok(Settings { biases, ..settings })
    }
}

/// Reads the fields that both have. Layers from `max_window_layers` on have the window, if windows are used.
fn read(
    fields: &mut ConfigFields,
    form: LayerForm,
    head_width: Option<usize>,
) -> Result<Settings, ModelConfigError> {
    let default = Defaults {
        vocab_size: 151_936,
        hidden_size: 4096,
        intermediate_size: 22_016,
        heads: 32,
        key_value_heads: Some(32),
        head_width,
        max_len: 32_768,
        epsilon: 1e-6,
        is_tied: false,
        activation: ("hidden_act", Activation::Silu),
    };
    let settings = Settings::read(fields, form, default)?;
    let rotary = Rope::new(&settings, 1e4).read(fields)?;
    let layers = num_layers(fields, 32)?;
    let is_used = fields.flag("use_sliding_window", false)?;
    let window = window(fields, Some(4096))?.filter(|_| is_used);
    let first = fields.take("max_window_layers", 28, "an integer of at least 0", |value| {
        value.as_u64().map(|layer| layer as usize)
    })?;
    let types = layer_types(fields, layers, |layer| match window {
        Some(_) if layer >= first => LayerType::Sliding,
        _ => LayerType::Full,
    })?;
    let layers = types.into_iter().map(|kind| LayerSettings {
        window: window.filter(|_| kind == LayerType::Sliding),
        rotary: rotary.clone(),
    });
    Ok(Settings { layers: layers.collect(), ..settings })
}
