//! Llama 2 and 3, and SmolLM2.

use super::config::Family;
use super::rope::Rope;
use super::settings::{Biases, COMMON, Defaults, FamilySettings, LayerForm, LayerSettings};
use super::windows::num_layers;
use crate::hf::{Accepted, ConfigFields, FieldNames, FixedField, ModelConfigError};

/// Llama 2 and 3, and SmolLM2.
#[derive(Clone, Debug, PartialEq)]
pub struct Llama;

impl Family for Llama {
    const MODEL_TYPE: &'static str = "llama";
    const NAME: &'static str = "Llama";
    const CLASS: &'static str = "LlamaForCausalLM";
    const FIELDS: FieldNames = FieldNames {
        read: &[COMMON, &["attention_bias", "hidden_act", "mlp_bias"]],
        aliases: &[],
        // Slices the products of a layer, which changes their order of addition only.
        harmless: &["pretraining_tp"],
        fixed: &[FixedField {
            name: "rope_interleaved",
            accepted: Accepted::Off,
            remedy: "the rotation pairs the halves of a head; set it to false",
        }],
    };

    fn settings(fields: &mut ConfigFields) -> Result<FamilySettings, ModelConfigError> {
        let settings = FamilySettings::read(fields, LayerForm::Llama, Defaults::LLAMA)?;
        let attention = fields.flag("attention_bias", false)?;
        let biases = Biases {
            inputs: attention,
            output: attention,
            feed_forward: fields.flag("mlp_bias", false)?,
        };
        let rotary = Rope::new(&settings, 1e4).read(fields)?;
        let layer = LayerSettings { window: None, rotary };
        let layers = vec![layer; num_layers(fields, 32)?];
        Ok(FamilySettings { biases, layers, ..settings })
    }
}
