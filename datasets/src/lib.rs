//! Loads training data and assembles micro-batches, reproducibly across runs.
//!
//! ```text
//! DataSource -- open --> Corpus { train, eval, test: Sequences, tokenizer }
//!                          |
//!                          +-- DistributedSampler + BatchLoader --> MicroBatch, MicroBatch, ...
//!                          +-- EvaluationBatches -----------------> every sample once
//! ```
//!
//! - [`Location`] finds files: in a folder, or on the Hub ([`Hub`]) through its cache.
//! - [`open`] reads a [`DataSource`]: raw token files, text, or a synthetic corpus.
//! - [`read_labeled`] reads texts and their classes, [`read_texts`] texts to classify.
//! - [`TokenCache`] keeps tokens on disk, so that a corpus is tokenized once.
//! - [`open_samples`] encodes the rows of files, such as conversations, as [`Samples`];
//!   [`SampleRows`] packs them, and [`PairRows`] has pairs of completions of the same prompt.
//! - [`Sequences`] is a token stream cut into training samples of one length.
//! - [`DistributedSampler`] assigns samples to ranks and determines their order.
//! - [`EpochSampler`] does so with every sample once per epoch.
//! - [`TokenBudget`] packs samples of different length into batches of about equal cost, and
//!   [`BudgetSampler`] distributes the batches to ranks.
//! - [`BatchLoader`] assembles micro-batches in the background, and resumes at a saved position.
//!
//! Nothing here depends on a tensor library: batches are plain vectors. Problems in the data are
//! reported as a [`DataError`] that names the location, the rule and the remedy. Invalid input
//! never causes a panic.
//!
//! The modules depend on each other in one direction: `formats` on nothing, `tokens` on `formats`,
//! `hub`, `sampling` and `samples` on both, and `corpus` on all.

mod corpus;
mod error;
mod formats;
mod guard;
mod hash;
mod hub;
mod samples;
mod sampling;
mod splits;
mod stable_rng;
mod synthetic;
#[cfg(test)]
mod tests;
mod tokens;

pub use corpus::{Content, Corpus, DataSource, TokenizerChoice, open};
pub use error::{DataError, Result};
pub use formats::classes::{Classes, ClassesOrigin};
pub use formats::labeled::{
    LABEL_FIELD, LabeledColumns, LabeledText, TableText, TextColumns, has_column, read_labeled,
    read_labeled_as, read_texts,
};
pub use formats::labels::{LabelKind, TextLabel};
pub use formats::rows::{DataRow, FileRow};
pub use formats::table::{is_number_label, whole_number};
pub use formats::text::{
    TEXT_FIELD, is_plain_text, read_documents, skipped_files, text_files, unread_texts,
};
pub use hub::client::{Hub, HubRepo, HubSettings, RepoKind};
pub use hub::companions::{CompanionFile, CompanionKind, companion_files};
pub use hub::download::RetryPolicy;
pub use hub::location::Location;
pub use hub::token::HubToken;
pub use samples::encode::{SampleSource, SampleSplits, open_samples};
pub use samples::packing::Packing;
pub use samples::pairs::{PairBatch, PairRows, pair_sample};
pub use samples::rows::{Padding, SampleLayout, SampleRows, Samples};
pub use samples::sample::{InvalidRows, NotedSample, RowNote, RowObject, Sample};
pub use samples::statistics::{LengthHistogram, SampleStatistics};
pub use sampling::batch::{Collate, IGNORE_INDEX, MicroBatch, RowDocuments};
pub use sampling::budget_sampler::{BudgetSampler, EpochPosition};
pub use sampling::epoch_sampler::{EpochSampler, StepPosition};
pub use sampling::evaluation::EvaluationBatches;
pub use sampling::labeled_texts::{LabeledBatch, LabeledTexts};
pub use sampling::loader::BatchLoader;
pub use sampling::sampler::{BatchSampler, DataShard, DistributedSampler, Order, Position};
pub use sampling::token_budget::{EpochPlan, PickingOrder, StepShape, TokenBudget};
pub use splits::{Fractions, Splits};
pub use synthetic::SyntheticCorpus;
pub use synthetic::reviews::SyntheticReviews;
pub use tokens::cache::{TokenCache, user_cache_folder};
pub use tokens::cache_entries::{CacheEntry, CacheLimits};
pub use tokens::comparison::{ChangedToken, TokenizerComparison};
pub use tokens::join::Join;
pub use tokens::packing::{Sequences, TokenStream};
pub use tokens::token_file::{TokenFile, TokenWidth};
pub use tokens::tokenizer::{END_OF_TEXT, ExtraToken, Tokenizer};
pub use tokens::tokenizer_files::has_tokenizer;
