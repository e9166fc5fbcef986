//! Language modelling, for all models that predict the next token.
//!
//! - [`CausalBatch`] is a batch of token sequences that has been checked against the model it is for.
//! - [`LanguageModel`] is a module that gives the [`CausalLoss`] of a batch and continues prompts.
//! - [`Generation`] yields the tokens that continue a prompt.

mod batch;
mod generate;
mod loss;

use std::fmt;

use burn::module::Module;
use burn::tensor::{Int, Tensor};
use deepburn_ops::FusedOps;

use crate::architecture::TokenLimits;

pub use batch::{CausalBatch, IGNORED_LABEL, InputError};
pub use generate::{GenerateError, GenerateOptions, Generation, Sampling};
pub use loss::CausalLoss;

/// A module that predicts the next token.
pub trait LanguageModel<B: FusedOps>: Module<B> {
    /// The cache of earlier positions, such as their keys and values. The default is an empty one.
    type Cache: fmt::Debug + Default;

    /// Returns the limits on token sequences.
    fn limits(&self) -> TokenLimits;

    /// Returns the device of the weights.
    fn device(&self) -> B::Device;

    /// Returns the language-model loss of a batch.
    fn loss(&self, batch: &CausalBatch<B>) -> CausalLoss<B>;

    /// Returns the logits `[1, vocab]` of what follows `input_ids` `[1, length]`, which continue the `past`
    /// positions that `cache` holds. Their own are added to the cache.
    fn next_logits(
        &self,
        input_ids: Tensor<B, 2, Int>,
        past: usize,
        cache: &mut Self::Cache,
    ) -> Tensor<B, 2>;

    /// Continues `prompt`.
    ///
    /// # Errors
    /// [`GenerateError`] if the prompt is empty, has tokens outside the vocabulary or leaves no space
    /// for `max_new_tokens`, or an option is out of range.
    fn generate(
        &self,
        prompt: &[u32],
        options: &GenerateOptions,
    ) -> Result<Generation<'_, B, Self>, GenerateError> {
        Generation::new(self, prompt, options)
    }
}
