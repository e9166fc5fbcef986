//! Micro-batches: what a model is fed, and how samples become one.
//!
//! [`Collate`] is the seam between a data set and the loaders: it turns indices into a batch.
//! [`Sequences`] is the one for causal language models, giving [`MicroBatch`].

use crate::{DataError, Sequences};

/// The label of a position that has no target: loss and token counts leave it out.
/// The same number as `ignore_index` in PyTorch's cross-entropy.
pub const IGNORE_INDEX: i32 = -100;

/// A data set that assembles batches. Loaders call it from their own thread.
pub trait Collate: Send + Sync + 'static {
    /// One micro-batch.
    type Batch: Send + 'static;

    /// Number of samples; indices are below it.
    fn num_samples(&self) -> usize;

    /// A batch of `rows` rows: the samples at `indices`, of which there are at most `rows`, then
    /// rows that weigh nothing.
    ///
    /// # Errors
    /// Whatever keeps a sample from being read; it ends the loader and reaches its consumer.
    fn collate(&self, indices: &[usize], rows: usize) -> Result<Self::Batch, DataError>;
}

/// Token ids and labels of one forward and backward, row after row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MicroBatch {
    /// Token ids, `rows * length` of them, none negative. Padding is id 0.
    pub input_ids: Vec<i32>,
    /// The ids again, [`IGNORE_INDEX`] where there is padding. The model shifts them by one.
    pub labels: Vec<i32>,
    /// Rows and tokens per row.
    pub shape: [usize; 2],
    /// Rows that are samples; they come first. The others are padding and weigh nothing.
    pub samples: usize,
}

impl MicroBatch {
    /// Cuts every row to its first `length` tokens, at least 1.
    pub fn truncate(&mut self, length: usize) {
        let [rows, old] = self.shape;
        let length = length.max(1);
        if length >= old {
            return;
        }
        for values in [&mut self.input_ids, &mut self.labels] {
            let kept = values.chunks_exact(old).flat_map(|row| &row[..length]);
            *values = kept.copied().collect();
        }
        self.shape = [rows, length];
    }

    /// Tokens that are predicted: labels that count, less the first of each row, which has
    /// nothing before it. The weight of this batch's mean loss; 0 where all is padding, and then
    /// that mean is 0/0 and must not be used.
    pub fn num_targets(&self) -> usize {
        let rows = self.labels.chunks_exact(self.shape[1]);
        rows.map(|row| row[1..].iter().filter(|&&label| label != IGNORE_INDEX).count()).sum()
    }
}

impl Collate for Sequences {
    type Batch = MicroBatch;

    fn num_samples(&self) -> usize {
        self.len()
    }

    fn collate(&self, indices: &[usize], rows: usize) -> Result<MicroBatch, DataError> {
        debug_assert!(indices.len() <= rows);
        let length = self.sequence_length();
        let mut input_ids = Vec::with_capacity(rows * length);
        let mut labels = Vec::with_capacity(rows * length);
        for (row, &index) in indices.iter().enumerate() {
            self.extend_into(index, &mut input_ids)?;
            labels.extend_from_slice(&input_ids[row * length..]);
            input_ids.resize((row + 1) * length, 0);
            labels.resize((row + 1) * length, IGNORE_INDEX);
        }
        input_ids.resize(rows * length, 0);
        labels.resize(rows * length, IGNORE_INDEX);
        Ok(MicroBatch { input_ids, labels, shape: [rows, length], samples: indices.len() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Packing, Remainder, TokenStream};

    fn sequences(len: u32) -> Sequences {
        let packing = Packing { sequence_length: 4, remainder: Remainder::Keep };
        Sequences::pack(TokenStream::Owned((1..=len).collect()), packing, "stream").unwrap()
    }

    #[test]
    fn labels_are_the_inputs() {
        let batch = sequences(12).collate(&[2, 0], 2).unwrap();
        assert_eq!(batch.input_ids, [9, 10, 11, 12, 1, 2, 3, 4]);
        assert_eq!(batch.labels, batch.input_ids);
        assert_eq!((batch.shape, batch.samples, batch.num_targets()), ([2, 4], 2, 6));
    }

    #[test]
    fn rows_are_cut_to_a_length() {
        let whole = sequences(12).collate(&[2, 0], 3).unwrap();
        let mut batch = whole.clone();
        batch.truncate(4);
        assert_eq!(batch, whole);
        batch.truncate(2);
        assert_eq!(batch.input_ids, [9, 10, 1, 2, 0, 0]);
        assert_eq!((batch.shape, batch.samples, batch.num_targets()), ([3, 2], 2, 2));
        batch.truncate(0);
        assert_eq!((batch.shape, batch.num_targets()), ([3, 1], 0));
    }

    #[test]
    fn padding_weighs_nothing() {
        let batch = sequences(6).collate(&[1], 3).unwrap();
        assert_eq!(batch.input_ids, [5, 6, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(batch.labels[..4], [5, 6, IGNORE_INDEX, IGNORE_INDEX]);
        assert!(batch.labels[4..].iter().all(|&label| label == IGNORE_INDEX));
        assert_eq!((batch.samples, batch.num_targets()), (1, 1));

        let empty = sequences(6).collate(&[], 2).unwrap();
        assert_eq!((empty.shape, empty.samples, empty.num_targets()), ([2, 4], 0, 0));
    }
}
