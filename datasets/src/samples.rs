//! Samples for fine-tuning: tokens, and which of them are trained.
//!
//! ```text
//! rows of files -- encode --> Sample --> cache --> Samples
//!                                                    |  truncate, drop, pack
//!                                                    v
//!                                       SampleRows -- Collate --> MicroBatch
//! ```
//!
//! - [`sample`]: a sample, and the rows of files that cannot become one.
//! - [`encode`]: rows to samples on all threads, with a cache.
//! - [`index`]: lengths, trained spans and row numbers of many samples.
//! - [`stored`]: samples on disk or in memory.
//! - [`packing`]: several samples in one row.
//! - [`rows`]: rows of samples for training.
//! - [`pairs`]: two completions of a prompt, for preference optimization.
//! - [`statistics`]: counts for diagnoses.

pub(crate) mod encode;
mod index;
pub(crate) mod packing;
pub(crate) mod pairs;
pub(crate) mod rows;
pub(crate) mod sample;
mod schema_nulls;
pub(crate) mod statistics;
mod stored;
