//! Qwen 2, 2.5 and 3.

use super::config::Family;
use super::rope::Rope;
use super::settings::{Biases, COMMON, Defaults, FamilySettings, LayerForm, LayerSettings};
use super::windows::{LayerType, check_window, layer_types, num_layers, window};
use crate::hf::{Accepted, ConfigFields, FieldNames, FixedField, ModelConfigError};

/// The fields that both read, beside the common ones.
const BOTH: [&str; 5] =
    ["hidden_act", "layer_types", "max_window_layers", "sliding_window", "use_sliding_window"];

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
        FieldNames { read: &[COMMON, &BOTH], aliases: &[], harmless: &[], fixed: &FIXED };

    /// Queries, keys and values always have biases.
    fn settings(fields: &mut ConfigFields) -> Result<FamilySettings, ModelConfigError> {
        let settings = read(fields, LayerForm::Llama, None)?;
        Ok(FamilySettings { biases: Biases { inputs: true, ..Biases::default() }, ..settings })
    }
}

impl Family for Qwen3 {
    const MODEL_TYPE: &'static str = "qwen3";
    const NAME: &'static str = "Qwen3";
    const CLASS: &'static str = "Qwen3ForCausalLM";
    const FIELDS: FieldNames = FieldNames {
        read: &[COMMON, &["attention_bias"], &BOTH],
        aliases: &[],
        harmless: &[],
        fixed: &FIXED,
    };

    fn settings(fields: &mut ConfigFields) -> Result<FamilySettings, ModelConfigError> {
        let settings = read(fields, LayerForm::HeadNorms, Some(128))?;
        let bias = fields.flag("attention_bias", false)?;
        let biases = Biases { inputs: bias, output: bias, feed_forward: false };
        Ok(FamilySettings { biases, ..settings })
    }
}

/// Reads the fields that both have. Layers from `max_window_layers` on have the window, if windows
/// are used.
fn read(
    fields: &mut ConfigFields,
    form: LayerForm,
    head_width: Option<usize>,
) -> Result<FamilySettings, ModelConfigError> {
    // The defaults of both classes of `transformers`. Published models give all sizes.
    let default = Defaults {
        vocab_size: 151_936,
        intermediate_size: 22_016,
        key_value_heads: Some(32),
        head_width,
        max_len: 32_768,
        ..Defaults::LLAMA
    };
    let settings = FamilySettings::read(fields, form, default)?;
    let rotary = Rope::new(&settings, 1e4).read(fields)?;
    let layers = num_layers(fields, 32)?;
    let is_used = fields.flag("use_sliding_window", false)?;
    // As in `transformers`, a window is only a number until windows are switched on.
    let window = window(fields, Some(4096))?.filter(|_| is_used);
    let first = fields.take("max_window_layers", 28, "an integer of at least 0", |value| {
        value.as_u64().map(|layer| layer as usize)
    })?;
    //= transformers 5.23.0 models/qwen2/configuration_qwen2.py max_window_layers
    let types = layer_types(fields, layers, |layer| match window {
        Some(_) if layer >= first => LayerType::Sliding,
        _ => LayerType::Full,
    })?;
    check_window(&types, window, (!is_used).then_some("use_sliding_window"))?;
    let layers = types.into_iter().map(|kind| LayerSettings {
        window: window.filter(|_| kind == LayerType::Sliding),
        rotary: rotary.clone(),
    });
    Ok(FamilySettings { layers: layers.collect(), ..settings })
}
