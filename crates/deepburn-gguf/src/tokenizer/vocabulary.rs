//! The tokens of a model.

use std::collections::HashMap;

use serde_json::Value as Json;

use super::definition::{Definition, invalid, kind, steps};
use super::space_prefix::SpacePrefix;
use super::{byte_level, sentence_piece};
use crate::{GgufError, Metadata, Value};

/// The note about [`AddedToken::has_rule`](super::definition::AddedToken).
const RULES: &str = "llama.cpp does not remove spaces beside added tokens (`lstrip`, `rstrip`, `single_word`), except for Phi 3 if `general.name` says so. Texts with such spaces get other tokens.";

/// Whether a space is added before texts.
pub(super) const ADD_SPACE_PREFIX: &str = "tokenizer.ggml.add_space_prefix";
/// Before which texts it is added, if `Metaspace` does it. llama.cpp does not know this key.
pub(super) const PREPEND_SCHEME: &str = "deepburn.tokenizer.prepend_scheme";

/// The type of a token (`llama_token_type` of llama.cpp).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub(super) enum TokenType {
    /// Part of a text.
    Normal = 1,
    /// Stands for text without a token.
    Unknown = 2,
    /// Not shown, such as the end of a turn.
    Control = 3,
    /// Found in texts before they are split.
    UserDefined = 4,
    /// A row of the embedding without a token.
    Unused = 5,
    /// A byte of text without a token.
    Byte = 6,
}

impl TokenType {
    /// Returns the type with a number.
    pub(super) fn from_id(id: i32) -> Option<Self> {
        let all = [
            Self::Normal,
            Self::Unknown,
            Self::Control,
            Self::UserDefined,
            Self::Unused,
            Self::Byte,
        ];
        all.into_iter().find(|it| *it as i32 == id)
    }

    /// Returns whether tokens of this type are found in texts before they are split.
    pub(super) fn is_added(self) -> bool {
        matches!(self, Self::Unknown | Self::Control | Self::UserDefined)
    }

    /// Returns whether a row of the embedding has a token.
    pub(super) fn is_in_vocabulary(self) -> bool {
        self != Self::Unused
    }
}

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
    /// Reads a parsed `tokenizer.json`. `vocab_size` is the number of rows of the embedding. Rows without a token get
    /// the names `[PAD…]`, which llama.cpp's converter uses too.
    ///
    /// # Errors
    /// Returns an error that names the part if llama.cpp cannot split texts in the same way: a model other than BPE, an
    /// unknown pre-tokenizer or normalizer, merges that have no scores, an id that is not below `vocab_size`, or two
    /// tokens with one text.
    pub fn from_json(tokenizer: &Json, vocab_size: usize) -> Result<Self, GgufError> {
        let definition = Definition::read(tokenizer)?;
        let pre_tokenizer = steps(&tokenizer["pre_tokenizer"], "pretokenizers");
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

    /// Returns differences from llama.cpp that a user should know, as whole sentences: parts that llama.cpp does not
    /// have, and that change few texts.
    #[must_use]
    pub fn notes(&self) -> &[&'static str] {
        &self.notes
    }

    /// Returns `name`, or a similar name if llama.cpp cannot load this tokenizer in a model that is called so.
    #[must_use]
    pub fn supported_name(&self, name: &str) -> String {
        let mut name = name.to_owned();
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

    /// Appends the keys `tokenizer.ggml.*`. `general.name` must be in `metadata` already, if the file has one.
    ///
    /// # Errors
    /// Returns an error if a key exists already, or if llama.cpp cannot load the tokenizer with this `general.name`.
    pub fn push_metadata(&self, metadata: &mut Metadata) -> Result<(), GgufError> {
        self.check_name(metadata)?;
        metadata.push("tokenizer.ggml.model", self.model)?;
        metadata.push("tokenizer.ggml.pre", self.pre)?;
        metadata.push("tokenizer.ggml.tokens", self.tokens.clone())?;
        if let Some(scores) = &self.scores {
            metadata.push("tokenizer.ggml.scores", scores.clone())?;
        }
        let types: Vec<i32> = self.types.iter().map(|it| *it as i32).collect();
        metadata.push("tokenizer.ggml.token_type", types)?;
        if let Some(merges) = &self.merges {
            metadata.push("tokenizer.ggml.merges", merges.clone())?;
        }
        if let Some(prefix) = self.space_prefix {
            metadata.push(ADD_SPACE_PREFIX, prefix != SpacePrefix::Never)?;
            if let Some(scheme) = prefix.scheme() {
                metadata.push(PREPEND_SCHEME, scheme)?;
            }
        }
        Ok(())
    }
}

impl GgufTokenizer {
    /// Returns a token that llama.cpp needs in a model of this name and that does not exist. llama.cpp changes these tokens
    /// if the name says Phi 3.
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

/// Returns the text and the type of each row of the embedding.
pub(super) fn tokens_by_id(
    definition: &Definition,
    vocab_size: usize,
) -> Result<(Vec<String>, Vec<TokenType>), GgufError> {
    let mut tokens: Vec<String> = (0..vocab_size).map(|id| format!("[PAD{id}]")).collect();
    let mut types = vec![TokenType::Unused; vocab_size];
    let mut set = |id: usize, text: String, token_type| {
        let (Some(token), Some(old)) = (tokens.get_mut(id), types.get_mut(id)) else {
            let problem = format!("{id} of {text:?} must be below `vocab_size`, {vocab_size}");
            return Err(invalid("id", problem));
        };
        (*token, *old) = (text, token_type);
        Ok(())
    };
    for (text, id) in &definition.vocabulary {
        set(*id, text.clone(), TokenType::Normal)?;
    }
    for token in &definition.added {
        let is_control = token.is_special || looks_special(&token.text);
        let (text, token_type) = match is_control {
            true => (token.text.clone(), TokenType::Control),
            // llama.cpp searches texts for these tokens before it replaces spaces.
            false => (token.text.replace('\u{2581}', " "), TokenType::UserDefined),
        };
        set(token.id, text, token_type)?;
    }
    let mut ids: HashMap<&str, usize> = HashMap::new();
    for (id, text) in tokens.iter().enumerate() {
        if let Some(other) = ids.insert(text, id) {
            let problem = format!("{other} and {id} have one text, {text:?}; llama.cpp needs two");
            return Err(invalid("id", problem));
        }
    }
    Ok((tokens, types))
}

/// Returns whether an added token is a control token although it is not marked as one (`does_token_look_special`).
fn looks_special(text: &str) -> bool {
    let is_between = |start, end| text.starts_with(start) && text.ends_with(end);
    ["<pad>", "<mask>", "<2mass>", "[@BOS@]"].contains(&text)
        || is_between("<|", "|>")
        || is_between("<\u{ff5c}", "\u{ff5c}>")
        || is_between("<unused", ">")
}
