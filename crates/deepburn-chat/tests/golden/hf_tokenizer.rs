//! A tokenizer of the library `tokenizers`.

use std::collections::HashSet;

use deepburn_chat::{ChatError, Result, Surrounding, TextTokenizer, Tokens};

/// A tokenizer of the library `tokenizers`.
#[derive(Debug)]
pub(crate) struct HfTokenizer {
    inner: tokenizers::Tokenizer,
    special: HashSet<u32>,
}

impl HfTokenizer {
    /// Wraps a tokenizer, and disables its truncation and padding.
    ///
    /// # Errors
    /// Returns [`ChatError::Tokenizer`] if the tokenizer fails.
    pub(crate) fn new(mut inner: tokenizers::Tokenizer) -> Result<Self> {
        inner.with_truncation(None).map_err(|error| ChatError::Tokenizer(error.to_string()))?;
        inner.with_padding(None);
        let added = inner.get_added_tokens_decoder().into_iter();
        let special = added.filter(|(_, token)| token.special).map(|(id, _)| id).collect();
        Ok(Self { inner, special })
    }
}

impl TextTokenizer for HfTokenizer {
    fn encode(&self, text: &str, surrounding: Surrounding) -> Result<Tokens> {
        let encoding = self.inner.encode(text, surrounding == Surrounding::Added);
        let encoding = encoding.map_err(|error| ChatError::Tokenizer(error.to_string()))?;
        let ranges = encoding.get_offsets().iter().map(|(start, end)| *start..*end);
        Ok(Tokens { ids: encoding.get_ids().to_vec(), ranges: ranges.collect() })
    }

    fn token_text(&self, id: u32) -> String {
        self.inner.decode(&[id], false).unwrap_or_default()
    }

    fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    fn is_special(&self, id: u32) -> bool {
        self.special.contains(&id)
    }
}
