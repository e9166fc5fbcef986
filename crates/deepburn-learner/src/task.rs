//! The task that a model is trained on: its batches, loss and metrics.

use burn::module::AutodiffModule;
use burn::tensor::Tensor;
use deepburn_ops::OptimizerOps;
use deepburn_zero::Training;

use deepburn_monitor::GeneratedText;

use crate::Engine;
use crate::answers::{Answers, RewardSums};
use crate::error::BoxError;
use crate::saving::Interrupt;

/// The properties of a micro-batch that the training loop needs.
pub trait Batch {
    /// Returns the number of tokens that the model processes, or the number of samples if the data
    /// has no tokens.
    fn num_tokens(&self) -> usize;

    /// Returns the number of terms in the loss: labeled tokens or samples. Micro-batches are
    /// weighted by this number, so that the gradient of a step does not depend on how its samples
    /// are divided into micro-batches. It may be 0 for some micro-batches of a step. A step in
    /// which it is 0 for all micro-batches of all ranks is skipped.
    fn num_targets(&self) -> usize;
}

/// Computes the loss and the metrics of a model on a batch.
pub trait Task<B: OptimizerOps, M: AutodiffModule<Training<B>>> {
    /// A micro-batch in host memory.
    type Batch: Batch;

    /// Returns the mean loss over the targets of a batch, shape `[1]`; 0 for a batch without
    /// targets.
    ///
    /// # Errors
    /// Returns an error if the batch does not fit the model.
    fn loss(&self, model: &M, batch: &Self::Batch) -> Result<Tensor<Training<B>, 1>, BoxError>;

    /// Evaluates a batch without autodiff.
    ///
    /// # Errors
    /// Returns an error if the batch does not fit the model.
    fn evaluate(&self, model: &M::InnerModule, batch: &Self::Batch)
    -> Result<Evaluation, BoxError>;

    /// Returns texts that the model generates after an evaluation, for people to read. All ranks
    /// call it together, and a rank that computes an op with parameters needs the others to compute
    /// it too, and all ranks return the same variant.
    ///
    /// # Errors
    /// Returns an error if a collective fails.
    fn generate(
        &self,
        _engine: &Engine<B, M>,
        _interrupt: &Interrupt,
    ) -> Result<GeneratedTexts, BoxError> {
        Ok(GeneratedTexts::All(Vec::new()))
    }

    /// Returns the rewards of the micro-batches since the last call, which the row of a step
    /// records; `None` for a task without preferences. All ranks must return the same variant.
    fn take_rewards(&self) -> Option<RewardSums> {
        None
    }
}

/// The texts that a model generated after an evaluation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GeneratedTexts {
    /// The texts of all prompts.
    All(Vec<GeneratedText>),
    /// The texts that were complete when a rank was interrupted.
    Part(Vec<GeneratedText>),
}

/// Sums over the targets of a batch.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Evaluation {
    /// The sum of the losses of all targets.
    pub loss_sum: f64,
    /// The answers to the targets; `None` for a task whose only metric is the loss.
    pub answers: Option<Answers>,
}
