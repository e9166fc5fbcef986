//! Packing: a stream of tokens becomes training samples of one length.
//!
//! [`Sequences`] is a view of a shared [`TokenStream`]: sequence `i` is tokens
//! `i * sequence_length ..`, without gap or overlap, so documents run into each other (an
//! end-of-text token stands between them). Labels are the inputs; the model shifts them by one
//! inside the sequence, so the first token of a sequence is never predicted.
//! Cloning and splitting share the tokens. What it refuses: sequences of fewer than two tokens
//! and streams that do not fill one sequence.

use std::ops::Range;
use std::sync::Arc;

use crate::splits::Fractions;
use crate::{DataError, TokenFile};

/// Where tokens lie.
#[derive(Debug)]
pub enum TokenStream {
    /// In a file that is read as needed.
    File(TokenFile),
    /// In memory. Ids must be below 2^31.
    Owned(Vec<u32>),
}

impl TokenStream {
    /// Number of tokens.
    pub fn len(&self) -> usize {
        match self {
            Self::File(file) => file.len(),
            Self::Owned(tokens) => tokens.len(),
        }
    }

    /// Whether there is no token at all.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The tokens at `range`.
    ///
    /// # Errors
    /// Those of [`TokenFile::tokens`].
    ///
    /// # Panics
    /// If `range` ends beyond [`TokenStream::len`], as slices do.
    pub fn tokens(&self, range: Range<usize>) -> Result<Vec<u32>, DataError> {
        match self {
            Self::File(file) => file.tokens(range),
            Self::Owned(tokens) => Ok(tokens[range].to_vec()),
        }
    }

    /// Appends the tokens at `range` to `out`.
    fn extend_into(&self, range: Range<usize>, out: &mut Vec<i32>) -> Result<(), DataError> {
        // Both kinds hold ids below 2^31, so the cast keeps them.
        match self {
            Self::File(file) => out.extend(file.tokens(range)?.into_iter().map(|id| id as i32)),
            Self::Owned(tokens) => out.extend(tokens[range].iter().map(|&id| id as i32)),
        }
        Ok(())
    }
}

/// What becomes of the tokens after the last full sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Remainder {
    /// They are left out. All sequences have the same length.
    #[default]
    Drop,
    /// They form one shorter sequence, if they are at least two. Batches pad it on the right with
    /// id 0 and label [`crate::IGNORE_INDEX`].
    Keep,
}

/// How a stream is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packing {
    /// Tokens per sequence, at least 2.
    pub sequence_length: usize,
    /// What becomes of the rest.
    pub remainder: Remainder,
}

impl Packing {
    /// Sequences of `sequence_length` tokens, the rest left out.
    pub fn drop_rest(sequence_length: usize) -> Self {
        Self { sequence_length, remainder: Remainder::Drop }
    }

    /// Checks the length on its own, before any data is read.
    ///
    /// # Errors
    /// [`DataError::SequenceLength`] below 2.
    pub fn validate(self) -> Result<Self, DataError> {
        match self.sequence_length {
            value @ 0..2 => Err(DataError::SequenceLength { value }),
            _ => Ok(self),
        }
    }

    /// How many sequences `tokens` tokens make.
    fn count(self, tokens: usize) -> usize {
        let rest = tokens % self.sequence_length;
        let kept = self.remainder == Remainder::Keep && rest >= 2;
        tokens / self.sequence_length + usize::from(kept)
    }
}

/// Samples of a causal language model: consecutive pieces of a token stream.
#[derive(Debug, Clone)]
pub struct Sequences {
    stream: Arc<TokenStream>,
    /// The part of the stream this view covers.
    tokens: Range<usize>,
    packing: Packing,
}

impl Sequences {
    /// Cuts `stream`. `what` names it in errors ("train split", a file).
    ///
    /// # Errors
    /// [`DataError::SequenceLength`], [`DataError::Empty`], or [`DataError::TooShort`] where not
    /// a single sequence comes out.
    pub fn pack(stream: TokenStream, packing: Packing, what: &str) -> Result<Self, DataError> {
        let tokens = 0..stream.len();
        Self::view(Arc::new(stream), tokens, packing.validate()?, what)
    }

    fn view(
        stream: Arc<TokenStream>,
        tokens: Range<usize>,
        packing: Packing,
        what: &str,
    ) -> Result<Self, DataError> {
        let what = || what.to_owned();
        match packing.count(tokens.len()) {
            0 if tokens.is_empty() => Err(DataError::Empty { what: what() }),
            0 => Err(DataError::TooShort {
                what: what(),
                tokens: tokens.len(),
                sequence_length: packing.sequence_length,
            }),
            _ => Ok(Self { stream, tokens, packing }),
        }
    }

    /// Number of sequences, at least 1.
    pub fn len(&self) -> usize {
        self.packing.count(self.tokens.len())
    }

    /// Never true: no sequences do not pack.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Tokens per sequence. Only a kept remainder is shorter.
    pub fn sequence_length(&self) -> usize {
        self.packing.sequence_length
    }

    /// Number of tokens in all sequences together.
    pub fn num_tokens(&self) -> usize {
        self.range(self.len() - 1).end - self.tokens.start
    }

    /// Sequence `index`.
    ///
    /// # Errors
    /// Those of [`TokenFile::tokens`].
    ///
    /// # Panics
    /// If `index` is not below [`Sequences::len`], as slices do.
    pub fn get(&self, index: usize) -> Result<Vec<i32>, DataError> {
        let mut tokens = Vec::with_capacity(self.sequence_length());
        self.extend_into(index, &mut tokens)?;
        Ok(tokens)
    }

