//! Tokenized texts with their labels, and their batches for a classifier.
//!
//! [`LabeledTexts`] stores the truncated tokens of all texts in one array. Its [`Collate`]
//! implementation pads the texts of a batch to the longest one and reports the length of each text.
//! A model can then mask the padding by length, independent of its id.

use crate::error::check_positive;
use crate::hash::Fingerprint;
use crate::sampling::batch::truncate_rows;
use crate::{Collate, DataError, LabeledText, Result, TextLabel, TokenCache, Tokenizer};

/// Tokens and labels of texts.
#[derive(Debug, Clone)]
pub struct LabeledTexts {
    /// The tokens of all texts.
    tokens: Vec<u32>,
    /// The end of each text in `tokens`.
    ends: Vec<usize>,
    /// The label of each text.
    labels: Vec<TextLabel>,
    /// The number of truncated texts.
    truncated: usize,
}

impl LabeledTexts {
    /// Tokenizes `texts` on all threads and keeps the first `max_length` tokens of each. A text
    /// without any token becomes one end-of-text token. The cache stores the tokens of untruncated
    /// texts, so it is also valid for another `max_length`.
    ///
    /// # Errors
    /// Returns [`DataError::Empty`] if there are no texts, [`DataError::Setting`] if `max_length`
    /// is 0 or if a text has no tokens and the tokenizer no end of text, and the errors of
    /// [`Tokenizer::encode`].
    pub fn tokenize(
        texts: &[LabeledText],
        tokenizer: &Tokenizer,
        max_length: usize,
        cache: Option<&TokenCache>,
        what: &str,
    ) -> Result<Self> {
        let documents: Vec<&str> = texts.iter().map(|text| text.text.as_str()).collect();
        if documents.is_empty() {
            return Err(DataError::Empty { what: what.to_owned() });
        }
        check_positive("data.sequence_length", max_length)?;
        let encoded = match cache {
            Some(cache) => cache.documents(tokenizer, &documents)?,
            None => tokenizer.encode_each(&documents)?,
        };
        let (mut tokens, mut ends, mut truncated) = (Vec::new(), Vec::new(), 0);
        for (index, ids) in encoded.into_iter().enumerate() {
            match ids.is_empty() {
                // Attention over an empty row would be 0/0.
                true => tokens.push(end_of_text(tokenizer, index, what)?),
                false => tokens.extend_from_slice(&ids[..ids.len().min(max_length)]),
            }
            truncated += usize::from(ids.len() > max_length);
            ends.push(tokens.len());
        }
        let labels = texts.iter().map(|text| text.label.clone()).collect();
        Ok(Self { tokens, ends, labels, truncated })
    }

    /// Tokenizes `texts` like [`tokenize`](Self::tokenize), without a cache. Their labels are
    /// unknown and set to class 0.
    ///
    /// # Errors
    /// Returns the errors of [`tokenize`](Self::tokenize).
    pub fn unlabeled(
        texts: &[&str],
        tokenizer: &Tokenizer,
        max_length: usize,
        what: &str,
    ) -> Result<Self> {
        let label = TextLabel::Class(0);
        let labeled = |text: &&str| LabeledText { text: (*text).to_owned(), label: label.clone() };
        let texts: Vec<_> = texts.iter().map(labeled).collect();
        Self::tokenize(&texts, tokenizer, max_length, None, what)
    }

    /// Returns the number of texts, at least 1.
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> usize {
        self.labels.len()
    }

    /// Returns the number of truncated texts.
    pub fn truncated(&self) -> usize {
        self.truncated
    }

    /// Returns the number of outputs that a model needs: the largest class plus one, or the number
    /// of values to predict.
    pub fn num_outputs(&self) -> usize {
        self.labels.iter().map(TextLabel::num_outputs).max().unwrap_or(0)
    }

    /// Returns the number of tokens of each text.
    pub fn lengths(&self) -> Vec<usize> {
        (0..self.len()).map(|index| self.ids(index).len()).collect()
    }

    /// Returns a hash of tokens and labels.
    pub fn fingerprint(&self) -> String {
        let mut fingerprint = Fingerprint::new(self.len());
        for (index, label) in self.labels.iter().enumerate() {
            let tokens = self.ids(index);
            // The length separates texts, so that tokens cannot move from one to the next
            // unnoticed.
            fingerprint.add(tokens.len() as u32);
            tokens.iter().for_each(|token| fingerprint.add(*token));
            match label {
                TextLabel::Class(class) => fingerprint.add(*class),
                // The number of elements separates labels.
                TextLabel::Classes(classes) => {
                    fingerprint.add(classes.len() as u32);
                    classes.iter().for_each(|class| fingerprint.add(*class));
                }
                TextLabel::Values(values) => {
                    fingerprint.add(values.len() as u32);
                    values.iter().for_each(|value| fingerprint.add(value.to_bits()));
                }
            }
        }
        fingerprint.digits()
    }

