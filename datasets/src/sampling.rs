//! Sampling: which rank sees which samples, and how they become batches.
//!
//! - [`sampler`]: samples for each rank, in batches of a fixed size.
//! - [`token_budget`] and [`budget_sampler`]: batches of about equal cost.
//! - [`batch`] and [`labelled_texts`]: the batches of both kinds of models.
//! - [`loader`]: assembly of batches in the background.
//! - [`evaluation`]: every sample once.

pub(crate) mod batch;
pub(crate) mod budget_sampler;
pub(crate) mod evaluation;
pub(crate) mod labelled_texts;
pub(crate) mod loader;
pub(crate) mod sampler;
pub(crate) mod token_budget;
