//! Shared parts of the fuzz tests of all crates. Used as a dev-dependency only.
//!
//! [`fuzz`] calls a test's check once per input. The check takes a valid file,
//! changes it with the given [`Mutator`], and reads it like the product does.
//! An error is an acceptable result. An input fails if it panics, takes longer
//! than [`TIME_LIMIT`] or holds more than [`MEMORY_LIMIT`].
//!
//! [`replay`] first calls it for every file of the test's [`SeedCorpus`], unchanged.
//!
//! `DEEPBURN_FUZZ_INPUTS` sets the number of inputs, and `DEEPBURN_FUZZ_SEED`
//! sets the first seed. Every input has its own seed, so the message of a
//! failure contains the seed that reproduces it.

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
