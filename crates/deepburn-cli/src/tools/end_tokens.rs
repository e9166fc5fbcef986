//! The tokens of a model's files at which generation ends.

use crate::console;

/// Returns the `ids` of the file `source` that are among the `vocab_size` tokens of the tokenizer.
/// Prints a note about the others, which are never generated.
pub(crate) fn generated_tokens(source: &str, ids: &[u32], vocab_size: usize) -> Vec<u32> {
    let (known, unknown): (Vec<u32>, Vec<u32>) =
        ids.iter().copied().partition(|id| (*id as usize) < vocab_size);
    if let [first, rest @ ..] = &unknown[..] {
        let more =
            if rest.is_empty() { String::new() } else { format!(" and {} more", rest.len()) };
        console::eprint(&format!(
            "{source}: eos_token_id {first}{more} cannot end the text: the tokenizer has {vocab_size} tokens"
        ));
    }
    known
}
