//! Reading of tokenizers from a file.

use std::collections::HashMap;

use super::GgufTokenizer;
use super::keys::{ADD_SPACE_PREFIX, MERGES, MODEL, PRE, PREPEND_SCHEME, SCORES, TOKENS, TYPES};
use super::pre_tokenizer::PreTokenizer;
use super::space_prefix::SpacePrefix;
use super::vocabulary::TokenType;
use crate::{Array, GgufError, Metadata, Value};

/// The longest part of a text in bytes, without added tokens. The longest of published models are
/// runs of 31 spaces, which have 93 bytes. The time of finding merges is quadratic in it.
const MAX_TOKEN_LEN: usize = 256;

/// What to do with a file that has another tokenizer.
const REMEDY: &str = "give the Hugging Face folder of the model";

impl GgufTokenizer {
    /// Reads the tokenizer of a file whose embedding has `vocab_size` rows: one that
    /// [`push_metadata`](Self::push_metadata) wrote, or one of llama.cpp's converter.
    ///
    /// # Errors
    /// Returns an error that names the key if it is missing or invalid, if two tokens have one
    /// text, if a merge names an unknown token, or if the model or the pre-tokenizer is not
    /// supported.
    pub fn from_metadata(metadata: &Metadata, vocab_size: usize) -> Result<Self, GgufError> {
        let text = |key: &str| metadata.get(key).and_then(Value::as_str);
        let refused = |key: &str, rule: &str| {
            let found = metadata.get(key).map_or_else(|| "missing".to_owned(), Value::shown);
            GgufError::metadata(key, format!("is {found}; {rule}; {REMEDY}"))
        };
        let is_byte_level = match text(MODEL) {
            Some("gpt2") => true,
            Some("llama") => false,
            _ => return Err(refused(MODEL, "supported are gpt2 and llama")),
        };
        let pre = match text(PRE).and_then(PreTokenizer::of_name) {
            // The name that llama.cpp's converter writes for SentencePiece, which has no
            // pre-tokenizer.
            _ if !is_byte_level => "default",
            Some(pre) => pre.name,
            None => {
                let all: Vec<_> = PreTokenizer::names().collect();
                return Err(refused(PRE, &format!("supported are {}", all.join(", "))));
            }
        };
        let tokens = read_tokens(metadata, vocab_size)?;
        let types = read_types(metadata, tokens.len())?;
        let by_text = ids_by_text(&tokens)?;
        let merges = read_merges(metadata, &by_text, &types)?;
        let scores = match (is_byte_level, &merges) {
            (true, None) => return Err(refused(MERGES, "gpt2 needs merges")),
            // Only the order of merges counts in BPE, so scores in the file do not matter.
            (true, Some(_)) => None,
            (false, merges) => read_scores(metadata, &tokens, &types, merges.is_none())?,
        };
        let space_prefix = match is_byte_level {
            true => None,
            false => Some(read_space_prefix(metadata)?),
        };
        let model = if is_byte_level { "gpt2" } else { "llama" };
        // Notes compare llama.cpp with a `tokenizer.json`, which does not exist here.
        let notes = Vec::new();
        Ok(Self { model, pre, tokens, types, scores, merges, space_prefix, notes })
    }
}

/// Reads where a space is added.
fn read_space_prefix(metadata: &Metadata) -> Result<SpacePrefix, GgufError> {
    let refused = |key: &str, value: &Value, rule: &str| {
        Err(GgufError::metadata(key, format!("is {}; must be {rule}", value.shown())))
    };
    // DeepBurn's own key tells more than llama.cpp's, so it has precedence.
    if let Some(value) = metadata.get(PREPEND_SCHEME) {
        return match value.as_str().and_then(SpacePrefix::of_scheme) {
            Some(prefix) => Ok(prefix),
            None => refused(PREPEND_SCHEME, value, "first or always"),
        };
    }
    match metadata.get(ADD_SPACE_PREFIX) {
        None | Some(Value::Bool(true)) => Ok(SpacePrefix::EveryText),
        Some(Value::Bool(false)) => Ok(SpacePrefix::Never),
        Some(value) => refused(ADD_SPACE_PREFIX, value, "true or false"),
    }
}

