//! Language modeling: batches, loss and generation for all models that predict the next token.
//!
//! - [`CausalBatch`] is a validated batch of token sequences.
//! - [`LanguageModel`] is a module that computes the [`CausalLoss`] of a batch and generates text
//!   from prompts.
//! - [`Generation`] is an iterator over the generated tokens, which [`Sampling`] chooses.

mod batch;
mod generate;
mod generate_error;
mod loss;
mod options;
mod sampling;

use std::fmt;

use burn::module::Module;
use burn::tensor::{Int, Tensor};
use deepburn_ops::FusedOps;

use crate::architecture::TokenLimits;

pub use batch::{CausalBatch, IGNORED_LABEL, InputError};
pub use generate::{Generation, SeenTokens};
pub use generate_error::GenerateError;
pub use loss::CausalLoss;
pub use options::{GenerateOptions, RandomSampling, Sampling};

/// A module that predicts the next token.
pub trait LanguageModel<B: FusedOps>: Module<B> {
    /// The cache for earlier positions, such as their keys and values. The default is an empty
    /// cache.
    type Cache: fmt::Debug + Default;

    /// Returns the limits on token sequences.
    fn limits(&self) -> TokenLimits;

    /// Returns the device of the weights.
    fn device(&self) -> B::Device;

    /// Returns the language-model loss of a batch.
    fn loss(&self, batch: &CausalBatch<B>) -> CausalLoss<B>;

    /// Returns, as `[2]`, the sum of [`loss`](Self::loss) and the number of targets whose token is
    /// the most likely one. For evaluations, which have no backward pass.
    fn scores(&self, batch: &CausalBatch<B>) -> Tensor<B, 1>;

    /// Returns the negative log-likelihood of each sequence in nats, summed over its targets,
    /// `[batch]`; 0 for a sequence without targets. Label smoothing is ignored.
    fn sequence_losses(&self, batch: &CausalBatch<B>) -> Tensor<B, 1>;

    /// Returns an empty cache for a sequence of about `positions` positions.
    fn cache(&self, positions: usize) -> Self::Cache {
        // An empty cache reserves no room.
        let _ = positions;
        Self::Cache::default()
    }

    /// Returns the logits `[1, vocab]` of the token after `input_ids` `[1, length]`. `input_ids`
    /// follow the `past` positions in `cache` and are added to the cache.
    fn next_logits(
        &self,
        input_ids: Tensor<B, 2, Int>,
        past: usize,
        cache: &mut Self::Cache,
    ) -> Tensor<B, 2>;

    /// Generates text that continues `prompt`.
    ///
    /// # Errors
    /// Returns [`GenerateError`] if the prompt is empty or has tokens outside the vocabulary, if
    /// prompt and `max_new_tokens` together are too long for the model, or if an option is out of
    /// range.
    fn generate(
        &self,
        prompt: &[u32],
        options: &GenerateOptions,
    ) -> Result<Generation<'_, B, Self>, GenerateError> {
        Generation::new(self, prompt, options, None)
    }

    /// Generates the same text as [`generate`](Self::generate). If `prompt` begins with the tokens
    /// of `seen`, which an earlier generation of this model has processed, they are not processed
    /// again.
    ///
    /// # Errors
    /// Returns the errors of [`generate`](Self::generate).
    fn generate_after(
        &self,
        seen: SeenTokens<Self::Cache>,
        prompt: &[u32],
        options: &GenerateOptions,
    ) -> Result<Generation<'_, B, Self>, GenerateError> {
        Generation::new(self, prompt, options, Some(seen))
    }
}