    /// Returns the tokens of text `index`.
    fn ids(&self, index: usize) -> &[u32] {
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        &self.tokens[start..self.ends[index]]
    }
}

/// A batch of texts, padded to the longest one.
#[derive(Debug, Clone, PartialEq)]
pub struct LabeledBatch {
    /// Token ids, row by row, each row as long as the longest text. Padding is id 0.
    pub input_ids: Vec<u32>,
    /// Number of tokens of each text; 0 for a padding row.
    pub lengths: Vec<usize>,
    /// The label of each text; `None` for a padding row.
    pub labels: Vec<Option<TextLabel>>,
}

impl LabeledBatch {
    /// Returns the number of rows that are texts.
    pub fn num_texts(&self) -> usize {
        self.lengths.iter().filter(|length| **length > 0).count()
    }

    /// Returns the number of tokens without padding.
    pub fn num_tokens(&self) -> usize {
        self.lengths.iter().sum()
    }

    /// Truncates every text to its first `length` tokens, at least 1.
    pub fn truncate(&mut self, length: usize) {
        let (old, length) = (self.input_ids.len() / self.lengths.len().max(1), length.max(1));
        truncate_rows(&mut self.input_ids, old, length);
        self.lengths.iter_mut().for_each(|own| *own = (*own).min(length));
    }
}

impl Collate for LabeledTexts {
    type Batch = LabeledBatch;

    fn num_samples(&self) -> usize {
        self.len()
    }

    fn collate(&self, indices: &[usize], rows: usize) -> Result<LabeledBatch> {
        debug_assert!(indices.len() <= rows);
        let mut lengths: Vec<usize> = indices.iter().map(|it| self.ids(*it).len()).collect();
        // A batch with only padding has one column, because a tensor cannot have zero columns.
        let longest = lengths.iter().copied().max().unwrap_or(1);
        let mut input_ids = Vec::with_capacity(rows * longest);
        for (row, index) in indices.iter().enumerate() {
            input_ids.extend_from_slice(self.ids(*index));
            input_ids.resize((row + 1) * longest, 0);
        }
        input_ids.resize(rows * longest, 0);
        lengths.resize(rows, 0);
        let label = |index: &usize| Some(self.labels[*index].clone());
        let mut labels: Vec<Option<TextLabel>> = indices.iter().map(label).collect();
        labels.resize(rows, None);
        Ok(LabeledBatch { input_ids, lengths, labels })
    }
}

