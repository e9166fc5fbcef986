//! GPT-2 as the `transformers` library defines it.
//!
//! - [`Gpt2Config`] reads and writes `config.json`. A field that changes the computation is honoured or refused by
//!   name; others are kept.
//! - [`Gpt2`] is the model: [`Gpt2::forward`] gives logits, and as a [`LanguageModel`](crate::causal_lm::LanguageModel)
//!   it has a loss and continues prompts.
//! - [`PretrainedGpt2`] reads a folder in the layout of `transformers`, [`Gpt2::save`] writes one.
//! - [`Gpt2Classifier`] classifies texts, from a language model's weights or its own.
//!
//! A parameter's module path is its `transformers` name without the `transformer.` prefix, for
//! instance `h.3.attn.c_attn.weight`; [`hf_name`] and [`module_path()`] translate.
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
mod pass;
mod pretrained;

pub use activation::Activation;
pub use attention::KeyValues;
pub use classifier::{ClassifierConfig, Gpt2Classifier};
pub use config::Gpt2Config;
pub use model::Gpt2;
pub use parameters::{hf_name, module_path};
pub use pretrained::PretrainedGpt2;
