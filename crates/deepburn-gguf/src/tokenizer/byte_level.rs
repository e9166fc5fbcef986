//! Byte-level BPE.

use serde_json::Value as Json;

use super::GgufTokenizer;
use super::definition::{Definition, invalid, steps};
use super::pre_tokenizer::pre_tokenizer;
use super::vocabulary::tokens_by_id;
use crate::GgufError;

const NFC: &str =
    "llama.cpp does not normalize texts to NFC. Texts with decomposed characters get other tokens.";

/// Returns the tokenizer `gpt2` of llama.cpp.
pub(super) fn tokenizer(
    json: &Json,
    definition: &Definition,
    vocab_size: usize,
) -> Result<GgufTokenizer, GgufError> {
    if json["model"]["byte_fallback"] == true {
        let problem = "is true; llama.cpp supports false for byte-level BPE";
        return Err(invalid("model.byte_fallback", problem));
    }
    let pre = pre_tokenizer(json)?;
    // No other normalizer has passed the check of the pre-tokenizer.
    let is_nfc = !steps(&json["normalizer"], "normalizers").is_empty();
    let (tokens, types) = tokens_by_id(definition, vocab_size)?;
    // A space in a part would end it. Byte-level vocabularies write it as U+0120, and so does
    // llama.cpp's converter.
    let part = |text: &str| text.replace(' ', "\u{120}");
    let merges = definition.merges.iter();
    let merges = merges.map(|[left, right]| format!("{} {}", part(left), part(right))).collect();
    Ok(GgufTokenizer {
        model: "gpt2",
        pre,
        tokens,
        types,
        scores: None,
        merges: Some(merges),
        space_prefix: None,
        notes: if is_nfc { vec![NFC] } else { Vec::new() },
    })
}
