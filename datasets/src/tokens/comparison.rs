//! Compares a tokenizer with the tokenizer of a pretrained model.
//!
//! The embeddings of a model belong to the ids of its own tokenizer. Another tokenizer can be used
//! with the same weights only if the ids stand for the same tokens. It may have additional tokens.

use serde_json::Value;

use crate::{Result, Tokenizer};

/// The differences between the tokenizer of a model and another one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenizerComparison {
    /// The first id that stands for another token.
    pub changed: Option<ChangedToken>,
    /// The number of ids that stand for another token.
    pub num_changed: usize,
    /// The parts of the definition, besides the vocabulary, that differ. Texts may then be split
    /// into other tokens.
    pub parts: Vec<&'static str>,
}

/// An id that stands for two tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChangedToken {
    /// The id.
    pub id: u32,
    /// Its token in the tokenizer of the model.
    pub own: String,
    /// Its token in the other tokenizer.
    pub other: String,
}

impl Tokenizer {
    /// Compares this tokenizer of a model with `other`. Ids that only one of them has are not
    /// differences.
    ///
    /// # Errors
    /// Returns [`crate::DataError::Tokenizer`] if the library cannot serialize a tokenizer.
    pub fn compare(&self, other: &Self) -> Result<TokenizerComparison> {
        let shared = self.vocab_size().min(other.vocab_size()) as u32;
        let mut changed = (0..shared).filter_map(|id| {
            let (own, other) = (self.token(id)?, other.token(id)?);
            (own != other).then_some(ChangedToken { id, own, other })
        });
        let first = changed.next();
        let num_changed = usize::from(first.is_some()) + changed.count();
        let (own, other) = (self.definition()?, other.definition()?);
        let mut parts = Vec::new();
        if own != other {
            // The library has written both, so they are valid.
            let [own, other] =
                [own, other].map(|it| serde_json::from_str(&it).unwrap_or(Value::Null));
            let names = ["normalizer", "pre_tokenizer", "model"].into_iter();
            parts.extend(names.filter(|name| splitting(&own[*name]) != splitting(&other[*name])));
        }
        Ok(TokenizerComparison { changed: first, num_changed, parts })
    }
}

/// Returns the part of a definition that determines how text is split: without the vocabulary,
/// without settings of offsets, and with null for an empty text.
fn splitting(part: &Value) -> Value {
    match part {
        Value::Object(fields) => {
            let fields = fields.iter().filter(|(name, value)| {
                !matches!(name.as_str(), "vocab" | "trim_offsets") && !is_empty(value)
            });
            fields.map(|(name, value)| (name.clone(), splitting(value))).collect()
        }
        Value::Array(items) => items.iter().map(splitting).collect(),
        value => value.clone(),
    }
}

/// Returns whether a setting is off: null, false or an empty text.
fn is_empty(value: &Value) -> bool {
    value.is_null() || value == false || value == ""
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::json;

    use super::*;

    fn words(vocab: Value, pre_tokenizer: &str) -> Tokenizer {
        let folder = tempfile::tempdir().unwrap();
        let json = json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
            "pre_tokenizer": { "type": pre_tokenizer }, "post_processor": null, "decoder": null,
            "model": { "type": "WordLevel", "unk_token": "?", "vocab": vocab },
        });
        fs::write(folder.path().join("tokenizer.json"), json.to_string()).unwrap();
        Tokenizer::load(folder.path()).unwrap()
    }

    #[test]
    fn ids_that_stand_for_other_tokens_are_counted() {
        let own = words(json!({ "?": 0, "one": 1, "two": 2 }), "Whitespace");
        let compare = |vocab| own.compare(&words(vocab, "Whitespace")).unwrap();
        let none = TokenizerComparison { changed: None, num_changed: 0, parts: Vec::new() };
        assert_eq!(compare(json!({ "?": 0, "one": 1, "two": 2 })), none);
        assert_eq!(compare(json!({ "?": 0, "one": 1, "two": 2, "three": 3 })), none);
        assert_eq!(compare(json!({ "?": 0, "one": 1 })), none);
        let found = compare(json!({ "?": 0, "two": 1, "one": 2, "three": 3 }));
        let changed = ChangedToken { id: 1, own: "one".to_owned(), other: "two".to_owned() };
        assert_eq!((found.changed, found.num_changed), (Some(changed), 2));
        let other = words(json!({ "?": 0, "one": 1, "two": 2 }), "WhitespaceSplit");
        let expected = TokenizerComparison { parts: vec!["pre_tokenizer"], ..none };
        assert_eq!(own.compare(&other).unwrap(), expected);
    }

    /// A vocabulary with merges has the same components as the `tokenizer.json` that is saved from
    /// it.
    #[test]
    fn files_of_one_tokenizer_do_not_differ() {
        let tokenizer = Tokenizer::train(&["a text of a few words, a few"], 280).unwrap();
        let folder = tempfile::tempdir().unwrap();
        tokenizer.save(folder.path()).unwrap();
        fs::remove_file(folder.path().join("tokenizer.json")).unwrap();
        let loaded = Tokenizer::load(folder.path()).unwrap();
        let found = tokenizer.compare(&loaded).unwrap();
        assert_eq!((found.changed, found.parts), (None, Vec::new()));
    }
}
