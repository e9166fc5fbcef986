//! The parts of a `tokenizer.json` that GGUF files contain.

use serde_json::Value as Json;

use crate::GgufError;

/// An added token.
pub(super) struct AddedToken {
    pub(super) id: usize,
    pub(super) text: String,
    pub(super) is_special: bool,
    /// Whether it takes spaces beside it, or has to be a whole word. llama.cpp ignores both.
    pub(super) has_rule: bool,
}

/// Vocabulary, merges and added tokens of a BPE model.
pub(super) struct Definition {
    /// Tokens with their ids, in no order.
    pub(super) vocabulary: Vec<(String, usize)>,
    /// The pairs that are merged, the first pair first.
    pub(super) merges: Vec<[String; 2]>,
    pub(super) added: Vec<AddedToken>,
}

/// Returns the error about a field of `tokenizer.json`.
pub(super) fn invalid(field: &str, problem: impl Into<String>) -> GgufError {
    GgufError::field(format!("tokenizer.json, `{field}`"), problem)
}

/// Returns the type of a part, `none` if it is missing or null.
pub(super) fn kind(part: &Json) -> &str {
    match part.is_null() {
        true => "none",
        false => part["type"].as_str().unwrap_or("without a type"),
    }
}

/// Returns the steps of a normalizer, pre-tokenizer, post-processor or decoder: the elements of a
/// sequence, or the part itself.
pub(super) fn steps<'a>(part: &'a Json, list: &str) -> Vec<&'a Json> {
    match (kind(part), part[list].as_array()) {
        ("none", _) => Vec::new(),
        ("Sequence", Some(steps)) => steps.iter().collect(),
        _ => vec![part],
    }
}

impl Definition {
    /// Reads the tokens.
    pub(super) fn read(tokenizer: &Json) -> Result<Self, GgufError> {
        let model = &tokenizer["model"];
        if model["type"] != "BPE" {
            let problem = format!(
                "is {}; llama.cpp supports BPE; keep the model as safetensors",
                kind(model)
            );
            return Err(invalid("model.type", problem));
        }
        for field in ["dropout", "continuing_subword_prefix", "end_of_word_suffix"] {
            let value = &model[field];
            // Some files have an empty text or 0 instead of null.
            if !value.is_null() && *value != "" && *value != 0.0 {
                let problem = format!("is {value}; llama.cpp does not support it");
                return Err(invalid(&format!("model.{field}"), problem));
            }
        }
        let vocabulary = model["vocab"].as_object();
        let vocabulary = vocabulary.ok_or_else(|| invalid("model.vocab", "must be an object"))?;
        let vocabulary = vocabulary.iter().map(|(text, id)| Ok((text.clone(), read_id(id)?)));
        let merges = model["merges"].as_array();
        let merges = merges.ok_or_else(|| invalid("model.merges", "must be a list"))?;
        // The list may be missing if there are none.
        let added = tokenizer["added_tokens"].as_array().map_or(&[][..], Vec::as_slice);
        Ok(Self {
            vocabulary: vocabulary.collect::<Result<_, GgufError>>()?,
            merges: merges.iter().map(read_merge).collect::<Result<_, _>>()?,
            added: added.iter().map(read_added).collect::<Result<_, _>>()?,
        })
    }
}

/// Reads the id of a token.
fn read_id(id: &Json) -> Result<usize, GgufError> {
    let number = id.as_u64().and_then(|id| u32::try_from(id).ok());
    number
        .map(|id| id as usize)
        .ok_or_else(|| invalid("id", format!("is {id}; it must be an integer of 32 bits")))
}

/// Reads a merge: a list of two texts, or a text with a space in older files.
fn read_merge(merge: &Json) -> Result<[String; 2], GgufError> {
    let pair = match merge {
        Json::String(text) => text.split_once(' '),
        Json::Array(pair) => match pair.as_slice() {
            [Json::String(left), Json::String(right)] => Some((left.as_str(), right.as_str())),
            _ => None,
        },
        _ => None,
    };
    let (left, right) =
        pair.ok_or_else(|| invalid("model.merges", format!("has {merge}; a merge is two texts")))?;
    Ok([left.to_owned(), right.to_owned()])
}

/// Reads an added token.
fn read_added(token: &Json) -> Result<AddedToken, GgufError> {
    let text = token["content"].as_str();
    let text = text.ok_or_else(|| invalid("added_tokens", format!("has {token}")))?;
    Ok(AddedToken {
        id: read_id(&token["id"])?,
        text: text.to_owned(),
        is_special: token["special"].as_bool().unwrap_or(false),
        has_rule: ["lstrip", "rstrip", "single_word"].iter().any(|rule| token[rule] == true),
    })
}
