//! What the fuzz tests of all crates share. A dev-dependency only.
//!
//! [`fuzz`] calls a test's check once per input. The check takes a sound file, changes it with the
//! [`Mutator`] that it is given, and reads it as the product does; an error is as good as a result.
//! An input fails if it panics, takes longer than [`TIME_LIMIT`] or holds more than [`MEMORY_LIMIT`].
//!
//! `DEEPBURN_FUZZ_INPUTS` sets the number of inputs and `DEEPBURN_FUZZ_SEED` the seed of the first.
//! Every input has its own seed, so a failure names the seed that repeats it alone.

mod memory;
mod mutator;
mod run;

pub use memory::MEMORY_LIMIT;
pub use mutator::{JSON_TOKENS, Mutator};
pub use run::{TIME_LIMIT, fuzz, scratch_folder};