    /// Appends sequence `index` to `out`.
    pub(crate) fn extend_into(&self, index: usize, out: &mut Vec<i32>) -> Result<(), DataError> {
        assert!(index < self.len(), "sequence {index} of {}", self.len());
        self.stream.extend_into(self.range(index), out)
    }

    /// Parts of this view by share, cut between sequences: train first, then eval, then test.
    /// A share of zero gives `None`.
    ///
    /// # Errors
    /// [`DataError::Fraction`], or an empty or too short part, named `what`.
    pub(crate) fn split(
        &self,
        fractions: Fractions,
        what: &str,
    ) -> Result<[Option<Self>; 3], DataError> {
        let mut parts = [None, None, None];
        for (part, cut) in parts.iter_mut().zip(fractions.cut(self.len())?) {
            let Some((name, sequences)) = cut else { continue };
            let at = |index: usize| self.tokens.start + index * self.sequence_length();
            let tokens = at(sequences.start)..at(sequences.end).min(self.tokens.end);
            let what = format!("the {name} split of {what}");
            *part = Some(Self::view(self.stream.clone(), tokens, self.packing, &what)?);
        }
        Ok(parts)
    }

    fn range(&self, index: usize) -> Range<usize> {
        let start = self.tokens.start + index * self.sequence_length();
        start..(start + self.sequence_length()).min(self.tokens.end)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pack(len: u32, sequence_length: usize, remainder: Remainder) -> Sequences {
        let stream = TokenStream::Owned((0..len).collect());
        Sequences::pack(stream, Packing { sequence_length, remainder }, "stream").unwrap()
    }

    #[test]
    fn the_rest_is_dropped_or_kept() {
        let dropped = pack(11, 4, Remainder::Drop);
        assert_eq!((dropped.len(), dropped.num_tokens()), (2, 8));
        assert_eq!(dropped.get(1).unwrap(), [4, 5, 6, 7]);

        let kept = pack(11, 4, Remainder::Keep);
        assert_eq!((kept.len(), kept.num_tokens()), (3, 11));
        assert_eq!(kept.get(2).unwrap(), [8, 9, 10]);
    }

    #[test]
    fn a_rest_of_one_token_has_nothing_to_predict() {
        assert_eq!(pack(9, 4, Remainder::Keep).len(), 2);
        assert_eq!(pack(9, 4, Remainder::Keep).num_tokens(), 8);
    }

    #[test]
    fn a_short_stream_is_one_short_sequence_where_the_rest_is_kept() {
        assert_eq!(pack(3, 8, Remainder::Keep).get(0).unwrap(), [0, 1, 2]);
    }

    #[test]
    fn splits_share_the_stream_and_cut_between_sequences() {
        let all = pack(43, 4, Remainder::Drop);
        let fractions = Fractions { train: 0.8, eval: 0.1, test: 0.1 };
        let [train, eval, test] = all.split(fractions, "stream").unwrap();
        let (train, eval, test) = (train.unwrap(), eval.unwrap(), test.unwrap());
        assert_eq!((train.len(), eval.len(), test.len()), (8, 1, 1));
        assert_eq!(eval.get(0).unwrap(), all.get(8).unwrap());
        assert_eq!(test.get(0).unwrap(), all.get(9).unwrap());
        assert!(Arc::ptr_eq(&train.stream, &test.stream));
    }

    #[test]
    fn a_kept_rest_goes_to_the_last_part() {
        let all = pack(10, 4, Remainder::Keep);
        let fractions = Fractions { train: 0.5, eval: 0.5, test: 0.0 };
        let [train, eval, test] = all.split(fractions, "stream").unwrap();
        assert_eq!(train.unwrap().get(0).unwrap(), [0, 1, 2, 3]);
        assert_eq!(eval.unwrap().get(1).unwrap(), [8, 9]);
        assert!(test.is_none());
    }

    #[test]
    fn a_share_too_small_for_one_sequence_is_named() {
        let fractions = Fractions { train: 0.5, eval: 0.1, test: 0.0 };
        let error = pack(16, 4, Remainder::Drop).split(fractions, "`x.bin`").unwrap_err();
        assert!(error.to_string().contains("the eval split of `x.bin`"), "{error}");
    }

    #[test]
    #[should_panic(expected = "sequence 2 of 2")]
    fn an_index_outside_is_the_programmers_mistake() {
        pack(8, 4, Remainder::Drop).get(2).unwrap();
    }

    proptest! {
        #[test]
        fn sequences_are_the_stream_in_order(len in 2u32..300, length in 2usize..40, keep: bool) {
            let remainder = if keep { Remainder::Keep } else { Remainder::Drop };
            let packing = Packing { sequence_length: length, remainder };
            let stream = TokenStream::Owned((0..len).collect());
            let Ok(sequences) = Sequences::pack(stream, packing, "stream") else {
                prop_assert!(!keep && (len as usize) < length);
                return Ok(());
            };
            let joined: Vec<i32> = (0..sequences.len()).flat_map(|i| sequences.get(i).unwrap()).collect();
            prop_assert_eq!(joined.len(), sequences.num_tokens());
            prop_assert!(joined.iter().copied().eq(0..joined.len() as i32));
            let lost = len as usize - joined.len();
            let most = if keep { 1 } else { length - 1 };
            prop_assert!(lost <= most);
        }
    }
}
