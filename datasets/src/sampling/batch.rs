//! Micro-batches, the input of a model, and their assembly from samples.
//!
//! [`Collate`] connects a data set with the loaders: it turns indices into a batch. [`Sequences`]
//! and [`SampleRows`](crate::SampleRows) implement it for causal language models, with
//! [`MicroBatch`] as the batch.

use crate::{Result, Sequences};

/// The label of a position without a target, which the loss and token counts ignore. It equals the
/// default `ignore_index` of PyTorch's cross-entropy loss.
pub const IGNORE_INDEX: i32 = -100;

/// A data set that assembles batches. Loaders call it from their own thread.
pub trait Collate: Send + Sync + 'static {
    /// One micro-batch.
    type Batch: Send + 'static;

    /// Returns the number of samples; indices are below it.
    fn num_samples(&self) -> usize;

    /// Returns a batch of `rows` rows: the samples at `indices` (at most `rows`), followed by
    /// padding rows, which do not contribute to the loss.
    ///
    /// # Errors
    /// Returns an error if a sample cannot be read. The loader passes the error to its consumer and
    /// stops.
    fn collate(&self, indices: &[usize], rows: usize) -> Result<Self::Batch>;
}

/// Token ids and labels of one forward and backward pass, row by row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MicroBatch {
    /// `rows * length` token ids, which are not negative. The id of padding may also be the id of a
    /// token.
    pub input_ids: Vec<i32>,
    /// The same ids, with [`IGNORE_INDEX`] in place of padding and of tokens that are not trained.
    /// The model shifts them by one.
    pub labels: Vec<i32>,
    /// Rows and tokens per row.
    pub shape: [usize; 2],
    /// Number of rows that are samples. They come first; the other rows are padding.
    pub samples: usize,
    /// The documents of the rows.
    pub documents: RowDocuments,
}

/// The documents of the rows of a batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RowDocuments {
    /// Each row that is a sample is a part of one stream of tokens, without padding. All tokens
    /// attend to those before them.
    Stream,
    /// The lengths of the documents of each row, in order. Tokens attend only to their own
    /// document, and the label of its first token is [`IGNORE_INDEX`]. What follows the last
    /// document is padding.
    Separate(Vec<Vec<usize>>),
}

impl MicroBatch {
    /// Truncates every row to its first `length` tokens, at least 1.
    pub fn truncate(&mut self, length: usize) {
        let [rows, old] = self.shape;
        let length = length.clamp(1, old);
        truncate_rows(&mut self.input_ids, old, length);
        truncate_rows(&mut self.labels, old, length);
        self.shape = [rows, length];
        if let RowDocuments::Separate(rows) = &mut self.documents {
            rows.iter_mut().for_each(|documents| truncate_documents(documents, length));
        }
    }

    /// Returns the number of tokens without padding.
    pub fn num_tokens(&self) -> usize {
        self.row_lengths().into_iter().sum()
    }

    /// Returns the number of tokens of each row without padding, which is on the right.
    pub fn row_lengths(&self) -> Vec<usize> {
        let [rows, length] = self.shape;
        match &self.documents {
            RowDocuments::Stream => {
                (0..rows).map(|row| if row < self.samples { length } else { 0 }).collect()
            }
            RowDocuments::Separate(rows) => rows.iter().map(|row| row.iter().sum()).collect(),
        }
    }

    /// Returns the position of each token in its document, from 0; 0 for padding.
    pub fn position_ids(&self) -> Vec<u32> {
        let [rows, length] = self.shape;
        let mut positions = vec![0; rows * length];
        for (row, positions) in positions.chunks_exact_mut(length).enumerate() {
            let mut rest = positions;
            let whole = [length];
            let documents = match &self.documents {
                RowDocuments::Stream if row < self.samples => &whole[..],
                RowDocuments::Stream => &[],
                RowDocuments::Separate(rows) => &rows[row],
            };
            for document in documents {
                let (own, after) = rest.split_at_mut(*document);
                own.iter_mut().zip(0..).for_each(|(position, number)| *position = number);
                rest = after;
            }
        }
        positions
    }

    /// Returns the number of predicted tokens: all labels other than [`IGNORE_INDEX`], except the
    /// first label of each row, which has no token before it. The mean loss of this batch is
    /// weighted by this number. If it is 0, the batch has only padding, and its mean loss (0/0)
    /// must not be used.
    pub fn num_targets(&self) -> usize {
        let rows = self.labels.chunks_exact(self.shape[1]);
        rows.map(|row| row[1..].iter().filter(|&&label| label != IGNORE_INDEX).count()).sum()
    }
}

/// Truncates the documents of a row to `length` tokens in total.
fn truncate_documents(documents: &mut Vec<usize>, length: usize) {
    let mut space = length;
    documents.retain_mut(|document| {
        *document = (*document).min(space);
        space -= *document;
        *document > 0
    });
}

/// Truncates rows of `old` values to `length`.
pub(crate) fn truncate_rows<T: Copy>(values: &mut Vec<T>, old: usize, length: usize) {
    if length < old {
        *values = values.chunks_exact(old).flat_map(|row| &row[..length]).copied().collect();
    }
}

impl Collate for Sequences {
    type Batch = MicroBatch;

    fn num_samples(&self) -> usize {
        self.len()
    }

    fn collate(&self, indices: &[usize], rows: usize) -> Result<MicroBatch> {
        debug_assert!(indices.len() <= rows);
        let length = self.sequence_length();
        let mut input_ids = Vec::with_capacity(rows * length);
        for &index in indices {
            input_ids.extend(self.get(index)?);
        }
        // Before the padding, which has other labels.
        let mut labels = input_ids.clone();
        input_ids.resize(rows * length, 0);
        labels.resize(rows * length, IGNORE_INDEX);
        let (samples, documents) = (indices.len(), RowDocuments::Stream);
        Ok(MicroBatch { input_ids, labels, shape: [rows, length], samples, documents })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TokenStream;

    fn sequences(len: u32) -> Sequences {
        Sequences::pack(TokenStream::Owned((1..=len).collect()), 4, "stream").unwrap()
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
        let batch = sequences(8).collate(&[1], 3).unwrap();
        assert_eq!(batch.input_ids, [5, 6, 7, 8, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(batch.labels[..4], [5, 6, 7, 8]);
        assert!(batch.labels[4..].iter().all(|&label| label == IGNORE_INDEX));
        assert_eq!((batch.samples, batch.num_targets()), (1, 3));

        let empty = sequences(6).collate(&[], 2).unwrap();
        assert_eq!((empty.shape, empty.samples, empty.num_targets()), ([2, 4], 0, 0));
    }
}
