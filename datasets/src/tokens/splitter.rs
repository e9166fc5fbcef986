//! Splits text into words exactly as pre-tokenizers of the library do.
//!
//! The library runs patterns with a look-ahead in a backtracking engine, which takes most of the
//! time of its splitting. The only look-ahead of common patterns is in their end, `|\s+(?!\S)|\s+`:
//! white space before a word is split so that its last character belongs to the word. Without this
//! alternative, a pattern is an automaton. White space that only its last alternative `\s+` matches
//! is then one character too long, unless it ends the text or is a single character.

use std::collections::HashSet;
use std::ops::Range;

use regex_automata::meta::{Cache, Regex};
use regex_automata::{Anchored, Input};

/// The pattern of GPT-2, of the library's pre-tokenizer `ByteLevel`.
pub(crate) const GPT2_PATTERN: &str =
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// The end of a pattern with a look-ahead.
const LOOK_AHEAD: &str = r"|\s+(?!\S)|\s+";

/// The number of the pattern `\s+` of a pattern with a look-ahead.
const SPACES: usize = 1;

/// Maximum bytes of white space that a look-ahead follows. The library's engine stops after a
/// million steps, and the rest of the text is then a single word.
const MAX_SPACES: usize = 1 << 16;

/// Maximum bytes that a pattern with a look-ahead does not match. The engine takes a step for each
/// byte and alternative.
const MAX_GAP: usize = 1 << 10;

/// Why a text is not encoded word by word.
#[derive(Debug)]
pub(crate) enum Stop {
    /// The library has to encode this text.
    Unsupported,
    /// The library's error.
    Failed(tokenizers::Error),
}

/// Receives the bytes of each word.
pub(crate) type WordSink<'a> = &'a mut dyn FnMut(Range<usize>) -> Result<(), Stop>;

/// A rule by which text is split into words.
#[derive(Debug)]
pub(crate) enum Splitter {
    /// Matches of a pattern, and the text between them.
    Pattern {
        /// The pattern, or its alternatives before and after the look-ahead.
        regex: Box<Regex>,
        /// Whether it has a look-ahead.
        has_look_ahead: bool,
    },
    /// Numeric characters.
    Digits {
        /// Whether each of them is a word.
        individual: bool,
    },
    /// Spaces, each of which starts a word.
    EachSpace,
    /// Runs of spaces, each of which starts a word, unless it follows one of these characters.
    SpacesExcept(HashSet<char>),
}

impl Splitter {
    /// Returns a splitter by a pattern. `None` if an automaton cannot replace it.
    pub(crate) fn pattern(pattern: &str) -> Option<Self> {
        let start = pattern.strip_suffix(LOOK_AHEAD);
        let words = start.unwrap_or(pattern);
        if !is_regular(words) {
            return None;
        }
        let patterns = [words, r"\s+"];
        let regex = match start {
            Some(_) => Regex::new_many(&patterns),
            None => Regex::new(words),
        };
        let (regex, has_look_ahead) = (Box::new(regex.ok()?), start.is_some());
        Some(Self::Pattern { regex, has_look_ahead })
    }

    /// Returns the memory that searches with this splitter need.
    pub(crate) fn cache(&self) -> Option<Cache> {
        match self {
            Self::Pattern { regex, .. } => Some(regex.create_cache()),
            Self::Digits { .. } | Self::EachSpace | Self::SpacesExcept(_) => None,
        }
    }

