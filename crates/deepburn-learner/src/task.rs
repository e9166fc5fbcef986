//! What a model learns, and from what.

use burn::module::AutodiffModule;
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use deepburn_zero::Training;
use serde::Serialize;

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
pub trait Task<B: Backend, M: AutodiffModule<Training<B>>> {
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
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Confusion {
    /// A row for each class, in it how often each class was the answer.
    rows: Vec<Vec<u64>>,
}

impl Confusion {
    /// Of `num_classes` classes, before any answer.
    pub fn new(num_classes: usize) -> Self {
        Self { rows: vec![vec![0; num_classes]; num_classes] }
    }

    /// Enters an answer to a target of class `class`.
    ///
    /// # Panics
    /// When there is no such class.
    pub fn count(&mut self, class: usize, answer: usize) {
        self.rows[class][answer] += 1;
    }

    /// For each class, how often each class was the answer.
    pub fn rows(&self) -> &[Vec<u64>] {
        &self.rows
    }

    /// Right answers.
    pub fn num_correct(&self) -> u64 {
        self.rows.iter().enumerate().map(|(class, row)| row[class]).sum()
    }

    /// All counts, row after row.
    pub(crate) fn counts(&self) -> impl Iterator<Item = f64> {
        self.rows.iter().flatten().map(|count| *count as f64)
    }

    /// The matrix of these counts.
    pub(crate) fn from_counts(counts: &[f64]) -> Self {
        let num_classes = counts.len().isqrt().max(1);
        let rows = counts.chunks(num_classes);
        Self { rows: rows.map(|row| row.iter().map(|count| *count as u64).collect()).collect() }
    }
}
