//! The names by which llama.cpp knows pre-tokenizers.
//!
//! Its converter recognizes a tokenizer by a hash of the ids of one text, which depends on the
//! vocabulary. The names here follow from the definition, so that a vocabulary that was trained
//! anew has one too.

use serde_json::{Value as Json, json};

use super::definition::{invalid, kind, steps};
use crate::GgufError;

/// The pattern that `ByteLevel` of `tokenizers` has, from GPT-2.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// The pre-tokenizer of SmolLM, which splits digits first.
const SMOLLM: &str = "smollm";

/// The pre-tokenizer of Qwen, whose tokenizers normalize texts to NFC.
const NORMALIZED: &str = "qwen2";

/// Patterns of `Split`, whether words that are tokens are not merged (`ignore_merges`), and the
/// name in llama.cpp. The patterns are in the `tokenizer.json` of Llama 3, Phi 4, Qwen 2, Mistral
/// Nemo and Phi 4 mini, and in comments of llama.cpp's `llm_tokenizer_bpe`.
const PATTERNS: [(&str, bool, &str); 6] = [
    (GPT2, false, "gpt-2"),
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        true,
        "llama-bpe",
    ),
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        false,
        "dbrx",
    ),
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        false,
        NORMALIZED,
    ),
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        true,
        "tekken",
    ),
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        false,
        "gpt-4o",
    ),
];

/// Other names of the same pre-tokenizers in llama.cpp. DeepSeek's distilled models have Qwen's
/// without its normalizer.
const ALIASES: [(&str, &str); 3] =
    [("llama3", "llama-bpe"), ("llama-v3", "llama-bpe"), ("deepseek-r1-qwen", "qwen2")];

/// A pre-tokenizer of llama.cpp.
pub(super) struct PreTokenizer {
    /// Its name in files.
    pub(super) name: &'static str,
    /// Whether words that are tokens are not merged.
    pub(super) ignores_merges: bool,
    /// The pattern of words, or `None` for SmolLM.
    pattern: Option<&'static str>,
}

impl PreTokenizer {
    /// Returns the names of all pre-tokenizers.
    pub(super) fn names() -> impl Iterator<Item = &'static str> {
        let patterns = PATTERNS.into_iter().map(|(_, _, name)| name);
        patterns.chain([SMOLLM]).chain(ALIASES.into_iter().map(|(name, _)| name))
    }

    /// Returns the pre-tokenizer with a name.
    pub(super) fn of_name(name: &str) -> Option<Self> {
        let name = Self::names().find(|it| *it == name)?;
        let own = ALIASES.into_iter().find(|(alias, _)| *alias == name).map_or(name, |it| it.1);
        let found = PATTERNS.into_iter().find(|(_, _, it)| *it == own);
        let (pattern, ignores_merges) = found.map_or((None, false), |it| (Some(it.0), it.1));
        Some(Self { name, ignores_merges, pattern })
    }

    /// Returns whether llama.cpp adds the bos token before texts if the file does not say it.
    pub(super) fn adds_bos(&self) -> bool {
        self.ignores_merges
    }

    /// Returns the pre-tokenizer of a `tokenizer.json`.
    pub(super) fn to_json(&self) -> Json {
        let byte_level = |use_regex: bool| {
            json!({
                "type": "ByteLevel",
                "add_prefix_space": false,
                "trim_offsets": true,
                "use_regex": use_regex,
            })
        };
        let (first, use_regex) = match self.pattern {
            // `ByteLevel` has this pattern built in.
            Some(GPT2) => return byte_level(true),
            Some(pattern) => {
                let pattern = json!({"Regex": pattern});
                (
                    json!({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": false}),
                    false,
                )
            }
            None => (json!({"type": "Digits", "individual_digits": true}), true),
        };
        json!({"type": "Sequence", "pretokenizers": [first, byte_level(use_regex)]})
    }

    /// Returns the normalizer of a `tokenizer.json`.
    pub(super) fn normalizer(&self) -> Json {
        match self.name == NORMALIZED {
            true => json!({"type": "NFC"}),
            false => Json::Null,
        }
    }
}

/// Returns the name of a byte-level pre-tokenizer.
///
/// # Errors
/// Returns an error that describes the pre-tokenizer if llama.cpp has none like it.
pub(super) fn pre_tokenizer(json: &Json) -> Result<&'static str, GgufError> {
    let all = steps(&json["pre_tokenizer"], "pretokenizers");
    let ignores_merges = json["model"]["ignore_merges"].as_bool().unwrap_or(false);
    let byte_level = |step: &Json, use_regex: bool| {
        kind(step) == "ByteLevel"
            && step["add_prefix_space"] == false
            // `tokenizers` takes true if the field is missing.
            && step["use_regex"].as_bool().unwrap_or(true) == use_regex
    };
    let name = match all.as_slice() {
        [only] if byte_level(only, true) && !ignores_merges => Some("gpt-2"),
        [digits, last] if byte_level(last, true) && !ignores_merges => {
            let is_single = kind(digits) == "Digits" && digits["individual_digits"] == true;
            is_single.then_some(SMOLLM)
        }
        [split, last] if byte_level(last, false) && is_split(split) => {
            let is_same = |(pattern, ignores, _): &&(&str, bool, &str)| {
                split["pattern"]["Regex"] == *pattern && *ignores == ignores_merges
            };
            PATTERNS.iter().find(is_same).map(|(_, _, name)| *name)
        }
        _ => None,
    };
    let Some(name) = name else {
        let problem = format!(
            "is {}, with `ignore_merges` {ignores_merges}; supported are the pre-tokenizers of GPT-2, Llama 3, Qwen 2, SmolLM, Mistral Nemo and Phi 4; keep the model as safetensors",
            json["pre_tokenizer"]
        );
        return Err(invalid("pre_tokenizer", problem));
    };
    check_normalizer(json, name)?;
    Ok(name)
}

/// Returns whether a step makes each match of its pattern a word.
fn is_split(step: &Json) -> bool {
    let how = (step["behavior"].as_str(), step["invert"].as_bool());
    // The two are the same for patterns that match every character.
    let is_match =
        matches!(how, (Some("Isolated"), Some(false) | None) | (Some("Removed"), Some(true)));
    kind(step) == "Split" && is_match
}

/// llama.cpp has no normalizer for BPE. NFC of Qwen changes few texts, and its converter omits it
/// too.
fn check_normalizer(json: &Json, name: &str) -> Result<(), GgufError> {
    let normalizer = steps(&json["normalizer"], "normalizers");
    match normalizer.as_slice() {
        [] => Ok(()),
        [only] if kind(only) == "NFC" && name == NORMALIZED => Ok(()),
        [first, ..] => {
            let problem = format!(
                "is {}; llama.cpp supports none for {name}; keep the model as safetensors",
                kind(first)
            );
            Err(invalid("normalizer", problem))
        }
    }
}
