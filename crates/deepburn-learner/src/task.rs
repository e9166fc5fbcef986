//! What a model learns, and from what.

use burn::module::AutodiffModule;
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
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
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Evaluation {
    /// Sum of the losses of the targets.
    pub loss_sum: f64,
    /// Targets answered right, where there is such a thing.
    pub num_correct: Option<usize>,
}