/// Reads the tokens. A token without a text gets the name that llama.cpp gives it.
fn read_tokens(metadata: &Metadata, vocab_size: usize) -> Result<Vec<String>, GgufError> {
    let Some(Value::Array(Array::String(texts))) = metadata.get(TOKENS) else {
        return Err(GgufError::metadata(TOKENS, format!("must be a list of texts; {REMEDY}")));
    };
    if texts.len() != vocab_size {
        let problem =
            format!("has {} tokens; the embedding has {vocab_size} rows; {REMEDY}", texts.len());
        return Err(GgufError::metadata(TOKENS, problem));
    }
    let named = |(id, text): (usize, &String)| match text.as_str() {
        "" => format!("[EMPTY_{id}]"),
        text => text.to_owned(),
    };
    Ok(texts.iter().enumerate().map(named).collect())
}

/// Reads the type of each token.
fn read_types(metadata: &Metadata, len: usize) -> Result<Vec<TokenType>, GgufError> {
    let types: Option<Vec<_>> = match metadata.get(TYPES) {
        // As in llama.cpp.
        None => return Ok(vec![TokenType::Normal; len]),
        Some(Value::Array(Array::I32(ids))) => {
            ids.iter().map(|id| TokenType::from_id(*id)).collect()
        }
        Some(_) => None,
    };
    types.filter(|types| types.len() == len).ok_or_else(|| {
        let problem = format!("must be a list of {len} integers from 1 to 6; {REMEDY}");
        GgufError::metadata(TYPES, problem)
    })
}

/// Returns the id of each text.
fn ids_by_text(tokens: &[String]) -> Result<HashMap<&str, usize>, GgufError> {
    let mut ids = HashMap::with_capacity(tokens.len());
    for (id, text) in tokens.iter().enumerate() {
        if let Some(other) = ids.insert(text.as_str(), id) {
            let text = Value::from(text.as_str()).shown();
            let problem = format!("has {text} twice, at {other} and {id}; {REMEDY}");
            return Err(GgufError::metadata(TOKENS, problem));
        }
    }
    Ok(ids)
}

/// Reads the merges. Of two equal ones, the first counts.
fn read_merges(
    metadata: &Metadata,
    by_text: &HashMap<&str, usize>,
    types: &[TokenType],
) -> Result<Option<Vec<String>>, GgufError> {
    let invalid = |problem: String| GgufError::metadata(MERGES, format!("{problem}; {REMEDY}"));
    let merges = match metadata.get(MERGES) {
        None => return Ok(None),
        Some(Value::Array(Array::String(merges))) => merges,
        Some(_) => return Err(invalid("must be a list of texts".to_owned())),
    };
    let is_token = |text: &str| {
        by_text.get(text).is_some_and(|id| types.get(*id).is_some_and(|it| it.is_in_vocabulary()))
    };
    for merge in merges {
        let parts = split_merge(merge);
        let is_known = parts.is_some_and(|(left, right)| {
            is_token(left) && is_token(right) && is_token(&format!("{left}{right}"))
        });
        if !is_known {
            let merge = Value::from(merge.as_str()).shown();
            return Err(invalid(format!("has {merge}, which is not two tokens that make a third")));
        }
    }
    Ok(Some(merges.clone()))
}

/// Splits a merge at its space. A space at the start belongs to the first part, as in llama.cpp.
pub(super) fn split_merge(merge: &str) -> Option<(&str, &str)> {
    let first = merge.chars().next()?.len_utf8();
    let at = first + merge.get(first..)?.find(' ')?;
    Some((merge.get(..at)?, merge.get(at + 1..)?))
}

/// Reads the scores. Merges follow from them if `are_needed`.
fn read_scores(
    metadata: &Metadata,
    tokens: &[String],
    types: &[TokenType],
    are_needed: bool,
) -> Result<Option<Vec<f32>>, GgufError> {
    let scores = match metadata.get(SCORES) {
        None if !are_needed => return Ok(None),
        Some(Value::Array(Array::F32(scores))) => Some(scores),
        _ => None,
    };
    let is_complete = |scores: &&Vec<f32>| {
        scores.len() == tokens.len() && scores.iter().all(|score| score.is_finite())
    };
    let Some(scores) = scores.filter(is_complete) else {
        let problem = format!("must be a list of {} numbers; {REMEDY}", tokens.len());
        return Err(GgufError::metadata(SCORES, problem));
    };
    let mut parts = tokens.iter().zip(types).filter(|(_, it)| **it == TokenType::Normal);
    match parts.find(|(text, _)| text.len() > MAX_TOKEN_LEN) {
        None => Ok(Some(scores.clone())),
        Some((text, _)) => {
            let problem = format!(
                "has {} with {} bytes; at most {MAX_TOKEN_LEN} are supported; {REMEDY}",
                Value::from(text.as_str()).shown(),
                text.len()
            );
            Err(GgufError::metadata(TOKENS, problem))
        }
    }
}
