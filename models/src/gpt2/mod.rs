//! GPT-2 as the `transformers` library defines it.
//!
//! - [`Gpt2Config`] reads and writes `config.json`. Every field that affects the computation is either supported or
//!   rejected with an error. All other fields are preserved.
//! - [`Gpt2`] is the model. [`Gpt2::forward`] returns logits, and the
//!   [`LanguageModel`](crate::causal_lm::LanguageModel) trait provides the loss and text generation.
//! - [`PretrainedGpt2`] reads a folder in the layout of `transformers`, and [`Gpt2::save`] writes one.
//! - [`Gpt2Classifier`] is GPT-2 for text classification. It can be loaded from a language model or from a trained
//!   classifier.
//!
//! The module path of a parameter is its `transformers` name without the `transformer.` prefix, for example
//! `h.3.attn.c_attn.weight`. The [`weight_map`](crate::Architecture::weight_map) has both.
//!
//! ```
//! use burn_flex::Flex;
//! use deepburn_models::causal_lm::{CausalBatch, LanguageModel};
//! use deepburn_models::gpt2::{Gpt2, Gpt2Config};
//!
//! let config = Gpt2Config { vocab_size: 50, n_embd: 8, n_head: 2, n_layer: 1, ..Gpt2Config::small() };
//! let device = Default::default();
//! let model = Gpt2::<Flex>::new(&config, 42, &device)?;
//! let batch = CausalBatch::new(&config, &[1, 2, 3, 4, 5, 6], None, [2, 3], &device)?;
//! let loss = model.loss(&batch);
//! assert_eq!(loss.tokens, 4); // the last position of each sequence predicts nothing
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod activation;
mod architecture;
mod attention;
mod block;
mod classifier;
mod config;
mod config_json;
mod mlp;
mod model;
mod parameters;
mod pretrained;

pub use activation::Activation;
pub use attention::KeyValues;
pub use classifier::{ClassifierConfig, Gpt2Classifier};
pub use config::Gpt2Config;
pub use model::Gpt2;
pub use parameters::hf_name;
pub use pretrained::PretrainedGpt2;
