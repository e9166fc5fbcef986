//! Mistral.

use super::config::Family;
use super::rope::Rope;
use super::settings::{COMMON, Defaults, FamilySettings, LayerForm, LayerSettings};
use super::windows::{num_layers, window};
use crate::hf::{ConfigFields, FieldNames, ModelConfigError};

/// Mistral.
#[derive(Clone, Debug, PartialEq)]
pub struct Mistral;

impl Family for Mistral {
    const MODEL_TYPE: &'static str = "mistral";
    const NAME: &'static str = "Mistral";
    const CLASS: &'static str = "MistralForCausalLM";
    const FIELDS: FieldNames = FieldNames {
        read: &[COMMON, &["hidden_act", "sliding_window"]],
        aliases: &[],
        harmless: &[],
        fixed: &[],
    };

    /// All layers have the window.
    fn settings(fields: &mut ConfigFields) -> Result<FamilySettings, ModelConfigError> {
        // The defaults of `MistralConfig`, which describe Mistral 7B.
        let default = Defaults {
            intermediate_size: 14_336,
            key_value_heads: Some(8),
            max_len: 4096 * 32,
            ..Defaults::LLAMA
        };
        let settings = FamilySettings::read(fields, LayerForm::Llama, default)?;
        let rotary = Rope::new(&settings, 1e4).read(fields)?;
        let layer = LayerSettings { window: window(fields, Some(4096))?, rotary };
        let layers = vec![layer; num_layers(fields, 32)?];
        Ok(FamilySettings { layers, ..settings })
    }
}
