//! Phi 3 and 4.

use super::config::Family;
use super::rope::Rope;
use super::settings::{COMMON, Defaults, Dropouts, FamilySettings, LayerForm, LayerSettings};
use super::windows::{num_layers, window};
use crate::hf::{ConfigFields, FieldNames, ModelConfigError};

/// The fields that Phi 3 reads, beside the common ones.
const READ: [&str; 6] = [
    "embd_pdrop",
    "hidden_act",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "resid_pdrop",
    "sliding_window",
];

/// Phi 3 and 4.
#[derive(Clone, Debug, PartialEq)]
pub struct Phi3;

impl Family for Phi3 {
    const MODEL_TYPE: &'static str = "phi3";
    const NAME: &'static str = "Phi3";
    const CLASS: &'static str = "Phi3ForCausalLM";
    const FIELDS: FieldNames = FieldNames {
        read: &[COMMON, &READ],
        aliases: &[],
        // Biases of other models: Phi 3 has none.
        harmless: &["attention_bias", "lm_head_bias"],
        fixed: &[],
    };

    /// All layers have the window. `embd_pdrop` is not used by `transformers`, and neither here.
    fn settings(fields: &mut ConfigFields) -> Result<FamilySettings, ModelConfigError> {
        let default = Defaults {
            vocab_size: 32_064,
            hidden_size: 3072,
            intermediate_size: 8192,
            max_len: 4096,
            epsilon: 1e-5,
            ..Defaults::LLAMA
        };
        let settings = FamilySettings::read(fields, LayerForm::Joint, default)?;
        let dropout = Dropouts { residual: fields.number("resid_pdrop", 0.0)?, ..settings.dropout };
        // Read only to check its type.
        fields.number("embd_pdrop", 0.0)?;
        let rotary = Rope::new(&settings, 1e4).of_phi3().read(fields)?;
        let layer = LayerSettings { window: window(fields, None)?, rotary };
        let layers = vec![layer; num_layers(fields, 32)?];
        Ok(FamilySettings { dropout, layers, ..settings })
    }
}
