//! Model architectures for DeepBurn, written as plain Burn modules.
//!
//! Nothing here knows of ranks, shards or DeepSpeed: a model is generic over its backend and is
//! sharded from outside. [`gpt2`] is the GPT-2 of the `transformers` library, to the digit, with
//! its checkpoints, loss, text generation and a classifier on top; [`imdb`] an encoder that
//! classifies reviews. Both classifiers take a [`TextBatch`].

pub mod gpt2;
pub mod imdb;

mod class_names;
mod norm;
mod projection;
mod publication;
mod small_file;
mod texts;
mod weights;

pub use class_names::{ClassNames, ClassNamesError};
pub use publication::Publication;
pub use small_file::read_small_file;
pub use texts::{TextBatch, TextBatchError, TextLimits};
