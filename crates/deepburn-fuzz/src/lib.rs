//! Utilities for the fuzz tests of all crates. This crate is only used as a dev-dependency.
//!
//! [`fuzz`] calls the check of a test once per input. The check takes a valid file, mutates it with
//! the given [`Mutator`], and reads it in the same way as the product. Errors are acceptable
//! results. An input fails if it panics, takes longer than [`TIME_LIMIT`] or allocates more than
//! [`MEMORY_LIMIT`] bytes.
//!
//! [`replay`] calls the check for every unmodified file of the test's [`SeedCorpus`]; tests call it
//! before [`fuzz`].
//!
//! `DEEPBURN_FUZZ_INPUTS` sets the number of inputs, and `DEEPBURN_FUZZ_SEED` sets the first seed.
//! Every input has its own seed, so the message of a failure contains the seed that reproduces it.

mod current;
mod memory;
mod mutator;
mod patch;
mod run;
mod seed_corpus;

pub use memory::MEMORY_LIMIT;
pub use mutator::{JSON_TOKENS, Mutator};
pub use patch::patched;
pub use run::{TIME_LIMIT, fuzz, replay, scratch_folder};
pub use seed_corpus::{SeedCorpus, SeedFile};
