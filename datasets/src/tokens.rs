//! Tokens: tokenizers, encoding of long texts, token files and their cache, packing.

pub(crate) mod cache;
pub(crate) mod cache_entries;
mod chunks;
pub(crate) mod documents;
pub(crate) mod encoder;
pub(crate) mod join;
pub(crate) mod packing;
pub(crate) mod token_file;
pub(crate) mod tokenizer;
mod tokenizer_files;
