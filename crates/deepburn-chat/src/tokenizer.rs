//! What encoding needs of a tokenizer.

use std::collections::HashSet;
use std::ops::Range;

use crate::{ChatError, Result};

/// A text as tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tokens {
    /// The token ids.
    pub ids: Vec<u32>,
    /// For each token, the bytes of the text that it stands for. Empty for tokens that the tokenizer adds.
    pub ranges: Vec<Range<usize>>,
}

/// Which tokens a tokenizer adds around a text, such as the one for the beginning of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Surrounding {
    /// The tokenizer's own (`add_special_tokens=True`).
    Added,
    /// None: the text has them.
    None,
}

/// A tokenizer without truncation and padding.
pub trait TextTokenizer {
    /// Encodes a text.
    ///
    /// # Errors
    /// Returns [`ChatError::Tokenizer`] if the tokenizer fails.
    fn encode(&self, text: &str, surrounding: Surrounding) -> Result<Tokens>;

    /// Decodes one token, special tokens too.
    fn token_text(&self, id: u32) -> String;

    /// Returns the id of a token.
    fn token_id(&self, token: &str) -> Option<u32>;

    /// Returns whether the token is an added one, as tokens are that end a turn.
    fn is_added(&self, id: u32) -> bool;
}

/// A tokenizer of the library `tokenizers`.
#[derive(Debug)]
pub struct HfTokenizer {
    inner: tokenizers::Tokenizer,
    added: HashSet<u32>,
}

impl HfTokenizer {
    /// Wraps a tokenizer, and disables its truncation and padding.
    ///
    /// # Errors
    /// Returns [`ChatError::Tokenizer`] if the tokenizer fails.
    pub fn new(mut inner: tokenizers::Tokenizer) -> Result<Self> {
        inner.with_truncation(None).map_err(|error| ChatError::Tokenizer(error.to_string()))?;
        inner.with_padding(None);
        let added = inner.get_added_tokens_decoder().into_keys().collect();
        Ok(Self { inner, added })
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

    fn is_added(&self, id: u32) -> bool {
        self.added.contains(&id)
    }
}
