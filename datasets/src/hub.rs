//! The Hugging Face Hub: repositories, their files, and the local cache.
//!
//! - [`client`]: the files of a repository, from the cache or downloaded.
//! - [`download`]: transfers that resume, retry and verify.
//! - [`content_hash`]: the hashes that the Hub announces.
//! - [`file_selection`]: the files of a data set, a model or a tokenizer.
//! - [`split_selection`]: the files of a split.
//! - [`companions`]: files of a model that fine-tuning exports unchanged.
//! - [`location`]: a folder, a file or a repository, as a user names it.

pub(crate) mod client;
pub(crate) mod companions;
pub(crate) mod content_hash;
pub(crate) mod download;
pub(crate) mod file_selection;
pub(crate) mod location;
pub(crate) mod split_selection;
pub(crate) mod token;

#[cfg(test)]
mod tests;
