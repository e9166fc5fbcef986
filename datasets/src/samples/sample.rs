//! A sample: the tokens of a conversation or text, and which of them are trained.

use std::ops::Range;

use crate::IGNORE_INDEX;

/// Tokens, and whether the loss includes each of them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Sample {
    /// Token ids, below the vocabulary size.
    pub ids: Vec<u32>,
    /// Whether each token is a label, as long as `ids`. A prompt is not trained, for example.
    pub trained: Vec<bool>,
}

impl Sample {
    /// Creates a sample in which all tokens are trained.
    pub fn all_trained(ids: Vec<u32>) -> Self {
        Self { trained: vec![true; ids.len()], ids }
    }

    /// Returns the labels: the ids, with [`IGNORE_INDEX`] for tokens that are not trained. The
    /// model shifts them by one.
    pub fn labels(&self) -> Vec<i32> {
        let label = |(id, trained): (&u32, &bool)| if *trained { *id as i32 } else { IGNORE_INDEX };
        self.ids.iter().zip(&self.trained).map(label).collect()
    }

    /// Checks the sample for a vocabulary of `vocab_size` entries, and returns the problem.
    pub(crate) fn check(&self, vocab_size: usize) -> Result<(), String> {
        let (ids, trained) = (self.ids.len(), self.trained.len());
        if ids != trained {
            return Err(format!("has {ids} tokens, but {trained} marks of trained tokens"));
        }
        if u32::try_from(ids).is_err() {
            return Err(format!("has {ids} tokens; a row must have less than 2^32"));
        }
        match self.ids.iter().position(|id| *id as usize >= vocab_size) {
            None => Ok(()),
            Some(at) => Err(format!(
                "has id {} at token {at}, but the vocabulary has {vocab_size} entries, from id 0; use the tokenizer with which the model was trained, or, if the token was added to it, resize the model first (transformers: resize_token_embeddings, save_pretrained)",
                self.ids[at]
            )),
        }
    }
}

/// A sample, and what the encoder noticed in its row.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NotedSample {
    /// The sample.
    pub sample: Sample,
    /// What may be unintended in the row.
    pub notes: Vec<RowNote>,
    /// Objects whose nulls may stand for missing fields, which only other rows show.
    pub objects: Vec<RowObject>,
}

/// Something in a row that may be unintended. Notes are counted by kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowNote {
    /// The kind, such as "truncated".
    pub kind: &'static str,
    /// The description of this row.
    pub text: String,
}

/// An object within a row.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RowObject {
    /// Its place, without numbers: `tools[].function`.
    pub path: String,
    /// The names of its fields, and whether they are null.
    pub fields: Vec<(String, bool)>,
}

impl From<Sample> for NotedSample {
    fn from(sample: Sample) -> Self {
        Self { sample, ..Self::default() }
    }
}

/// A range of trained tokens of a sample.
pub(crate) type Span = Range<u32>;

/// Returns the spans of trained tokens.
pub(crate) fn spans(trained: &[bool]) -> Vec<Span> {
    let mut at = 0;
    // Runs of equal flags, none of which is empty.
    let runs = trained.chunk_by(|a, b| a == b).filter_map(|run| {
        let start = at;
        at += run.len() as u32;
        run[0].then_some(start..at)
    });
    runs.collect()
}

/// What happens to a row of a file that is not valid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum InvalidRows {
    /// The first one is an error.
    #[default]
    Fail,
    /// They are skipped, counted and logged.
    Skip,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_the_runs_of_trained_tokens() {
        let trained = [true, false, false, true, true, false, true];
        assert_eq!(spans(&trained), [0..1, 3..5, 6..7]);
        assert_eq!(spans(&[]), []);
        assert_eq!(spans(&[false, false]), []);
    }

    #[test]
    fn samples_that_contradict_themselves_or_the_vocabulary_are_refused() {
        let sample = Sample { ids: vec![1, 5], trained: vec![true, false] };
        assert_eq!(sample.labels(), [1, IGNORE_INDEX]);
        assert_eq!(sample.check(6), Ok(()));
        let problem = sample.check(5).unwrap_err();
        assert!(problem.contains("has id 5 at token 1"), "{problem}");
        // The tokenizer may be the model's, with more tokens than the embedding has rows.
        assert!(problem.contains("resize the model first"), "{problem}");
        let short = Sample { ids: vec![1, 5], trained: vec![true] };
        assert!(short.check(6).unwrap_err().contains("2 tokens, but 1 marks"));
    }
}
