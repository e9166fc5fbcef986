//! A tokenizer as metadata.

use super::keys;
use super::space_prefix::SpacePrefix;
use super::vocabulary::TokenType;
use crate::{GgufError, Metadata, Value};

/// A tokenizer as llama.cpp describes it.
#[derive(Debug, Clone, PartialEq)]
pub struct GgufTokenizer {
    /// `gpt2` or `llama`.
    pub(super) model: &'static str,
    /// The name of the pre-tokenizer.
    pub(super) pre: &'static str,
    pub(super) tokens: Vec<String>,
    pub(super) types: Vec<TokenType>,
    /// A score per token, in SentencePiece.
    pub(super) scores: Option<Vec<f32>>,
    /// `left right`, in BPE.
    pub(super) merges: Option<Vec<String>>,
    /// Where a space is added, in SentencePiece.
    pub(super) space_prefix: Option<SpacePrefix>,
    /// See [`GgufTokenizer::notes`].
    pub(super) notes: Vec<&'static str>,
}

impl GgufTokenizer {
    /// Returns the kind: `gpt2` for byte-level BPE, `llama` for SentencePiece.
    #[must_use]
    pub fn model(&self) -> &'static str {
        self.model
    }

    /// Returns the name of the pre-tokenizer.
    #[must_use]
    pub fn pre(&self) -> &'static str {
        self.pre
    }

    /// Returns the tokens by id.
    #[must_use]
    pub fn tokens(&self) -> &[String] {
        &self.tokens
    }

    /// Returns the id of a token by its text.
    #[must_use]
    pub fn token_id(&self, text: &str) -> Option<u32> {
        let id = self.tokens.iter().position(|token| token == text)?;
        u32::try_from(id).ok()
    }

    /// Returns differences from llama.cpp that a user should know, as whole sentences: parts that
    /// llama.cpp does not have, and that change few texts.
    #[must_use]
    pub fn notes(&self) -> &[&'static str] {
        &self.notes
    }

    /// Returns `name`, or a similar name if llama.cpp cannot load this tokenizer in a model that is
    /// called so.
    #[must_use]
    pub fn supported_name(&self, name: &str) -> String {
        let mut name = name.to_owned();
        // Each turn removes one of the texts by which llama.cpp knows Phi 3, so the loop ends.
        while self.missing_token(&name).is_some() {
            let lowercase = name.to_ascii_lowercase();
            for found in ["phi-3", "phi3"] {
                if let Some(start) = lowercase.find(found) {
                    name.replace_range(start + 3..start + found.len(), " 3");
                    break;
                }
            }
        }
        name
    }

    /// Appends the keys `tokenizer.ggml.*`. `general.name` must be in `metadata` already, if the
    /// file has one.
    ///
    /// # Errors
    /// Returns an error if a key exists already, or if llama.cpp cannot load the tokenizer with
    /// this `general.name`.
    pub fn push_metadata(&self, metadata: &mut Metadata) -> Result<(), GgufError> {
        self.check_name(metadata)?;
        metadata.push(keys::MODEL, self.model)?;
        metadata.push(keys::PRE, self.pre)?;
        metadata.push(keys::TOKENS, self.tokens.clone())?;
        if let Some(scores) = &self.scores {
            metadata.push(keys::SCORES, scores.clone())?;
        }
        let types: Vec<i32> = self.types.iter().map(|it| *it as i32).collect();
        metadata.push(keys::TYPES, types)?;
        if let Some(merges) = &self.merges {
            metadata.push(keys::MERGES, merges.clone())?;
        }
        if let Some(prefix) = self.space_prefix {
            metadata.push(keys::ADD_SPACE_PREFIX, prefix != SpacePrefix::Never)?;
            if let Some(scheme) = prefix.scheme() {
                metadata.push(keys::PREPEND_SCHEME, scheme)?;
            }
        }
        Ok(())
    }

    /// Returns a token that llama.cpp needs in a model of this name and that does not exist.
    /// llama.cpp changes these tokens if the name says Phi 3.
    fn missing_token(&self, name: &str) -> Option<&'static str> {
        if !is_phi3(name) {
            return None;
        }
        let needed = ["</s>", "<unk>", "<s>", "<|endoftext|>"];
        needed.into_iter().find(|token| self.token_id(token).is_none())
    }

    fn check_name(&self, metadata: &Metadata) -> Result<(), GgufError> {
        const NAME: &str = "general.name";
        let name = metadata.get(NAME).and_then(Value::as_str).unwrap_or("");
        let Some(token) = self.missing_token(name) else { return Ok(()) };
        let problem = format!(
            "is {name:?}; llama.cpp loads a model with `phi3` in its name only if it has the token {token}; give the model another name"
        );
        Err(GgufError::metadata(NAME, problem))
    }
}

/// Returns whether llama.cpp takes a model of this name for Phi 3.
pub(super) fn is_phi3(name: &str) -> bool {
    let lowercase = name.to_ascii_lowercase();
    lowercase.contains("phi-3") || lowercase.contains("phi3")
}
