//! What a model learns, and from what.

use burn::module::AutodiffModule;
use burn::tensor::Tensor;
use deepburn_ops::OptimizerOps;
use deepburn_zero::Training;

use crate::train::OutsideError;

/// A micro-batch, as far as the training loop looks at it.
pub trait Batch {
    /// Tokens (or samples, where there are no tokens) that go through the model.
    fn num_tokens(&self) -> usize;

    /// Terms of the loss: labelled tokens or samples. Micro-batches are weighted by it, so that
    /// ragged ones count as if the whole step were one batch.
    fn num_targets(&self) -> usize;
}

/// How to compute the loss of a model on a batch.
pub trait Task<B: OptimizerOps, M: AutodiffModule<Training<B>>> {
    /// One micro-batch in host memory.
    type Batch: Batch;

    /// Mean loss over the targets of a batch, shape `[1]`; 0 for a batch without targets.
    ///
    /// # Errors
    /// When the batch does not fit the model.
    fn loss(&self, model: &M, batch: &Self::Batch) -> Result<Tensor<Training<B>, 1>, OutsideError>;

    /// The measure of a batch without autodiff.
    ///
    /// # Errors
    /// When the batch does not fit the model.
    fn evaluate(
        &self,
        model: &M::InnerModule,
        batch: &Self::Batch,
    ) -> Result<Evaluation, OutsideError>;
}

/// Sums over the targets of a batch.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Evaluation {
    /// Sum of the losses of the targets.
    pub loss_sum: f64,
    /// Which answers were given, where there is such a thing.
    pub answers: Option<Confusion>,
}

/// How often each class was taken for each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Confusion {
    num_correct: u64,
    /// A row for each class, in it how often each class was the answer; none beyond
    /// [`Confusion::MOST_CLASSES`].
    rows: Vec<Vec<u64>>,
}

impl Confusion {
    /// Most classes of which there is a matrix; of more only right answers are counted. Nobody reads
    /// a larger one, and ranks exchange it.
    pub const MOST_CLASSES: usize = 256;

    /// Of `num_classes` classes, before any answer.
    pub fn new(num_classes: usize) -> Self {
        let shown = if num_classes > Self::MOST_CLASSES { 0 } else { num_classes };
        Self { num_correct: 0, rows: vec![vec![0; shown]; shown] }
    }

    /// Enters an answer to a target of class `class`.
    ///
    /// # Panics
    /// When there is a matrix, but no such class.
    pub fn count(&mut self, class: usize, answer: usize) {
        self.num_correct += u64::from(class == answer);
        if !self.rows.is_empty() {
            self.rows[class][answer] += 1;
        }
    }

    /// For each class, how often each class was the answer; `None` for too many classes.
    pub fn rows(&self) -> Option<&[Vec<u64>]> {
        (!self.rows.is_empty()).then_some(&self.rows)
    }

    /// Right answers.
    pub fn num_correct(&self) -> u64 {
        self.num_correct
    }

    /// Right answers, then all counts, row after row.
    pub(crate) fn counts(&self) -> impl Iterator<Item = f64> {
        let counts = self.rows.iter().flatten();
        std::iter::once(&self.num_correct).chain(counts).map(|count| *count as f64)
    }

    /// What has these counts.
    pub(crate) fn from_counts(counts: &[f64]) -> Self {
        let counts: Vec<u64> = counts.iter().map(|count| *count as u64).collect();
        let (num_correct, matrix) =
            counts.split_first().map_or((0, &[][..]), |(n, rest)| (*n, rest));
        let rows = matrix.chunks(matrix.len().isqrt().max(1)).map(<[u64]>::to_vec).collect();
        Self { num_correct, rows }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_come_back_with_and_without_a_matrix() {
        for classes in [1, 2, 7, Confusion::MOST_CLASSES, Confusion::MOST_CLASSES + 1, 1 << 40] {
            let mut confusion = Confusion::new(classes);
            confusion.count(0, 0);
            confusion.count(classes - 1, 0);
            let counts: Vec<f64> = confusion.counts().collect();
            assert_eq!(Confusion::from_counts(&counts), confusion);
            assert_eq!(confusion.num_correct(), 1 + u64::from(classes == 1));
            assert_eq!(confusion.rows().is_some(), classes <= Confusion::MOST_CLASSES);
        }
    }
}
