//! Data for language-model training: from a path to micro-batches, the same on every run.
//!
//! ```text
//! DataSource -- open --> Corpus { train, eval, test: Sequences, tokenizer }
//!                          |
//!                          +-- DistributedSampler + BatchLoader --> MicroBatch, MicroBatch, ...
//!                          +-- EvaluationBatches -----------------> every sample once
//! ```
//!
//! - [`Location`] finds files: in a folder, or on the Hub ([`Hub`]) through its cache.
//! - [`open`] reads what a [`DataSource`] names: raw token files, text, or a synthetic corpus.
//! - [`read_labelled`] reads texts and their classes, [`read_texts`] texts to classify.
//! - [`TokenCache`] keeps tokens on disk, so that a corpus is tokenized once.
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
mod cache_entries;
mod chunks;
mod classes;
mod content_hash;
mod corpus;
mod csv;
mod documents;
mod download;
mod draws;
mod encoder;
mod error;
mod evaluation;
mod fingerprint;
mod folder;
mod format;
mod guard;
mod hub;
mod hub_token;
mod join;
mod json_lines;
mod labelled;
mod labelled_tokens;
mod loader;
mod location;
mod packing;
mod parquet;
mod records;
mod reviews;
mod sampler;
mod splits;
mod synthetic;
mod text;
mod token_budget;
mod token_cache;
mod tokenizer;
mod tokenizer_files;
mod tokens;
mod wanted;

pub use batch::{Collate, IGNORE_INDEX, MicroBatch};
pub use budget_sampler::{BudgetSampler, EpochPosition, RaggedBatch};
pub use cache_entries::{CacheEntry, CacheLimits};
pub use classes::Classes;
pub use corpus::{Content, Corpus, DataSource, TokenizerChoice, open};
pub use download::Patience;
pub use error::DataError;
pub use evaluation::EvaluationBatches;
pub use hub::{Hub, HubRepo, HubSettings, RepoKind};
pub use hub_token::HubToken;
pub use join::Join;
pub use labelled::{
    LABEL_FIELD, LabelledText, TableText, TextColumns, has_column, read_labelled, read_labelled_as,
    read_texts,
};
pub use labelled_tokens::{LabelledBatch, LabelledTexts};
pub use loader::{BatchLoader, DrawBatches, FixedRows};
pub use location::Location;
pub use packing::{Packing, Remainder, Sequences, TokenStream};
pub use reviews::SyntheticReviews;
pub use sampler::{DistributedSampler, Order, Position, Shard};
pub use splits::{Fractions, Splits};
pub use synthetic::{MarkovCorpus, SyntheticCorpus};
pub use text::{TEXT_FIELD, read_documents, text_files};
pub use token_budget::{EpochPlan, PickingOrder, StepShape, TokenBudget};
pub use token_cache::{DocumentTokens, TokenCache};
pub use tokenizer::{END_OF_TEXT, Tokenizer};
pub use tokens::{TokenFile, TokenWidth};

#[cfg(test)]
mod hub_tests;
#[cfg(test)]
mod large_text;
#[cfg(test)]
mod loopback;
#[cfg(test)]
mod malformed;
