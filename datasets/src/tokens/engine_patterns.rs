//! Patterns that mean something else to the engine of `transformers`.
//!
//! The Python library matches patterns with Oniguruma, and this one with `fancy-regex`. They agree
//! on general categories such as `\p{L}` and on `\s`, with which published tokenizers are defined.
//! Word characters are another set, for example: only Oniguruma's has `½`.

use serde_json::{Value, json};

/// What means something else, as it is written.
const AMBIGUOUS: [&str; 5] = [r"\w", r"\W", r"\b", r"\B", "[[:"];

/// Returns a pattern of a tokenizer's normalizer or pre-tokenizer that may split a text in another
/// way than in `transformers`.
pub(crate) fn ambiguous_pattern(library: &tokenizers::Tokenizer) -> Option<String> {
    find(&json!([library.get_normalizer(), library.get_pre_tokenizer()]))
}

fn find(value: &Value) -> Option<String> {
    match value {
        Value::Array(items) => items.iter().find_map(find),
        Value::Object(fields) => {
            let own = fields.get("Regex").and_then(Value::as_str).filter(|it| is_ambiguous(it));
            own.map(str::to_owned).or_else(|| fields.values().find_map(find))
        }
        _ => None,
    }
}

fn is_ambiguous(pattern: &str) -> bool {
    // An escaped backslash starts no class.
    let pattern = pattern.replace(r"\\", "");
    let ignores_case_of_class = |group: &str| {
        // `(?i)` applies to the rest of the pattern, and `(?i:` to its group.
        let end = if group.starts_with(')') { None } else { group.find(')') };
        group[..end.unwrap_or(group.len())].contains(r"\p")
    };
    AMBIGUOUS.iter().any(|it| pattern.contains(it))
        || pattern.split("(?i").skip(1).any(ignores_case_of_class)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokens::splitter::GPT2_PATTERN;

    #[test]
    fn patterns_of_published_tokenizers_mean_the_same() {
        let llama3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+";
        for pattern in [GPT2_PATTERN, llama3, r"\d|[\p{P}\p{S}]", r"a\\w"] {
            assert!(!is_ambiguous(pattern), "{pattern}");
        }
        for pattern in [r"\w+|\W+", r"\b", "[[:alnum:]]+", r"(?i:\p{Lu})+", r"(?i)a|\p{Lu}"] {
            assert!(is_ambiguous(pattern), "{pattern}");
        }
        let nested = json!([null, {"pretokenizers": [{"pattern": {"Regex": r"\w+"}}]}]);
        assert_eq!(find(&nested).as_deref(), Some(r"\w+"));
    }
}