    /// Calls `sink` with each word of `text` in order. `cache` is the result of
    /// [`Splitter::cache`].
    ///
    /// # Errors
    /// Returns [`Stop::Unsupported`] if the library may split this text in another way, and the
    /// errors of `sink`.
    pub(crate) fn split(
        &self,
        text: &str,
        cache: &mut Option<Cache>,
        sink: WordSink<'_>,
    ) -> Result<(), Stop> {
        let starts_word = |char: char, previous: char| match self {
            Self::Pattern { .. } => false,
            Self::Digits { individual } => {
                let (is_digit, was_digit) = (char.is_numeric(), previous.is_numeric());
                is_digit != was_digit || (is_digit && *individual)
            }
            Self::EachSpace => char == ' ',
            Self::SpacesExcept(joined) => {
                char == ' ' && previous != ' ' && !joined.contains(&previous)
            }
        };
        if let (Self::Pattern { regex, has_look_ahead }, Some(cache)) = (self, cache) {
            return split_by_pattern(text, regex, *has_look_ahead, cache, sink);
        }
        let (mut start, mut previous) = (0, None);
        for (at, char) in text.char_indices() {
            if previous.replace(char).is_some_and(|previous| starts_word(char, previous)) {
                sink(start..at)?;
                start = at;
            }
        }
        if start < text.len() { sink(start..text.len()) } else { Ok(()) }
    }
}

/// Calls `sink` with the matches of a pattern and the text between them.
fn split_by_pattern(
    text: &str,
    regex: &Regex,
    has_look_ahead: bool,
    cache: &mut Cache,
    sink: WordSink<'_>,
) -> Result<(), Stop> {
    let mut at = 0;
    while at < text.len() {
        let rest = Input::new(text).range(at..);
        // Nearly always the next word starts here, and an anchored search need not look for its
        // start.
        let anchored = rest.clone().anchored(Anchored::Yes);
        let found = regex.search_with(cache, &anchored).or_else(|| regex.search_with(cache, &rest));
        let (gap, mut word) = match &found {
            Some(found) => (at..found.start(), found.range()),
            None => (at..text.len(), text.len()..text.len()),
        };
        let is_spaces = found.is_some_and(|it| has_look_ahead && it.pattern().as_usize() == SPACES);
        let is_long = has_look_ahead && gap.len() > MAX_GAP || is_spaces && word.len() > MAX_SPACES;
        // The search would not move on after an empty match.
        if is_long || (word.is_empty() && word.start < text.len()) {
            return Err(Stop::Unsupported);
        }
        if is_spaces && word.end < text.len() {
            // The last character belongs to the next word, unless it is the only one.
            let last = text[word.clone()].chars().next_back().map_or(0, char::len_utf8);
            word.end = if last < word.len() { word.end - last } else { word.end };
        }
        at = word.end;
        for part in [gap, word] {
            if !part.is_empty() {
                sink(part)?;
            }
        }
    }
    Ok(())
}

/// Returns whether a pattern means the same to the backtracking engine and to an automaton: it has
/// no assertions, flags except `i`, possessive quantifiers or nested classes, and only common
/// escapes.
fn is_regular(pattern: &str) -> bool {
    let mut is_class = false;
    let mut rest = pattern;
    while let Some(char) = rest.chars().next() {
        rest = &rest[char.len_utf8()..];
        let next = rest.chars().next();
        let is_same = match char {
            '\\' => {
                rest = &rest[next.map_or(0, char::len_utf8)..];
                // The braces of a class are not a quantifier.
                let name = rest.strip_prefix('{').filter(|_| matches!(next, Some('p' | 'P')));
                rest = name.and_then(|it| it.split_once('}')).map_or(rest, |(_, after)| after);
                next.is_some_and(|it| {
                    "dDnpPrsStwW".contains(it) || (it.is_ascii_punctuation() && !"<>".contains(it))
                })
            }
            ']' if is_class => {
                is_class = false;
                true
            }
            '[' if !is_class => {
                is_class = true;
                rest = rest.strip_prefix('^').unwrap_or(rest);
                !rest.starts_with(['[', ']'])
            }
            '[' => false,
            '&' | '-' | '~' if is_class => next != Some(char),
            _ if is_class => true,
            '(' => next != Some('?') || rest.starts_with("?:") || rest.starts_with("?i:"),
            '*' | '+' | '?' | '}' => next != Some('+'),
            '^' | '$' => false,
            _ => true,
        };
        if !is_same {
            return false;
        }
    }
    true
}
