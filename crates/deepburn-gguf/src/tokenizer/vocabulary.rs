//! The tokens of a model.

use std::collections::HashMap;

use super::definition::{Definition, invalid};
use crate::GgufError;

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
    // After the vocabulary, which may have the same tokens as normal ones.
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

/// Returns whether an added token is a control token although it is not marked as one
/// (`does_token_look_special`).
fn looks_special(text: &str) -> bool {
    let is_between = |start, end| text.starts_with(start) && text.ends_with(end);
    ["<pad>", "<mask>", "<2mass>", "[@BOS@]"].contains(&text)
        || is_between("<|", "|>")
        || is_between("<\u{ff5c}", "\u{ff5c}>")
        || is_between("<unused", ">")
}
