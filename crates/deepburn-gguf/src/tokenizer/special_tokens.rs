//! Tokens with a meaning.

use super::keys::{CHAT_TEMPLATE, added_key, id_key};
use crate::{GgufError, Metadata};

/// The ids of special tokens, and what is added to texts.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GgufSpecialTokens {
    /// The beginning of a text.
    pub bos: Option<u32>,
    /// The end of a text or an answer, at which generation stops.
    pub eos: Option<u32>,
    /// The end of a turn, at which generation stops too.
    pub eot: Option<u32>,
    /// The end of a message, at which generation stops too.
    pub eom: Option<u32>,
    /// Text without a token.
    pub unk: Option<u32>,
    /// Padding.
    pub pad: Option<u32>,
    /// Whether `bos` is added before texts.
    pub add_bos: bool,
    /// Whether `eos` is added after texts.
    pub add_eos: bool,
    /// The chat template, in Jinja.
    pub chat_template: Option<String>,
}

impl GgufSpecialTokens {
    /// Sets the tokens at which generation stops: the tokenizer's, then all of
    /// `generation_config.json`. llama.cpp has three keys for them.
    ///
    /// # Errors
    /// Returns an error if there are more than three.
    pub fn set_end_tokens(&mut self, ids: impl IntoIterator<Item = u32>) -> Result<(), GgufError> {
        (self.eos, self.eot, self.eom) = (None, None, None);
        for id in ids {
            let known = [self.eos, self.eot, self.eom];
            if known.contains(&Some(id)) {
                continue;
            }
            let keys = [&mut self.eos, &mut self.eot, &mut self.eom];
            let Some(key) = keys.into_iter().find(|key| key.is_none()) else {
                let problem =
                    "has more than three tokens; llama.cpp has three keys for them; remove some";
                return Err(GgufError::field("`eos_token_id`", problem));
            };
            *key = Some(id);
        }
        Ok(())
    }

    /// Appends the keys `tokenizer.ggml.*_token_id`, `add_*_token` and `tokenizer.chat_template`.
    ///
    /// # Errors
    /// Returns an error if there is no `eos`, if an id is not below `vocab_size`, or if a token is
    /// added that has no id.
    pub fn push_metadata(
        &self,
        vocab_size: usize,
        metadata: &mut Metadata,
    ) -> Result<(), GgufError> {
        let Some(eos) = self.eos else {
            let problem =
                "is missing; llama.cpp would stop at an arbitrary token; name the end token";
            return Err(GgufError::field("`eos_token`", problem));
        };
        for (name, id) in [
            // Without the key, llama.cpp takes token 11 or 1.
            ("bos", self.bos.or(Some(eos))),
            ("eos", self.eos),
            ("eot", self.eot),
            ("eom", self.eom),
            ("unknown", self.unk),
            ("padding", self.pad),
        ] {
            let Some(id) = id else { continue };
            let key = id_key(name);
            if id as usize >= vocab_size {
                let problem = format!("is {id}; it must be below `vocab_size`, {vocab_size}");
                return Err(GgufError::metadata(&key, problem));
            }
            metadata.push(key, id)?;
        }
        // Always written, because llama.cpp's defaults depend on the pre-tokenizer.
        for (name, id, is_added) in
            [("bos", self.bos, self.add_bos), ("eos", self.eos, self.add_eos)]
        {
            let key = added_key(name);
            if is_added && id.is_none() {
                let problem = format!("is true without a token; name the {name} token");
                return Err(GgufError::metadata(&key, problem));
            }
            metadata.push(key, is_added)?;
        }
        if let Some(template) = &self.chat_template {
            metadata.push(CHAT_TEMPLATE, template.as_str())?;
        }
        Ok(())
    }
}