/// Returns the token that stands for text number `index` of `what`, which has no tokens.
///
/// # Errors
/// Returns [`DataError::Setting`] if the tokenizer has no end-of-text token.
fn end_of_text(tokenizer: &Tokenizer, index: usize, what: &str) -> Result<u32> {
    tokenizer.end_of_text().ok_or_else(|| {
        let rule = format!(
            "text {} of {what} has no tokens, so one end-of-text token stands for it, but the tokenizer names none; set data.eos_token of the job to the token that ends a text, name it as eos_token in the tokenizer_config.json, or remove the text",
            index + 1
        );
        DataError::setting("data.eos_token", "null", rule)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SyntheticReviews;

    fn reviews() -> (Vec<LabeledText>, Tokenizer) {
        let texts = SyntheticReviews { seed: 1, count: 40 }.texts();
        let documents: Vec<&str> = texts.iter().map(|it| it.text.as_str()).collect();
        let tokenizer = Tokenizer::train(&documents, 300).unwrap();
        (texts, tokenizer)
    }

    #[test]
    fn batches_are_padded_to_their_longest_text() {
        let (mut texts, tokenizer) = reviews();
        texts[1].text = "It is.".into();
        texts[2].text = String::new();
        let data = LabeledTexts::tokenize(&texts, &tokenizer, 500, None, "the texts").unwrap();
        let batch = data.collate(&[1, 2], 3).unwrap();
        let own = tokenizer.encode("It is.").unwrap();
        assert_eq!(batch.lengths, [own.len(), 1, 0]);
        assert_eq!(batch.input_ids.len(), 3 * own.len());
        assert_eq!(batch.input_ids[..own.len()], own);
        let [first, second] = [1, 2].map(|it: usize| Some(texts[it].label.clone()));
        assert_eq!(batch.labels, [first, second, None]);
        assert_eq!((batch.num_texts(), batch.num_tokens()), (2, own.len() + 1));
        assert_eq!(data.num_outputs(), 2);
    }

    #[test]
    fn long_texts_are_cut() {
        let (texts, tokenizer) = reviews();
        let whole = LabeledTexts::tokenize(&texts, &tokenizer, 1 << 20, None, "the texts").unwrap();
        let cut = LabeledTexts::tokenize(&texts, &tokenizer, 7, None, "the texts").unwrap();
        assert_eq!((whole.truncated(), cut.truncated()), (0, 40));
        for (whole, cut) in whole.lengths().into_iter().zip(cut.lengths()) {
            assert!(whole > 7 && cut == 7);
        }
        let ids = tokenizer.encode(&texts[5].text).unwrap();
        assert_eq!(cut.collate(&[5], 1).unwrap().input_ids, ids[..7]);
    }

    #[test]
    fn nothing_is_an_error() {
        let (texts, tokenizer) = reviews();
        let empty = LabeledTexts::tokenize(&[], &tokenizer, 5, None, "the train split");
        assert!(empty.unwrap_err().to_string().contains("the train split"));
        let zero = LabeledTexts::tokenize(&texts, &tokenizer, 0, None, "the train split");
        assert!(zero.unwrap_err().to_string().contains("data.sequence_length = 0"));
    }

    /// Any other token would be a word of the text.
    #[test]
    fn a_text_without_tokens_needs_an_end_of_text() {
        let (mut texts, tokenizer) = reviews();
        texts[1].text.clear();
        let tokenized = LabeledTexts::tokenize(&texts, &tokenizer, 8, None, "the train split");
        assert_eq!(tokenized.unwrap().ids(1), [0]);
        let folder = tempfile::tempdir().unwrap();
        let json = r#"{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [],
            "normalizer": null, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null,
            "decoder": null, "model": {"type": "WordLevel", "unk_token": "?", "vocab": {"?": 0}}}"#;
        std::fs::write(folder.path().join("tokenizer.json"), json).unwrap();
        let tokenizer = Tokenizer::load(folder.path()).unwrap();
        let error = LabeledTexts::tokenize(&texts, &tokenizer, 8, None, "the train split");
        let message = error.unwrap_err().to_string();
        assert!(message.contains("text 2 of the train split has no tokens"), "{message}");
        assert!(message.contains("data.eos_token"), "{message}");
    }

    #[test]
    fn batches_are_cut_to_a_length() {
        let mut batch = LabeledBatch {
            input_ids: vec![1, 2, 3, 4, 0, 0, 0, 0, 0],
            lengths: vec![3, 1, 0],
            labels: vec![Some(TextLabel::Class(1)), Some(TextLabel::Class(0)), None],
        };
        let whole = batch.clone();
        batch.truncate(3);
        assert_eq!(batch, whole);
        batch.truncate(2);
        assert_eq!((batch.input_ids.clone(), batch.num_tokens()), (vec![1, 2, 4, 0, 0, 0], 3));
        assert_eq!((batch.lengths.clone(), batch.labels), (vec![2, 1, 0], whole.labels));
        let mut empty = LabeledBatch { input_ids: vec![], lengths: vec![], labels: vec![] };
        empty.truncate(2);
        assert_eq!(empty.num_tokens(), 0);
    }

    #[test]
    fn a_batch_of_no_texts_has_a_shape() {
        let (texts, tokenizer) = reviews();
        let data = LabeledTexts::tokenize(&texts, &tokenizer, 9, None, "the texts").unwrap();
        let batch = data.collate(&[], 2).unwrap();
        assert_eq!(batch.input_ids, [0, 0]);
        assert_eq!(batch.num_texts(), 0);
    }

    #[test]
    fn fingerprints_differ_by_label() {
        let (texts, tokenizer) = reviews();
        let of = |label: TextLabel| {
            let texts = [LabeledText { label, ..texts[0].clone() }];
            LabeledTexts::tokenize(&texts, &tokenizer, 9, None, "the texts").unwrap().fingerprint()
        };
        let labels = [
            TextLabel::Class(1),
            TextLabel::Class(0),
            TextLabel::Classes(vec![1]),
            TextLabel::Classes(vec![0, 1]),
            TextLabel::Values(vec![1.0]),
            TextLabel::Values(vec![0.5]),
        ];
        let found: std::collections::BTreeSet<_> = labels.into_iter().map(of).collect();
        assert_eq!(found.len(), 6);
    }
}
