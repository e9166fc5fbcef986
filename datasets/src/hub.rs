//! The Hugging Face Hub: repositories, their files, and the local cache.

pub(crate) mod client;
pub(crate) mod content_hash;
pub(crate) mod download;
pub(crate) mod location;
pub(crate) mod selection;
pub(crate) mod token;

#[cfg(test)]
mod loopback;
#[cfg(test)]
mod tests;
