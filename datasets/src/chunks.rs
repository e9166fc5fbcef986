//! Cutting long documents where a tokenizer would cut them anyway.
//!
//! Tokenizing in parallel must give the tokens of the whole document. GPT-2's pre-tokenizer
//! (`'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`) always ends
//! a piece before a newline that follows a non-space, and a newline followed by a non-space is a
//! piece of its own. So a cut before a newline between two non-spaces changes nothing. Where
//! chunks are cut depends on the text alone, never on the number of threads.

/// Bytes after which the next safe place is taken.
pub(crate) const CHUNK_BYTES: usize = 64 << 10;

/// `text` in pieces of at least `chunk_bytes`, the last one excepted.
pub(crate) fn cut_at_lines(text: &str, chunk_bytes: usize) -> Vec<&str> {
    let mut chunks = Vec::with_capacity(text.len() / chunk_bytes.max(1) + 1);
    let mut rest = text;
    while let Some(at) = safe_cut(rest, chunk_bytes.max(1)) {
        let (chunk, after) = rest.split_at(at);
        chunks.push(chunk);
        rest = after;
    }
    chunks.push(rest);
    chunks
}

/// The first newline at or after byte `from` that stands between two non-spaces.
fn safe_cut(text: &str, from: usize) -> Option<usize> {
    let candidates = text.as_bytes().get(from..)?.iter().enumerate();
    candidates.filter(|&(_, &byte)| byte == b'\n').map(|(offset, _)| from + offset).find(|&at| {
        // A newline is one byte in UTF-8, so both sides of it are character boundaries.
        let before = text[..at].chars().next_back();
        let after = text[at + 1..].chars().next();
        let is_text = |side: Option<char>| side.is_some_and(|char| !char.is_whitespace());
        is_text(before) && is_text(after)
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn cuts_before_lone_newlines_only() {
        let text = "one\ntwo\n\nthree \nfour\n five\nsix\n";
        let chunks = cut_at_lines(text, 1);
        assert_eq!(chunks, ["one", "\ntwo\n\nthree \nfour\n five", "\nsix\n"]);
    }

    #[test]
    fn chunks_are_as_large_as_asked() {
        let text = "word\n".repeat(1000) + "end";
        let chunks = cut_at_lines(&text, 100);
        assert!(chunks.iter().rev().skip(1).all(|chunk| (100..=105).contains(&chunk.len())));
        assert_eq!(chunks.concat(), text);
    }

    #[test]
    fn text_without_a_safe_place_stays_whole() {
        assert_eq!(cut_at_lines("", 4), [""]);
        assert_eq!(cut_at_lines("a long line without any end", 4).len(), 1);
        assert_eq!(cut_at_lines("\n\n\n\n\n\n", 1).len(), 1);
    }

    proptest! {
        #[test]
        fn nothing_is_lost(text in "([a-z \u{e9}\u{4e2d}\u{a0}]{0,6}\n?){0,30}", size in 0usize..20) {
            prop_assert_eq!(cut_at_lines(&text, size).concat(), text);
        }
    }
}
