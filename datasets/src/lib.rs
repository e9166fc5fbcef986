//! Data for language-model training: from a path to micro-batches, the same on every run.
//!
//! ```text
//! DataSource -- open --> Corpus { train, eval, test: Sequences, tokenizer }
//!                          |
//!                          +-- DistributedSampler + BatchLoader --> MicroBatch, MicroBatch, ...
//!                          +-- EvaluationBatches -----------------> every sample once
//! ```
//!
//! - [`open`] reads what a [`DataSource`] names: raw token files, text, or a synthetic corpus.
//! - [`Sequences`] is a token stream cut into training samples of equal length.
//! - [`DistributedSampler`] decides which rank sees which sample, and when.
//! - [`TokenBudget`] packs ragged samples into batches of about equal cost, and
//!   [`BudgetSampler`] deals those to ranks.
//! - [`BatchLoader`] assembles micro-batches in the background and knows how to resume.
//!
//! Nothing here depends on a tensor library: batches are plain vectors. What is wrong with the
//! data is a [`DataError`] that names the place, the rule and the remedy; bad input never panics.

mod batch;
mod budget_sampler;
mod chunks;
mod corpus;
mod draws;
mod error;
mod evaluation;
mod loader;
mod packing;
mod sampler;
mod splits;
mod synthetic;
mod text;
mod token_budget;
mod tokenizer;
mod tokenizer_files;
mod tokens;

pub use batch::{Collate, IGNORE_INDEX, MicroBatch};
pub use budget_sampler::{BudgetSampler, EpochPosition, RaggedBatch};
pub use corpus::{Content, Corpus, DataSource, TokenizerChoice, open};
pub use error::DataError;
pub use evaluation::EvaluationBatches;
pub use loader::{BatchLoader, DrawBatches, FixedRows};
pub use packing::{Packing, Remainder, Sequences, TokenStream};
pub use sampler::{DistributedSampler, Order, Position, Shard};
pub use splits::{Fractions, Splits};
pub use synthetic::{MarkovCorpus, SyntheticCorpus};
pub use text::{JSONL_FIELD, read_documents, text_files};
pub use token_budget::{EpochPlan, PickingOrder, StepShape, TokenBudget};
pub use tokenizer::{END_OF_TEXT, Tokenizer};
pub use tokens::{TokenFile, TokenWidth};

#[cfg(test)]
mod malformed;
