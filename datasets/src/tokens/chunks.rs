//! Cuts long documents at positions where the tokenizer splits them as well.
//!
//! Parallel tokenization must give the tokens of the whole document. In GPT-2's pre-tokenizer
//! (`'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`) no piece has a
//! space after a non-space, and none looks back. So a piece always ends where a space follows a
//! non-space. The text before such a position is split as if the document ended there, and the text
//! after it as if it began there, so a cut changes nothing. The cuts depend only on the text, never
//! on the number of threads.

/// Minimum bytes of a chunk, which ends at the next safe position.
pub(crate) const CHUNK_BYTES: usize = 64 << 10;

/// Cuts `text` into chunks of at least `chunk_bytes`, except for the last one.
pub(crate) fn cut_at_spaces(text: &str, chunk_bytes: usize) -> Vec<&str> {
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

/// Cuts `text` so that no run of spaces or of non-spaces is longer than about `limit` bytes. Only
/// used to train a tokenizer, because the tokens of the chunks may differ from the tokens of the
/// whole text.
pub(crate) fn cut_long_runs(text: &str, limit: usize) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let (chunk, after) = rest.split_at(end_of_run(rest, limit).unwrap_or(rest.len()));
        rest = after;
        Some(chunk)
    })
}

/// Returns the position at which the first run of more than `limit` bytes must be cut.
fn end_of_run(text: &str, limit: usize) -> Option<usize> {
    let (mut start, mut of_spaces) = (0, false);
    text.char_indices().find_map(|(at, char)| {
        if char.is_whitespace() != of_spaces {
            (start, of_spaces) = (at, char.is_whitespace());
        }
        (at > start && at - start >= limit).then_some(at)
    })
}

/// Returns the first space at or after byte `from` that follows a non-space.
pub(crate) fn safe_cut(text: &str, from: usize) -> Option<usize> {
    // `from` may be within a character.
    let from = (from..=text.len()).find(|&at| text.is_char_boundary(at))?;
    // The start of the text counts as a space: a cut there would give an empty chunk.
    let mut follows_space = text[..from].chars().next_back().is_none_or(char::is_whitespace);
    text[from..].char_indices().find_map(|(offset, char)| {
        let is_cut = char.is_whitespace() && !follows_space;
        follows_space = char.is_whitespace();
        is_cut.then_some(from + offset)
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn cuts_where_a_space_follows_a_word() {
        let text = "one\ntwo\n\nthree \nfour\n five";
        let chunks = cut_at_spaces(text, 1);
        assert_eq!(chunks, ["one", "\ntwo", "\n\nthree", " \nfour", "\n five"]);
        assert_eq!(cut_at_spaces("\u{e9}t\u{e9} \u{e9}", 3), ["\u{e9}t\u{e9}", " \u{e9}"]);
    }

    #[test]
    fn chunks_are_as_large_as_asked() {
        let text = "word\n".repeat(1000) + "end";
        let chunks = cut_at_spaces(&text, 100);
        assert!(chunks.iter().rev().skip(1).all(|chunk| (100..=105).contains(&chunk.len())));
        assert_eq!(chunks.concat(), text);
    }

    #[test]
    fn text_without_a_safe_place_stays_whole() {
        assert_eq!(cut_at_spaces("", 4), [""]);
        assert_eq!(cut_at_spaces("a-long-line-without-any-end", 4).len(), 1);
        assert_eq!(cut_at_spaces("\n\n\n\n\n\n", 1).len(), 1);
    }

    #[test]
    fn long_runs_alone_are_cut() {
        let cut = |text| cut_long_runs(text, 4).collect::<Vec<_>>();
        assert_eq!(cut("one two\nfour end"), ["one two\nfour end"]);
        assert_eq!(cut("a 123456789 b"), ["a 1234", "5678", "9 b"]);
        assert_eq!(cut("x      y"), ["x    ", "  y"]);
        assert_eq!(cut("\u{1f600}\u{1f600}"), ["\u{1f600}", "\u{1f600}"]);
        assert_eq!(cut(""), [""; 0]);
        assert_eq!(cut_long_runs("abc", 0).collect::<String>(), "abc");
    }

    proptest! {
        #[test]
        fn nothing_is_lost(text in "([a-z \u{e9}\u{4e2d}\u{a0}]{0,6}\n?){0,30}", size in 0usize..20) {
            prop_assert_eq!(cut_at_spaces(&text, size).concat(), text.as_str());
            prop_assert_eq!(cut_long_runs(&text, size).collect::<String>(), text);
        }
    }
}
