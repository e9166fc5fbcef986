//! Packs a stream of tokens into training sequences of one length.
//!
//! [`Sequences`] is a view of a shared [`TokenStream`]: sequence `i` is tokens
//! `i * sequence_length ..`, without gap or overlap, so several documents may share a sequence (an
//! end-of-text token separates them). Labels are the inputs; the model shifts them by one within
//! the sequence, so the first token of a sequence is never predicted. Cloning and splitting share
//! the tokens. Sequences of fewer than two tokens are an error, and so are streams that are shorter
//! than one sequence.

use std::ops::Range;
use std::sync::Arc;

use crate::hash::{Fingerprint, evenly_spaced};
use crate::splits::{Fractions, try_map};
use crate::{DataError, Result, TokenFile};

/// Maximum number of tokens for which a fingerprint covers all tokens. Hashing them takes about a
/// tenth of a second.
const FINGERPRINT_TOKENS: usize = 1 << 24;

/// Number of evenly spaced sequences in the fingerprint of a larger corpus.
const FINGERPRINT_SEQUENCES: usize = 4096;

/// A stream of tokens.
#[derive(Debug)]
pub enum TokenStream {
    /// A file that is read as needed.
    File(TokenFile),
    /// Tokens in memory. Ids must be below 2^31.
    Owned(Vec<u32>),
}

impl TokenStream {
    /// Returns the number of tokens.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        match self {
            Self::File(file) => file.len(),
            Self::Owned(tokens) => tokens.len(),
        }
    }

    /// Returns the tokens at `range`.
    ///
    /// # Errors
    /// Returns the errors of [`TokenFile::tokens`].
    ///
    /// # Panics
    /// Panics if `range` ends beyond [`TokenStream::len`], like a slice.
    pub fn tokens(&self, range: Range<usize>) -> Result<Vec<u32>> {
        match self {
            Self::File(file) => file.tokens(range),
            Self::Owned(tokens) => Ok(tokens[range].to_vec()),
        }
    }
}

/// Checks a sequence length, before any data is read.
///
/// # Errors
/// Returns [`DataError::Setting`] if the length is below 2.
pub(crate) fn check_sequence_length(length: usize) -> Result<()> {
    let rule = "a language model predicts each token from those before it; set it to 2 or more";
    match length {
        0..2 => Err(DataError::setting("data.sequence_length", length, rule)),
        _ => Ok(()),
    }
}

/// The samples of a causal language model: consecutive parts of a token stream.
///
/// Nothing is padded. Tokens after the last complete sequence are left out:
///
/// ```
/// use deepburn_datasets::{Sequences, TokenStream};
///
/// let stream = TokenStream::Owned((0..10).collect());
/// let sequences = Sequences::pack(stream, 4, "the example")?;
/// assert_eq!(sequences.len(), 2);
/// assert_eq!(sequences.get(1)?, [4, 5, 6, 7]);
/// # Ok::<(), deepburn_datasets::DataError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Sequences {
    /// The tokens, shared by all views.
    stream: Arc<TokenStream>,
    /// The part of the stream that this view covers.
    tokens: Range<usize>,
    /// Tokens per sequence, at least 2.
    sequence_length: usize,
}

impl Sequences {
    /// Cuts `stream`. `what` names it in errors ("train split", a file).
    ///
    /// # Errors
    /// Returns [`DataError::Empty`] if the stream is empty, and [`DataError::Setting`] if the
    /// sequence length is below 2 or above the length of the stream.
    pub fn pack(stream: TokenStream, sequence_length: usize, what: &str) -> Result<Self> {
        check_sequence_length(sequence_length)?;
        let tokens = 0..stream.len();
        Self { stream: Arc::new(stream), tokens, sequence_length }.checked(what)
    }

    /// Returns this view if it has at least one sequence.
    fn checked(self, what: &str) -> Result<Self> {
        let (tokens, length) = (self.tokens.len(), self.sequence_length);
        if tokens == 0 {
            return Err(DataError::Empty { what: what.to_owned() });
        }
        if tokens < length {
            let rule = format!(
                "{what} is shorter than one sequence: it has {tokens} of {length} tokens; give it more data, or lower data.sequence_length"
            );
            return Err(DataError::setting("data.sequence_length", length, rule));
        }
        Ok(self)
    }

