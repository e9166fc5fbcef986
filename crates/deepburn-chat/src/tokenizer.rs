//! What encoding needs of a tokenizer.

use std::ops::Range;

use crate::Result;

/// A text as tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tokens {
    /// The token ids.
    pub ids: Vec<u32>,
    /// For each token, the bytes of the text that it stands for. Empty for tokens that the
    /// tokenizer adds.
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
    /// Returns [`ChatError::Tokenizer`](crate::ChatError::Tokenizer) if the tokenizer fails.
    fn encode(&self, text: &str, surrounding: Surrounding) -> Result<Tokens>;

    /// Encodes a text for which only the ids are needed, which may be faster.
    ///
    /// # Errors
    /// Returns [`ChatError::Tokenizer`](crate::ChatError::Tokenizer) if the tokenizer fails.
    fn ids(&self, text: &str, surrounding: Surrounding) -> Result<Vec<u32>> {
        Ok(self.encode(text, surrounding)?.ids)
    }

    /// Decodes one token, special tokens too.
    fn token_text(&self, id: u32) -> String;

    /// Returns the id of a token.
    fn token_id(&self, token: &str) -> Option<u32>;

    /// Returns whether the token is a special one, as tokens are that end a turn. Others may be
    /// added to the vocabulary too, such as `</think>`.
    fn is_special(&self, id: u32) -> bool;
}
