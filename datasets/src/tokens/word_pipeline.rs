//! Tokenizers whose text can be encoded word by word, recognized by their definition.
//!
//! | Definition | Words |
//! |---|---|
//! | No normalizer or NFC; `ByteLevel`, alone or after `Split` and `Digits` | as split |
//! | `Metaspace`, or a normalizer that replaces spaces, as in SentencePiece | cut before spaces |
//!
//! The second kind encodes a whole text as one word. A cut before a space does not change its
//! tokens if no token of the vocabulary contains a space after the character before the cut,
//! because then no merge crosses it.

use std::collections::HashSet;

use serde_json::{Value, json};
use tokenizers::models::bpe::BPE;
use tokenizers::pre_tokenizers::metaspace::{Metaspace, PrependScheme};
use tokenizers::{Model, ModelWrapper, PreTokenizerWrapper};

use crate::tokens::alphabet::Alphabet;
use crate::tokens::splitter::{GPT2_PATTERN, Splitter};

/// Where a space is put before a section of the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Prefix {
    /// Nowhere.
    Never,
    /// Before each section.
    Always,
    /// Before each section that does not start with one.
    UnlessSpace,
    /// The same, but only before the first section.
    First,
}

impl Prefix {
    /// Returns whether a space is put before the section that starts at byte `start`.
    pub(crate) fn applies(self, section: &str, start: usize) -> bool {
        match self {
            Self::Never => false,
            Self::Always => true,
            Self::UnlessSpace => !section.starts_with(' '),
            Self::First => start == 0 && !section.starts_with(' '),
        }
    }
}

/// The steps from a section of the text to its tokens.
pub(crate) struct WordPipeline {
    /// Whether the text is normalized to NFC.
    pub(crate) is_nfc: bool,
    /// Where a space is put before the text.
    pub(crate) prefix: Prefix,
    /// What splits the text into words, one after another.
    pub(crate) splitters: Vec<Splitter>,
    /// The characters of a word that the model sees.
    pub(crate) alphabet: Alphabet,
}

impl WordPipeline {
    /// Returns the pipeline of a tokenizer. `None` if its text cannot be encoded word by word.
    pub(crate) fn new(library: &tokenizers::Tokenizer) -> Option<Self> {
        let ModelWrapper::BPE(bpe) = library.get_model() else { return None };
        // With dropout, merges are left out at random, and a cache would repeat the first choice.
        if bpe.dropout.is_some_and(|it| it != 0.0) {
            return None;
        }
        let normalizer = serde_json::to_value(library.get_normalizer()).ok()?;
        let is_nfc = normalizer == json!({ "type": "NFC" });
        match library.get_pre_tokenizer() {
            Some(PreTokenizerWrapper::Metaspace(space)) if normalizer.is_null() => {
                Self::metaspace(bpe, space)
            }
            Some(split) if is_nfc || normalizer.is_null() => Self::byte_level(split, is_nfc),
            split => Self::replaced(bpe, &normalizer, split),
        }
    }

    /// Returns the pipeline of a byte-level tokenizer.
    fn byte_level(pre_tokenizer: &PreTokenizerWrapper, is_nfc: bool) -> Option<Self> {
        let steps = match pre_tokenizer {
            PreTokenizerWrapper::Sequence(steps) => steps.as_ref(),
            step => std::slice::from_ref(step),
        };
        let (PreTokenizerWrapper::ByteLevel(last), steps) = steps.split_last()? else {
            return None;
        };
        let splitter = |step: &PreTokenizerWrapper| match step {
            PreTokenizerWrapper::Digits(it) => {
                Some(Splitter::Digits { individual: it.individual_digits })
            }
            PreTokenizerWrapper::Split(split) => {
                let split = serde_json::to_value(split).ok()?;
                let pattern = split["pattern"]["Regex"].as_str()?;
                Splitter::pattern(pattern).filter(|_| split["behavior"] == "Isolated")
            }
            _ => None,
        };
        let mut splitters = steps.iter().map(splitter).collect::<Option<Vec<_>>>()?;
        let prefix = match last.add_prefix_space {
            // The space would be put before each word.
            true if !splitters.is_empty() => return None,
            true => Prefix::UnlessSpace,
            false => Prefix::Never,
        };
        if last.use_regex {
            splitters.push(Splitter::pattern(GPT2_PATTERN)?);
        }
        Some(Self { is_nfc, prefix, splitters, alphabet: Alphabet::bytes() })
    }

