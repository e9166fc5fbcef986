//! SentencePiece BPE: texts are merged without pre-tokenizer, and spaces are written as U+2581.

use std::collections::{HashMap, HashSet};

use serde_json::Value as Json;

use super::GgufTokenizer;
use super::definition::{Definition, invalid, kind, steps};
use super::space_prefix::SpacePrefix;
use super::vocabulary::{TokenType, tokens_by_id};
use crate::GgufError;

/// The character that stands for a space.
pub(super) const SPACE: &str = "\u{2581}";
/// The score of tokens that no merge makes, as in llama.cpp's converter.
const NO_MERGE: f32 = -1000.0;

const PREFIX: &str = "llama.cpp adds a space before all texts, also before texts that begin with a space or follow a special token. They get one token more.";

/// Returns the tokenizer `llama` of llama.cpp.
pub(super) fn tokenizer(
    json: &Json,
    definition: &Definition,
    vocab_size: usize,
) -> Result<GgufTokenizer, GgufError> {
    if json["model"]["byte_fallback"] != true {
        let problem =
            "must be true without a byte-level pre-tokenizer; keep the model as safetensors";
        return Err(invalid("model.byte_fallback", problem));
    }
    let space_prefix = read_space_prefix(json, definition)?;
    let (tokens, mut types) = tokens_by_id(definition, vocab_size)?;
    let mut num_bytes = 0;
    for (text, token_type) in tokens.iter().zip(&mut types) {
        if *token_type == TokenType::Normal && is_byte(text) {
            *token_type = TokenType::Byte;
            num_bytes += 1;
        }
    }
    // Characters without a token become bytes, so each byte needs a token.
    if num_bytes != 256 {
        let problem = format!("has {num_bytes} of the 256 tokens <0x00> to <0xFF>");
        return Err(invalid("model.vocab", problem));
    }
    let unknown = json["model"]["unk_token"].as_str();
    if let Some(id) = unknown.and_then(|text| tokens.iter().position(|token| token == text)) {
        types[id] = TokenType::Unknown;
    }
    let scores = scores(definition, &tokens, &types)?;
    Ok(GgufTokenizer {
        model: "llama",
        pre: "default",
        tokens,
        types,
        scores: Some(scores),
        merges: None,
        space_prefix: Some(space_prefix),
        notes: if space_prefix.scheme().is_some() { vec![PREFIX] } else { Vec::new() },
    })
}

/// Returns whether a token is `<0x00>` to `<0xFF>`.
fn is_byte(text: &str) -> bool {
    let digits = text.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    digits.is_some_and(|it| it.len() == 2 && it.bytes().all(|digit| digit.is_ascii_hexdigit()))
}

/// Reads whether a space is added before texts. Spaces are replaced by a normalizer (Llama 2,
/// Gemma) or by `Metaspace`.
fn read_space_prefix(json: &Json, definition: &Definition) -> Result<SpacePrefix, GgufError> {
    let normalizer = steps(&json["normalizer"], "normalizers");
    let pre_tokenizer = steps(&json["pre_tokenizer"], "pretokenizers");
    let is_replace = |step: &Json| {
        kind(step) == "Replace" && step["pattern"]["String"] == " " && step["content"] == SPACE
    };
    let is_prepend = |step: &Json| kind(step) == "Prepend" && step["prepend"] == SPACE;
    // Gemma splits at spaces, of which the normalizer has left none.
    let splits_nothing = |step: &Json| kind(step) == "Split" && step["pattern"]["String"] == " ";
    let is_nothing = pre_tokenizer.iter().all(|step| splits_nothing(step));
    match (normalizer.as_slice(), pre_tokenizer.as_slice()) {
        ([replace], _) if is_nothing && is_replace(replace) => Ok(SpacePrefix::Never),
        ([prepend, replace], _) if is_nothing && is_prepend(prepend) && is_replace(replace) => {
            Ok(SpacePrefix::EveryText)
        }
        ([], [space]) if kind(space) == "Metaspace" && space["replacement"] == SPACE => {
            // Split texts are merged in the same way if no token goes beyond a space.
            let inner = |text: &str| text.chars().skip(1).any(|char| SPACE.contains(char));
            let crossing = definition.vocabulary.iter().find(|(text, _)| inner(text));
            if let (Some((text, _)), false) = (crossing, space["split"] == false) {
                let problem = format!(
                    "is true, and {text:?} is a token; llama.cpp does not split there; keep the model as safetensors"
                );
                return Err(invalid("pre_tokenizer.split", problem));
            }
            let scheme = space["prepend_scheme"].as_str();
            Ok(scheme.and_then(SpacePrefix::of_scheme).unwrap_or(SpacePrefix::Never))
        }
        _ => {
            let problem = format!(
                "{} and {} are not a SentencePiece tokenizer of llama.cpp; keep the model as safetensors",
                json["normalizer"], json["pre_tokenizer"]
            );
            Err(invalid("normalizer", problem))
        }
    }
}

/// Returns the scores of tokens. A token's score is minus the number of the first merge that makes
/// it: llama.cpp merges the neighbors whose common token has the highest score, and `tokenizers`
/// the pair of the first merge.
///
/// Both give the same tokens if each pair of tokens whose text is a token is a merge, which holds
/// for converted SentencePiece models. It is checked, because llama.cpp would also merge the other
/// pairs.
fn scores(
    definition: &Definition,
    tokens: &[String],
    types: &[TokenType],
) -> Result<Vec<f32>, GgufError> {
    let by_text: HashMap<&str, usize> =
        tokens.iter().enumerate().map(|(id, text)| (text.as_str(), id)).collect();
    let mut scores = vec![NO_MERGE; tokens.len()];
    let mut has_score = vec![false; tokens.len()];
    // Added tokens are cut out of texts before, and no merge makes bytes.
    for (id, token_type) in types.iter().enumerate() {
        if *token_type == TokenType::Normal {
            scores[id] = -(definition.merges.len() as f32);
        }
    }
    let mut pairs: HashSet<(&str, &str)> = HashSet::new();
    for (rank, [left, right]) in definition.merges.iter().enumerate() {
        pairs.insert((left, right));
        let merged = by_text.get(format!("{left}{right}").as_str());
        let Some(id) = merged.copied().filter(|id| types[*id] == TokenType::Normal) else {
            continue;
        };
        // Several merges may make one token, and the first one counts.
        if !has_score[id] {
            (scores[id], has_score[id]) = (-(rank as f32), true);
        }
    }
    let is_normal =
        |text: &str| by_text.get(text).is_some_and(|id| types[*id] == TokenType::Normal);
    for text in tokens.iter().filter(|text| is_normal(text)) {
        // Both parts have at least one character.
        for (at, _) in text.char_indices().skip(1) {
            let (left, right) = text.split_at(at);
            if is_normal(left) && is_normal(right) && !pairs.contains(&(left, right)) {
                let problem = format!(
                    "does not have {left:?} and {right:?}, whose text {text:?} is a token; llama.cpp would merge them; keep the model as safetensors"
                );
                return Err(invalid("model.merges", problem));
            }
        }
    }
    Ok(scores)
}
