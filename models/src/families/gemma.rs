//! Gemma 2, and the text model of Gemma 3.

use serde_json::Value;

use super::config::Family;
use super::rope::Rope;
use super::settings::{
    AttentionSettings, Biases, COMMON, Defaults, FamilySettings, HeadSettings, LayerForm,
    LayerSettings,
};
use super::windows::{LayerType, layer_types, num_layers, positive_or_null, window};
use crate::activation::Activation;
use crate::decoder::Rotary;
use crate::hf::{Accepted, ConfigFields, FieldNames, FixedField, ModelConfigError};

/// The fields that both read, beside the common ones.
const BOTH: [&str; 7] = [
    "attention_bias",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "hidden_activation",
    "layer_types",
    "query_pre_attn_scalar",
    "sliding_window",
];

/// The fields that only Gemma 3 reads.
const OF_GEMMA3: [&str; 3] =
    ["_sliding_window_pattern", "rope_local_base_freq", "sliding_window_pattern"];

/// Gemma 1 had the function of the gate under another name, and published files of Gemma 2 have
/// both.
const ALIASES: [(&str, &str); 1] = [("hidden_act", "hidden_activation")];

/// Features of other models.
const FIXED: [FixedField; 1] = [FixedField {
    name: "use_bidirectional_attention",
    accepted: Accepted::Off,
    remedy: "this is a causal language model; set it to false",
}];

/// Gemma 2.
#[derive(Clone, Debug, PartialEq)]
pub struct Gemma2;

/// The text model of Gemma 3.
#[derive(Clone, Debug, PartialEq)]
pub struct Gemma3;

impl Family for Gemma2 {
    const MODEL_TYPE: &'static str = "gemma2";
    const NAME: &'static str = "Gemma2";
    const CLASS: &'static str = "Gemma2ForCausalLM";
    const FIELDS: FieldNames =
        FieldNames { read: &[COMMON, &BOTH], aliases: &ALIASES, harmless: &[], fixed: &FIXED };

    /// Every second layer has the window, starting with the first.
    fn settings(fields: &mut ConfigFields) -> Result<FamilySettings, ModelConfigError> {
        let settings = read(fields, LayerForm::Gemma2, GEMMA2, [Some(50.0), Some(30.0)])?;
        let rotary = Rope::new(&settings, 1e4).read(fields)?;
        let types = |layer: usize| match layer.is_multiple_of(2) {
            true => LayerType::Sliding,
            false => LayerType::Full,
        };
        with_layers(settings, fields, types, &[rotary.clone(), rotary])
    }
}

impl Family for Gemma3 {
    const MODEL_TYPE: &'static str = "gemma3_text";
    const NAME: &'static str = "Gemma3";
    const CLASS: &'static str = "Gemma3ForCausalLM";
    const FIELDS: FieldNames = FieldNames {
        read: &[COMMON, &BOTH, &OF_GEMMA3],
        aliases: &ALIASES,
        harmless: &[],
        fixed: &FIXED,
    };

    /// Every sixth layer has no window, and another rotation.
    fn settings(fields: &mut ConfigFields) -> Result<FamilySettings, ModelConfigError> {
        // The other defaults of `transformers` are the same, the values of Gemma 2 2B.
        let default = Defaults { vocab_size: 262_208, max_len: 131_072, ..GEMMA2 };
        let settings = read(fields, LayerForm::Gemma3, default, [None, None])?;
        let rotations = Rope::new(&settings, 1e6).read_by_layer_type(fields)?;
        // Version 5 writes the older name with an underscore.
        let older = positive_or_null(fields, "sliding_window_pattern", None)?;
        let own = positive_or_null(fields, "_sliding_window_pattern", None)?;
        let pattern = own.or(older).unwrap_or(6);
        let types = |layer: usize| match (layer + 1).is_multiple_of(pattern) {
            true => LayerType::Full,
            false => LayerType::Sliding,
        };
        with_layers(settings, fields, types, &rotations)
    }
}

/// The defaults of Gemma 2.
const GEMMA2: Defaults = Defaults {
    vocab_size: 256_000,
    hidden_size: 2304,
    intermediate_size: 9216,
    heads: 8,
    key_value_heads: Some(4),
    head_width: Some(256),
    max_len: 8192,
    epsilon: 1e-6,
    is_tied: true,
    activation: ("hidden_activation", Activation::GeluPytorchTanh),
};

/// Reads the fields that both have, except for the fields of the layers. `caps` are the defaults of
/// the limits of scores and logits.
fn read(
    fields: &mut ConfigFields,
    form: LayerForm,
    default: Defaults,
    caps: [Option<f64>; 2],
) -> Result<FamilySettings, ModelConfigError> {
    let settings = FamilySettings::read(fields, form, default)?;
    let bias = fields.flag("attention_bias", false)?;
    let cap = |fields: &mut ConfigFields, name, default| {
        fields.take_nullable(name, default, "a positive number or null", Value::as_f64)
    };
    let attention = AttentionSettings {
        query_scalar: fields.number("query_pre_attn_scalar", 256.0)?,
        soft_cap: cap(fields, "attn_logit_softcapping", caps[0])?,
        ..settings.attention
    };
    let soft_cap = cap(fields, "final_logit_softcapping", caps[1])?;
    Ok(FamilySettings {
        biases: Biases { inputs: bias, output: bias, feed_forward: false },
        attention,
        head: HeadSettings { soft_cap, ..settings.head },
        ..settings
    })
}

/// Reads the layers. `rotations` are the rotations of full and of sliding layers.
fn with_layers(
    settings: FamilySettings,
    fields: &mut ConfigFields,
    older: impl Fn(usize) -> LayerType,
    [full, sliding]: &[Rotary; 2],
) -> Result<FamilySettings, ModelConfigError> {
    let layers = num_layers(fields, 26)?;
    let window = window(fields, Some(4096))?;
    let types = layer_types(fields, layers, older)?;
    let layers = types.into_iter().map(|kind| match kind {
        LayerType::Full => LayerSettings { window: None, rotary: full.clone() },
        LayerType::Sliding => LayerSettings { window, rotary: sliding.clone() },
    });
    Ok(FamilySettings { layers: layers.collect(), ..settings })
}
