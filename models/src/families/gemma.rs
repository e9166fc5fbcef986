//! Gemma 2, and the text model of Gemma 3.

use serde_json::Value;

use super::config::Family;
use super::rope::Rope;
use super::settings::{
    AttentionSettings, Biases, COMMON, Defaults, FamilySettings, HeadSettings, LayerForm,
    LayerSettings,
};
use super::windows::{LayerType, check_window, layer_types, num_layers, positive_or_null, window};
use crate::activation::Activation;
use crate::decoder::Rotary;
use crate::hf::{Accepted, ConfigFields, FieldNames, FixedField, ModelConfigError};

/// The fields that both read, beside the common ones.
const BOTH: [&str; 7] = [
    "attention_bias",
    "final_logit_softcapping",
    "hidden_act",
    "hidden_activation",
    "layer_types",
    "query_pre_attn_scalar",
    "sliding_window",
];

/// The fields that only Gemma 3 reads.
const OF_GEMMA3: [&str; 3] =
    ["_sliding_window_pattern", "rope_local_base_freq", "sliding_window_pattern"];

/// A feature of other models.
const BIDIRECTIONAL: FixedField = FixedField {
    name: "use_bidirectional_attention",
    accepted: Accepted::Off,
    remedy: "this is a causal language model; set it to false",
};

//= transformers 5.23.0 models/gemma3/modeling_gemma3.py Gemma3Attention
/// A field of Gemma 2 that the configuration of Gemma 3 has too, but that its attention does not
/// use.
const SCORE_CAP: FixedField = FixedField {
    name: "attn_logit_softcapping",
    accepted: Accepted::Off,
    remedy: "`transformers` does not limit the scores of this model; set it to null",
};

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
    const FIELDS: FieldNames = FieldNames {
        read: &[COMMON, &BOTH, &["attn_logit_softcapping"]],
        aliases: &[],
        harmless: &[],
        fixed: &[BIDIRECTIONAL],
    };

    /// Every second layer has the window, starting with the first.
    fn settings(fields: &mut ConfigFields) -> Result<FamilySettings, ModelConfigError> {
        let settings = read(fields, LayerForm::Gemma2, GEMMA2, Some(30.0))?;
        let soft_cap = cap(fields, "attn_logit_softcapping", Some(50.0))?;
        let attention = AttentionSettings { soft_cap, ..settings.attention };
        let settings = FamilySettings { attention, ..settings };
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
        aliases: &[],
        harmless: &[],
        fixed: &[BIDIRECTIONAL, SCORE_CAP],
    };

    /// Every sixth layer has no window, and another rotation.
    fn settings(fields: &mut ConfigFields) -> Result<FamilySettings, ModelConfigError> {
        // The other defaults of `transformers` are the same, the values of Gemma 2 2B.
        let default = Defaults { vocab_size: 262_208, max_len: 131_072, ..GEMMA2 };
        let settings = read(fields, LayerForm::Gemma3, default, None)?;
        let rotations = Rope::new(&settings, 1e6).read_by_layer_type(fields)?;
        let pattern = window_pattern(fields)?;
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

/// Reads the fields that both have, except for the fields of the layers. `soft_cap` is the default
/// of the limit of logits.
fn read(
    fields: &mut ConfigFields,
    form: LayerForm,
    default: Defaults,
    soft_cap: Option<f64>,
) -> Result<FamilySettings, ModelConfigError> {
    let settings = FamilySettings::read(fields, form, default)?;
    let activation = settings.feed_forward.activation;
    // Gemma 1 had the function of the gate under this name, and published files of Gemma 2 have
    // both. `transformers` does not read it any more.
    let older = Activation::read(fields, "hidden_act", activation)?;
    let rule = format!(
        "\"{}\", as `hidden_activation`, which `transformers` reads instead; write the function there",
        activation.name()
    );
    let name = format!("\"{}\"", older.name());
    ModelConfigError::unless(older == activation, "hidden_act", name, rule)?;
    let bias = fields.flag("attention_bias", false)?;
    let attention = AttentionSettings {
        query_scalar: fields.number("query_pre_attn_scalar", 256.0)?,
        ..settings.attention
    };
    let soft_cap = cap(fields, "final_logit_softcapping", soft_cap)?;
    Ok(FamilySettings {
        biases: Biases { inputs: bias, output: bias, feed_forward: false },
        attention,
        head: HeadSettings { soft_cap, ..settings.head },
        ..settings
    })
}

/// Reads a limit of scores or logits.
fn cap(
    fields: &mut ConfigFields,
    name: &'static str,
    default: Option<f64>,
) -> Result<Option<f64>, ModelConfigError> {
    fields.take_nullable(name, default, "a positive number or null", Value::as_f64)
}

//= transformers 5.23.0 models/gemma3/configuration_gemma3.py sliding_window_pattern
/// Returns the number of layers from one without a window to the next, which counts if there is no
/// `layer_types`.
fn window_pattern(fields: &mut ConfigFields) -> Result<usize, ModelConfigError> {
    const READ: &str = "sliding_window_pattern";
    const WRITTEN: &str = "_sliding_window_pattern";
    let pattern = positive_or_null(fields, READ, None)?.unwrap_or(6);
    // Version 5 of `transformers` writes it under this name, with `layer_types`, and does not read
    // it again.
    let counts = fields.is_unset("layer_types");
    match positive_or_null(fields, WRITTEN, None)? {
        Some(written) if counts && written != pattern => {
            let rule = format!(
                "{pattern}, as `{READ}`, which `transformers` reads instead (6 if it is missing); write the number there, \
                 or give `layer_types`"
            );
            Err(ModelConfigError::value(WRITTEN, written, rule))
        }
        _ => Ok(pattern),
    }
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
    check_window(&types, window, None)?;
    let layers = types.into_iter().map(|kind| match kind {
        LayerType::Full => LayerSettings { window: None, rotary: full.clone() },
        LayerType::Sliding => LayerSettings { window, rotary: sliding.clone() },
    });
    Ok(FamilySettings { layers: layers.collect(), ..settings })
}
