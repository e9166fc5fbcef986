//! The tokens that a tokenizer adds before and after texts.

use serde_json::Value as Json;

use super::GgufSpecialTokens;
use super::definition::{invalid, kind, steps};
use crate::GgufError;

impl GgufSpecialTokens {
    /// Sets `add_bos` and `add_eos` from the post-processor of a parsed `tokenizer.json`. `bos` and
    /// `eos` must be set. A `bos` that the tokenizer adds and that is not set is set.
    ///
    /// # Errors
    /// Returns an error if the post-processor adds other tokens, which llama.cpp cannot add.
    pub fn set_added_tokens(&mut self, tokenizer: &Json) -> Result<(), GgufError> {
        (self.add_bos, self.add_eos) = (false, false);
        let post_processor = &tokenizer["post_processor"];
        for step in steps(post_processor, "processors") {
            match kind(step) {
                // It changes offsets only.
                "ByteLevel" => {}
                "TemplateProcessing" => self.read_template(step)?,
                other => {
                    let problem = format!(
                        "is {other}; llama.cpp supports ByteLevel and TemplateProcessing; keep the model as safetensors"
                    );
                    return Err(invalid("post_processor", problem));
                }
            }
        }
        Ok(())
    }

    /// Reads the template of a single text: `bos`, the text, `eos`.
    fn read_template(&mut self, step: &Json) -> Result<(), GgufError> {
        let mut is_after = false;
        for item in step["single"].as_array().map_or(&[][..], Vec::as_slice) {
            let Some(token) = item["SpecialToken"]["id"].as_str() else {
                // This item is the text itself.
                is_after = true;
                continue;
            };
            let ids = step["special_tokens"][token]["ids"].as_array();
            let id = match ids.map(Vec::as_slice) {
                // llama.cpp adds a single token on each side.
                Some([id]) => id.as_u64().and_then(|id| u32::try_from(id).ok()),
                _ => None,
            };
            let is_known = match (id, is_after) {
                (Some(id), false) if !self.add_bos && self.bos.is_none_or(|bos| bos == id) => {
                    (self.bos, self.add_bos) = (Some(id), true);
                    true
                }
                (Some(id), true) if !self.add_eos && self.eos == Some(id) => {
                    self.add_eos = true;
                    true
                }
                _ => false,
            };
            if !is_known {
                let problem = format!(
                    "adds {token:?}; llama.cpp adds the bos token before and the eos token after a text; keep the model as safetensors"
                );
                return Err(invalid("post_processor.single", problem));
            }
        }
        Ok(())
    }
}
