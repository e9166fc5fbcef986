//! The characters that a model sees instead of the characters of a text.

use std::array;

/// The characters of a model's words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Alphabet {
    /// A printable character for each byte, as in GPT-2.
    Bytes(Box<[char; 256]>),
    /// The characters of the text, with this character for spaces.
    Replaced(char),
}

/// A word as the model sees it.
#[derive(Debug, Default)]
pub(crate) struct ModelWord {
    /// Its characters.
    pub(crate) text: String,
    /// For each byte of `text`, the bytes of the character of the word that it is part of.
    origins: Vec<(usize, usize)>,
}

impl Alphabet {
    /// Returns the characters of bytes. Printable characters of Latin-1 stand for themselves, and
    /// the others are numbered from U+0100.
    pub(crate) fn bytes() -> Self {
        let mut others = 0x100..;
        Self::Bytes(Box::new(array::from_fn(|byte| {
            let code = match byte as u32 {
                code @ (0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF) => Some(code),
                _ => others.next(),
            };
            code.and_then(char::from_u32).unwrap_or_default()
        })))
    }

    /// Returns the character that stands for a space, if the others stand for themselves.
    pub(crate) fn replacement(&self) -> Option<char> {
        match self {
            Self::Bytes(_) => None,
            Self::Replaced(space) => Some(*space),
        }
    }

    /// Sets `mapped` to the characters of `word`.
    pub(crate) fn map(&self, word: &str, mapped: &mut ModelWord) {
        mapped.text.clear();
        mapped.origins.clear();
        for (start, char) in word.char_indices() {
            let end = start + char.len_utf8();
            match self {
                Self::Bytes(chars) => {
                    let bytes = word.as_bytes()[start..end].iter();
                    mapped.text.extend(bytes.map(|byte| chars[usize::from(*byte)]));
                }
                Self::Replaced(space) => mapped.text.push(if char == ' ' { *space } else { char }),
            }
            // One entry for each byte that this character has added.
            mapped.origins.resize(mapped.text.len(), (start, end));
        }
    }
}

impl ModelWord {
    /// Returns the bytes of the word for bytes of `text`, extended to whole characters.
    pub(crate) fn range(&self, (start, end): (usize, usize)) -> (usize, usize) {
        match self.origins.get(start..end) {
            Some([first, .., last]) => (first.0, last.1),
            Some([only]) => *only,
            Some([]) | None => (start, end),
        }
    }
}

#[cfg(test)]
mod tests {
    use tokenizers::pre_tokenizers::byte_level::ByteLevel;
    use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};

    use super::*;

    #[test]
    fn bytes_have_the_characters_of_the_library() {
        let mut mapped = ModelWord::default();
        for code in (0..0x800).chain((0x800..0x11_0000).step_by(0x3D)) {
            let Some(char) = char::from_u32(code) else { continue };
            let word = format!("a{char}");
            let mut expected = PreTokenizedString::from(word.as_str());
            ByteLevel::new(false, true, false).pre_tokenize(&mut expected).unwrap();
            let expected = expected.get_splits(OffsetReferential::Original, OffsetType::Byte);
            Alphabet::bytes().map(&word, &mut mapped);
            assert_eq!(mapped.text, expected[0].0);
            assert_eq!(mapped.range((1, 2)), (1, word.len()));
        }
    }

    #[test]
    fn ranges_are_whole_characters() {
        let mut mapped = ModelWord::default();
        Alphabet::Replaced('\u{2581}').map(" \u{e9}a", &mut mapped);
        assert_eq!(mapped.text, "\u{2581}\u{e9}a");
        let ranges = [(0, 1), (0, 4), (4, 5), (5, 6), (6, 7), (2, 2)].map(|it| mapped.range(it));
        assert_eq!(ranges, [(0, 1), (0, 3), (1, 3), (3, 4), (6, 7), (2, 2)]);
    }
}
