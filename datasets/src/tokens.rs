//! Tokens: tokenizers, encoding of long texts, token files and their cache.
//!
//! - [`tokenizer`] and [`tokenizer_files`]: text to ids and back;
//!   [`special_tokens`]: the tokens that its files name; [`comparison`]: whether
//!   two tokenizers have the same ids.
//! - [`word_encoder`]: encoding with a cache of words, from [`added_tokens`], [`alphabet`],
//!   [`pipeline`], [`splitter`] and [`word_cache`].
//! - [`documents`], [`join`] and [`encoder`]: tokenization of text that does not fit into memory.
//! - [`token_file`] and [`cache`]: tokens on disk.
//! - [`packing`]: sequences of one length for training.

mod added_tokens;
mod alphabet;
pub(crate) mod cache;
pub(crate) mod cache_entries;
mod chunks;
pub(crate) mod comparison;
pub(crate) mod documents;
pub(crate) mod encoder;
mod engine_patterns;
pub(crate) mod join;
pub(crate) mod packing;
pub(crate) mod special_tokens;
mod splitter;
pub(crate) mod token_file;
mod token_header;
pub(crate) mod tokenizer;
pub(crate) mod tokenizer_files;
mod word_cache;
mod word_encoder;
mod word_pipeline;
