//! Reading of a `tokenizer.json`.

use serde_json::Value as Json;

use super::definition::{Definition, kind, steps};
use super::{GgufTokenizer, byte_level, sentence_piece};
use crate::GgufError;

/// The note about [`AddedToken::has_rule`](super::definition::AddedToken).
const RULES: &str = "llama.cpp does not remove spaces beside added tokens (`lstrip`, `rstrip`, `single_word`), except for Phi 3 if `general.name` says so. Texts with such spaces get other tokens.";

impl GgufTokenizer {
    /// Reads a parsed `tokenizer.json`. `vocab_size` is the number of rows of the embedding. Rows
    /// without a token get the names `[PAD…]`, which llama.cpp's converter uses too.
    ///
    /// # Errors
    /// Returns an error that names the part if llama.cpp cannot split texts in the same way: a
    /// model other than BPE, an unknown pre-tokenizer or normalizer, merges that have no scores, an
    /// id that is not below `vocab_size`, or two tokens with one text.
    pub fn from_json(tokenizer: &Json, vocab_size: usize) -> Result<Self, GgufError> {
        let definition = Definition::read(tokenizer)?;
        let pre_tokenizer = steps(&tokenizer["pre_tokenizer"], "pretokenizers");
        // The type of the model does not say which: `tokenizers` has BPE for both kinds.
        let is_byte_level = pre_tokenizer.iter().any(|step| kind(step) == "ByteLevel");
        let mut tokenizer = match is_byte_level {
            true => byte_level::tokenizer(tokenizer, &definition, vocab_size)?,
            false => sentence_piece::tokenizer(tokenizer, &definition, vocab_size)?,
        };
        if definition.added.iter().any(|token| token.has_rule) {
            tokenizer.notes.push(RULES);
        }
        Ok(tokenizer)
    }
}
