//! Tokens: tokenizers, encoding of long texts, token files and their cache.
//!
//! - [`tokenizer`] and [`tokenizer_files`]: text to ids and back;
//!   [`special_tokens`]: the tokens that its files name; [`comparison`]: whether
//!   two tokenizers have the same ids.
//! - [`documents`], [`join`] and [`encoder`]: tokenization of text that does
//!   not fit into memory.
//! - [`token_file`] and [`cache`]: tokens on disk.
//! - [`packing`]: sequences of one length for training.

pub(crate) mod cache;
pub(crate) mod cache_entries;
mod chunks;
pub(crate) mod comparison;
pub(crate) mod documents;
pub(crate) mod encoder;
pub(crate) mod join;
pub(crate) mod packing;
pub(crate) mod special_tokens;
pub(crate) mod token_file;
mod token_header;
pub(crate) mod tokenizer;
pub(crate) mod tokenizer_files;