    /// Returns the number of sequences, at least 1.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.tokens.len() / self.sequence_length
    }

    /// Returns the tokens per sequence.
    pub fn sequence_length(&self) -> usize {
        self.sequence_length
    }

    /// Returns sequence `index`.
    ///
    /// # Errors
    /// Returns the errors of [`TokenFile::tokens`].
    ///
    /// # Panics
    /// Panics if `index` is not below [`Sequences::len`], like a slice.
    pub fn get(&self, index: usize) -> Result<Vec<i32>> {
        assert!(index < self.len(), "sequence {index} of {}", self.len());
        let start = self.tokens.start + index * self.sequence_length;
        let tokens = self.stream.tokens(start..start + self.sequence_length)?;
        // Ids are below 2^31, so the cast keeps them.
        Ok(tokens.into_iter().map(|id| id as i32).collect())
    }

    /// Returns parts of this view by fraction, cut between sequences: train, eval, test. A fraction
    /// of zero gives `None`.
    ///
    /// # Errors
    /// Returns [`DataError::Setting`] for invalid fractions, and [`DataError::Empty`] for an empty
    /// part, which is named after `what`.
    pub(crate) fn split(&self, fractions: Fractions, what: &str) -> Result<[Option<Self>; 3]> {
        try_map(fractions.cut(self.len())?, |(name, sequences)| {
            let at = |index: usize| self.tokens.start + index * self.sequence_length;
            let part = Self { tokens: at(sequences.start)..at(sequences.end), ..self.clone() };
            part.checked(&format!("the {name} split of {what}"))
        })
    }

    /// Returns a hash of the tokens. For more than 16 million tokens, only evenly spaced sequences
    /// are hashed.
    ///
    /// # Errors
    /// Returns the errors of [`TokenFile::tokens`].
    pub fn fingerprint(&self) -> Result<String> {
        let count = self.len();
        let is_small = count.saturating_mul(self.sequence_length) <= FINGERPRINT_TOKENS;
        let chosen = if is_small { count } else { count.min(FINGERPRINT_SEQUENCES) };
        let mut fingerprint = Fingerprint::new(count);
        for index in evenly_spaced(count, chosen) {
            self.get(index)?.iter().for_each(|token| fingerprint.add(*token as u32));
        }
        Ok(fingerprint.digits())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pack(len: u32, sequence_length: usize) -> Sequences {
        let stream = TokenStream::Owned((0..len).collect());
        Sequences::pack(stream, sequence_length, "stream").unwrap()
    }

    #[test]
    fn the_rest_is_dropped() {
        let dropped = pack(11, 4);
        assert_eq!(dropped.len(), 2);
        assert_eq!(dropped.get(1).unwrap(), [4, 5, 6, 7]);
    }

    #[test]
    fn splits_share_the_stream_and_cut_between_sequences() {
        let all = pack(43, 4);
        let fractions = Fractions { train: 0.8, eval: 0.1, test: 0.1 };
        let [train, eval, test] = all.split(fractions, "stream").unwrap();
        let (train, eval, test) = (train.unwrap(), eval.unwrap(), test.unwrap());
        assert_eq!((train.len(), eval.len(), test.len()), (8, 1, 1));
        assert_eq!(eval.get(0).unwrap(), all.get(8).unwrap());
        assert_eq!(test.get(0).unwrap(), all.get(9).unwrap());
        assert!(Arc::ptr_eq(&train.stream, &test.stream));
    }

    #[test]
    fn a_share_too_small_for_one_sequence_is_named() {
        let fractions = Fractions { train: 0.5, eval: 0.1, test: 0.0 };
        let error = pack(16, 4).split(fractions, "`x.bin`").unwrap_err();
        assert!(error.to_string().contains("the eval split of `x.bin`"), "{error}");
    }

    #[test]
    #[should_panic(expected = "sequence 2 of 2")]
    fn an_index_outside_is_the_programmers_mistake() {
        pack(8, 4).get(2).unwrap();
    }

    fn fingerprint(tokens: Vec<u32>) -> String {
        Sequences::pack(TokenStream::Owned(tokens), 4, "test").unwrap().fingerprint().unwrap()
    }

    #[test]
    fn one_token_makes_a_difference_and_what_is_dropped_does_not() {
        let tokens: Vec<u32> = (0..40).collect();
        let first = fingerprint(tokens.clone());
        assert_eq!(first, fingerprint(tokens.clone()));
        for changed in [0, 17, 39] {
            let mut other = tokens.clone();
            other[changed] += 1;
            assert_ne!(first, fingerprint(other));
        }
        assert_eq!(first, fingerprint((0..42).collect()));
    }

    proptest! {
        #[test]
        fn sequences_are_the_stream_in_order(len in 2u32..300, length in 2usize..40) {
            let stream = TokenStream::Owned((0..len).collect());
            let Ok(sequences) = Sequences::pack(stream, length, "stream") else {
                prop_assert!((len as usize) < length);
                return Ok(());
            };
            let joined: Vec<i32> = (0..sequences.len()).flat_map(|i| sequences.get(i).unwrap()).collect();
            prop_assert!(joined.iter().copied().eq(0..joined.len() as i32));
            let lost = len as usize - joined.len();
            prop_assert!(lost < length);
        }
    }
}
