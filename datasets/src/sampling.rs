//! Sampling: which rank sees which samples in which batch, and how batches are assembled.

pub(crate) mod batch;
pub(crate) mod budget_sampler;
pub(crate) mod evaluation;
mod fingerprint;
pub(crate) mod labelled_texts;
pub(crate) mod loader;
pub(crate) mod sampler;
pub(crate) mod token_budget;
