//! The tokenizer of a job, as the encoding of conversations uses it.

use std::collections::HashSet;

use deepburn_chat::{ChatError, Surrounding, TextTokenizer, Tokens};
use deepburn_datasets::{DataError, Tokenizer};

/// A borrowed tokenizer. Its vocabulary may have many megabytes.
pub(crate) struct ChatTokenizer<'a> {
    tokenizer: &'a Tokenizer,
    /// The ids of the special tokens.
    special: HashSet<u32>,
}

impl<'a> ChatTokenizer<'a> {
    pub(crate) fn new(tokenizer: &'a Tokenizer) -> Self {
        let special = tokenizer.extra_tokens().into_iter().filter(|token| token.is_special);
        Self { tokenizer, special: special.map(|token| token.id).collect() }
    }
}

impl TextTokenizer for ChatTokenizer<'_> {
    fn encode(&self, text: &str, surrounding: Surrounding) -> Result<Tokens, ChatError> {
        let encoded = self.tokenizer.encode_with_ranges(text, surrounding == Surrounding::Added);
        let (ids, ranges) = encoded.map_err(failed)?;
        Ok(Tokens { ids, ranges })
    }

    fn ids(&self, text: &str, surrounding: Surrounding) -> Result<Vec<u32>, ChatError> {
        let ids = match surrounding {
            Surrounding::Added => self.tokenizer.encode_surrounded(text),
            Surrounding::None => self.tokenizer.encode(text),
        };
        ids.map_err(failed)
    }

    fn token_text(&self, id: u32) -> String {
        // A text for a message; a token that cannot be decoded has none.
        self.tokenizer.decode(&[id], false).unwrap_or_default()
    }

    fn token_id(&self, token: &str) -> Option<u32> {
        self.tokenizer.token_id(token)
    }

    fn is_special(&self, id: u32) -> bool {
        self.special.contains(&id)
    }
}

fn failed(error: DataError) -> ChatError {
    ChatError::Tokenizer(error.to_string())
}
