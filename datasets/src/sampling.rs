//! Sampling: the assignment of samples to ranks and batches.
//!
//! - [`sampler`]: samples for each rank, in batches of a fixed size.
//! - [`epoch_sampler`]: every sample once per epoch, with a smaller last step.
//! - [`token_budget`] and [`budget_sampler`]: batches of about equal cost.
//! - [`batch`] and [`labeled_texts`]: batches for language models and for classifiers.
//! - [`loader`]: assembly of batches in the background.
//! - [`evaluation`]: every sample once.

pub(crate) mod batch;
pub(crate) mod budget_sampler;
pub(crate) mod epoch_sampler;
pub(crate) mod evaluation;
pub(crate) mod labeled_texts;
pub(crate) mod loader;
pub(crate) mod sampler;
pub(crate) mod token_budget;