    /// Returns the pipeline of a tokenizer with [`Metaspace`].
    fn metaspace(bpe: &BPE, space: &Metaspace) -> Option<Self> {
        let replacement = space.get_replacement();
        let splitter = match space.split {
            true => Splitter::EachSpace,
            false => cut_before_spaces(bpe, replacement)?,
        };
        let prefix = match space.prepend_scheme {
            PrependScheme::Never => Prefix::Never,
            PrependScheme::Always => Prefix::UnlessSpace,
            PrependScheme::First => Prefix::First,
        };
        let alphabet = Alphabet::Replaced(replacement);
        Some(Self { is_nfc: false, prefix, splitters: vec![splitter], alphabet })
    }

    /// Returns the pipeline of a tokenizer whose normalizer replaces spaces.
    fn replaced(
        bpe: &BPE,
        normalizer: &Value,
        pre_tokenizer: Option<&PreTokenizerWrapper>,
    ) -> Option<Self> {
        // No space is left that this pre-tokenizer of Gemma could split at.
        let without_effect = json!({
            "type": "Split", "pattern": { "String": " " }, "behavior": "MergedWithPrevious", "invert": false,
        });
        let split = serde_json::to_value(pre_tokenizer).ok()?;
        if !split.is_null() && split != without_effect {
            return None;
        }
        let steps = match &normalizer["normalizers"] {
            Value::Array(steps) => steps.as_slice(),
            _ => std::slice::from_ref(normalizer),
        };
        let (replace, before) = steps.split_last()?;
        let content = replace["content"].as_str()?;
        let mut chars = content.chars();
        let (replacement, None) = (chars.next()?, chars.next()) else { return None };
        let pattern = json!({ "String": " " });
        if *replace != json!({ "type": "Replace", "pattern": pattern, "content": content }) {
            return None;
        }
        let prefix = match before {
            [] => Prefix::Never,
            [it] if *it == json!({ "type": "Prepend", "prepend": content }) => Prefix::Always,
            _ => return None,
        };
        let splitters = vec![cut_before_spaces(bpe, replacement)?];
        Some(Self { is_nfc: false, prefix, splitters, alphabet: Alphabet::Replaced(replacement) })
    }
}

/// Returns the positions at which a text may be cut that is encoded as one word, and in which
/// `replacement` stands for a space.
///
/// `None` if a cut could change unknown characters: the space itself must be a token, because it
/// ends a run of them, and no character may be left out, because all ranges after it are shifted.
fn cut_before_spaces(bpe: &BPE, replacement: char) -> Option<Splitter> {
    let vocabulary = Model::get_vocab(bpe);
    let is_set = |it: &Option<String>| it.as_ref().is_some_and(|it| !it.is_empty());
    // A vocabulary token that a text equals would be its only token.
    let merges_only = !bpe.ignore_merges
        && !is_set(&bpe.continuing_subword_prefix)
        && !is_set(&bpe.end_of_word_suffix);
    let has = |token: &str| vocabulary.contains_key(token);
    let has_bytes = || (0..=255).all(|byte| has(&format!("<0x{byte:02X}>")));
    let has_all = bpe.unk_token.as_deref().is_some_and(has) || (bpe.byte_fallback && has_bytes());
    if !merges_only || !has_all || !has(&replacement.to_string()) {
        return None;
    }
    let mut joined = HashSet::new();
    for token in vocabulary.keys() {
        let pairs = token.chars().zip(token.chars().skip(1));
        let before = pairs.filter(|pair| pair.1 == replacement && pair.0 != replacement);
        joined.extend(before.map(|pair| pair.0));
    }
    // Unknown characters and bytes have tokens of other characters.
    let unknown = bpe.unk_token.as_ref().and_then(|it| it.chars().next_back());
    let is_other = |it: &char| *it == '>' || Some(*it) == unknown;
    if joined.iter().any(is_other) {
        return None;
    }
    Some(Splitter::SpacesExcept(joined))
}
