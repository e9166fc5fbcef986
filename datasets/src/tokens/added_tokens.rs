//! Finds the added tokens that a text spells out, as the library does.
//!
//! The library searches a text twice: for the tokens that are matched before normalization, and in
//! what is left for the others. This search has the same automaton, and is only for tokenizers that
//! do not change the text in between.

use std::collections::HashSet;
use std::ops::Range;

use aho_corasick::{AhoCorasick, MatchKind};
use tokenizers::AddedToken;

/// A part of a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TextSection {
    /// Its bytes.
    pub(crate) range: Range<usize>,
    /// The added token that it is, if it is one.
    pub(crate) token: Option<u32>,
}

/// The added tokens of a tokenizer.
pub(crate) struct AddedTokens {
    /// The tokens that are matched before normalization, and the others.
    passes: [TokenSearch; 2],
}

/// The tokens of a search.
struct TokenSearch {
    /// The automaton of their texts.
    search: AhoCorasick,
    /// The tokens by the number of their pattern.
    tokens: Vec<(u32, AddedToken)>,
}

impl AddedTokens {
    /// Returns the added tokens of `library`. `None` if they are not exactly the tokens that were
    /// `declared`, or if a text cannot be searched for them here.
    pub(crate) fn new(library: &tokenizers::Tokenizer, declared: Option<usize>) -> Option<Self> {
        let vocabulary = library.get_added_vocabulary();
        let tokens = vocabulary.get_added_tokens_decoder();
        let texts: HashSet<&str> = tokens.values().map(|it| it.content.as_str()).collect();
        // The library also searches for a token that another one with its text or id replaced,
        // which it does not list any more. A single text is the same token in any case.
        let is_listed = tokens.len() <= 1 || declared == Some(tokens.len());
        let is_unique = texts.len() == tokens.len() && vocabulary.get_vocab().len() == tokens.len();
        // Otherwise, a token could start in white space that belongs to the token before it.
        let strips = tokens.values().any(|it| it.lstrip || it.rstrip);
        let is_plain = tokens.values().all(|it| {
            let is_stripped = strips && it.content.contains(char::is_whitespace);
            !it.single_word && !it.content.is_empty() && !is_stripped
        });
        if !is_listed || !is_unique || !is_plain || vocabulary.get_encode_special_tokens() {
            return None;
        }
        let pass = |is_normalized| {
            let tokens = tokens.iter().filter(|(_, it)| it.normalized == is_normalized);
            TokenSearch::new(tokens.map(|(id, it)| (*id, it.clone())).collect())
        };
        Some(Self { passes: [pass(false)?, pass(true)?] })
    }

    /// Returns the texts of the tokens that are matched after normalization.
    pub(crate) fn normalized(&self) -> impl Iterator<Item = &str> {
        self.passes[1].tokens.iter().map(|(_, it)| it.content.as_str())
    }

    /// Returns the sections of a text. None is empty.
    pub(crate) fn sections(&self, text: &str) -> Vec<TextSection> {
        let mut sections = Vec::new();
        // The tokens of the first pass end the sections in which the second pass searches.
        for section in self.passes[0].sections(text, 0) {
            match section.token {
                Some(_) => sections.push(section),
                None => {
                    let range = section.range;
                    sections.extend(self.passes[1].sections(&text[range.clone()], range.start));
                }
            }
        }
        sections
    }
}

impl TokenSearch {
    /// Creates a search. `None` if the automaton is too large.
    fn new(tokens: Vec<(u32, AddedToken)>) -> Option<Self> {
        let search = AhoCorasick::builder()
            // As in the library: of tokens that begin at the same place, the longest one is found.
            .match_kind(MatchKind::LeftmostLongest)
            .build(tokens.iter().map(|(_, it)| &it.content));
        Some(Self { search: search.ok()?, tokens })
    }

    /// Returns the sections of a text that starts at byte `offset` of another one.
    fn sections(&self, text: &str, offset: usize) -> Vec<TextSection> {
        let mut sections = Vec::new();
        let mut push = |range: Range<usize>, token| {
            if !range.is_empty() {
                let range = offset + range.start..offset + range.end;
                sections.push(TextSection { range, token });
            }
        };
        let mut at = 0;
        for found in self.search.find_iter(text) {
            let (id, token) = &self.tokens[found.pattern().as_usize()];
            let (mut start, mut end) = (found.start(), found.end());
            if token.lstrip {
                // The token before it may have taken the white space.
                start = text[..start].trim_end().len().max(at);
            }
            if token.rstrip {
                end = text.len() - text[end..].trim_start().len();
            }
            push(at..start, None);
            push(start..end, Some(*id));
            at = end;
        }
        push(at..text.len(), None);
        sections
    }
}
