//! Text classification: validated batches of texts, and the classifier trait.
//!
//! Main types: [`TextBatch`] and [`TextClassifier`]. Reading values back from a device tensor is
//! slow, so ids, lengths and labels are checked here on the host, before any tensor is created.

use std::sync::Arc;

use burn::module::Module;
use burn::tensor::{Int, Tensor, TensorData, backend::Backend};
use deepburn_ops::FusedOps;

use crate::label_loss::{LabelTensor, TextLabels};
use crate::text_error::TextBatchError;

/// The limits of a classifier on texts and labels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TextLimits {
    /// Number of tokens in the vocabulary; token ids are smaller.
    pub vocab_size: usize,
    /// Maximum text length in tokens.
    pub max_len: usize,
    /// Number of outputs: classes, which are larger than the labels, or numbers to predict.
    pub num_classes: usize,
}

/// A batch of texts, padded to the same length, with their labels.
#[derive(Clone, Debug)]
pub struct TextBatch<B: Backend> {
    /// `[texts, length]`.
    pub(crate) input_ids: Tensor<B, 2, Int>,
    /// `[texts, length, 1]`: the weight of each position in the mean over the text; 0 for padding.
    pub(crate) weights: Tensor<B, 3>,
    /// The number of tokens of each text. The rest of the row is padding.
    pub(crate) lengths: Arc<[usize]>,
    /// The labels of the texts.
    pub(crate) labels: LabelTensor<B>,
    /// The weight of the mean over the classes in the loss; 0 without label smoothing.
    pub(crate) label_smoothing: f64,
}

/// A module that classifies texts.
pub trait TextClassifier<B: FusedOps>: Module<B> {
    /// Returns the logits `[texts, num_classes]`.
    fn forward(&self, batch: &TextBatch<B>) -> Tensor<B, 2>;

    /// Returns the loss summed over the texts, `[1]`, at least f32, and the logits. The kind of the
    /// labels determines the loss, and the batch its label smoothing.
    fn loss(&self, batch: &TextBatch<B>) -> (Tensor<B, 1>, Tensor<B, 2>) {
        let logits = self.forward(batch);
        (batch.labels.loss(logits.clone(), batch.label_smoothing), logits)
    }
}

impl<B: Backend> TextBatch<B> {
    /// Returns a batch of `lengths.len()` texts. `input_ids` contains one row per text, padded with
    /// any token id. A row of length 0 has no label and does not affect the loss. Such rows
    /// complete the last batches, so that all ranks have the same number of batches.
    ///
    /// # Errors
    /// Returns [`TextBatchError`] if a count, a length, a token or a label is invalid.
    pub fn new<'a>(
        limits: TextLimits,
        input_ids: &[u32],
        lengths: &[usize],
        labels: impl Into<TextLabels<'a>>,
        device: &B::Device,
    ) -> Result<Self, TextBatchError> {
        let labels = labels.into();
        let length = check(limits, input_ids, lengths, labels)?;
        let texts = lengths.len();
        // `check` has checked that ids are below the vocabulary size, so they are also below 2^24.
        let ids: Vec<i32> = input_ids.iter().map(|id| *id as i32).collect();
        let weights: Vec<f32> = lengths
            .iter()
            .flat_map(|own| {
                // A row of length 0 has no position with this weight.
                let weight = 1.0 / (*own).max(1) as f32;
                (0..length).map(move |position| if position < *own { weight } else { 0.0 })
            })
            .collect();
        Ok(Self {
            input_ids: Tensor::from_data(TensorData::new(ids, [texts, length]), device),
            weights: Tensor::from_data(TensorData::new(weights, [texts, length, 1]), device),
            lengths: lengths.into(),
            labels: LabelTensor::new(labels, lengths, device),
            label_smoothing: 0.0,
        })
    }

    /// Returns the batch with label smoothing: the loss of a text is `1 - factor` times its
    /// negative log-likelihood, plus `factor` times the mean of `-log(p)` over the classes.
    /// `factor` is from 0 to below 1; 0 changes nothing.
    #[must_use]
    pub fn with_label_smoothing(self, factor: f64) -> Self {
        Self { label_smoothing: factor, ..self }
    }
}

/// Checks the arguments of [`TextBatch::new`] and returns the length of the rows.
fn check(
    limits: TextLimits,
    input_ids: &[u32],
    lengths: &[usize],
    labels: TextLabels<'_>,
) -> Result<usize, TextBatchError> {
    let texts = lengths.len();
    let labeled = labels.num_texts(limits.num_classes);
    // First, because the other checks divide by the number of texts.
    if texts == 0
        || input_ids.is_empty()
        || labeled != Some(texts)
        || !input_ids.len().is_multiple_of(texts)
    {
        return Err(TextBatchError::Counts {
            ids: input_ids.len(),
            lengths: texts,
            labels: labeled.unwrap_or(0),
        });
    }
    let length = input_ids.len() / texts;
    let TextLimits { vocab_size, max_len, num_classes } = limits;
    if length > max_len {
        return Err(TextBatchError::TooLong { length, max_len });
    }
    if let Some((text, &found)) = lengths.iter().enumerate().find(|(_, own)| **own > length) {
        return Err(TextBatchError::Length { text, found, length });
    }
    let unknown = |id: &u32| *id as usize >= vocab_size;
    if let Some(at) = input_ids.iter().position(unknown) {
        return Err(TextBatchError::Token { text: at / length, id: input_ids[at], vocab_size });
    }
    labels.check(lengths, num_classes)?;
    Ok(length)
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_flex::Flex;

    fn batch(ids: &[u32], lengths: &[usize], labels: &[i64]) -> Result<(), TextBatchError> {
        let limits = TextLimits { vocab_size: 10, max_len: 3, num_classes: 2 };
        TextBatch::<Flex>::new(limits, ids, lengths, labels, &Default::default()).map(drop)
    }

    #[test]
    fn what_fits_is_taken() {
        assert_eq!(batch(&[1, 2, 3, 9, 0, 0], &[3, 1], &[0, 1]), Ok(()));
        assert_eq!(batch(&[1, 2, 0, 0], &[2, 0], &[1, -100]), Ok(()));
    }

    #[test]
    fn what_does_not_fit_is_named() {
        let counts = TextBatchError::Counts { ids: 3, lengths: 2, labels: 2 };
        assert_eq!(batch(&[1, 2, 3], &[1, 1], &[0, 0]), Err(counts));
        assert!(matches!(batch(&[], &[], &[]), Err(TextBatchError::Counts { .. })));
        let too_long = TextBatchError::TooLong { length: 4, max_len: 3 };
        assert_eq!(batch(&[1, 2, 3, 4], &[4], &[0]), Err(too_long));
        let length = TextBatchError::Length { text: 1, found: 3, length: 2 };
        assert_eq!(batch(&[1, 2, 3, 4], &[2, 3], &[0, 0]), Err(length));
        let token = TextBatchError::Token { text: 1, id: 10, vocab_size: 10 };
        assert_eq!(batch(&[1, 2, 10, 4], &[2, 2], &[0, 0]), Err(token));
        for (lengths, label) in [([1, 1], 2), ([1, 1], -1), ([1, 0], 0)] {
            let error = TextBatchError::Label { text: 1, label, num_classes: 2 };
            assert_eq!(batch(&[1, 2], &lengths, &[0, label]), Err(error));
        }
    }
}
