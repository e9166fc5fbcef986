//! GPT-2 as the `transformers` library defines it.
//!
//! - [`Gpt2Config`] reads and writes `config.json`. Every field that affects the computation is
//!   either supported or rejected with an error. All other fields are preserved.
//! - [`Gpt2`] is the model: a [`Decoder`](crate::decoder::Decoder) of the parts that the
//!   configuration names.
//! - [`PretrainedGpt2`] reads a folder in the layout of `transformers`.
//! - [`Gpt2Classifier`] is GPT-2 for text classification. It can be loaded from a language model or
//!   from a trained classifier.
//!
//! The module path of a parameter is its `transformers` name without the `transformer.` prefix, for
//! example `h.3.attn.c_attn.weight`. The [`weight_map`](crate::Architecture::weight_map) has both.

mod architecture;
mod classifier;
mod config;
mod config_json;
mod model;
mod parameters;

pub use crate::activation::Activation;
pub use classifier::{ClassifierConfig, Gpt2Classifier};
pub use config::Gpt2Config;
pub use model::{Gpt2, PretrainedGpt2};
