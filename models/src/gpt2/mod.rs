//! GPT-2 as the `transformers` library defines it.
//!
//! - [`Gpt2Config`] reads and writes `config.json`; every field is honoured or refused by name.
//! - [`Gpt2`] is the model: [`Gpt2::forward`] gives logits, [`Gpt2::loss`] the language-model loss
//!   of a [`CausalBatch`], which has been checked on the host.
//! - [`Checkpoint`] reads a folder in `transformers` layout, [`CheckpointWriter`] writes one tensor
//!   by tensor.
//! - [`Gpt2::generate`] continues a prompt.
//! - [`Gpt2Classifier`] tells classes of texts apart, from a language model's weights or its own.
//!
//! A parameter's module path is its `transformers` name without the `transformer.` prefix, for
//! instance `h.3.attn.c_attn.weight`; [`hf_name`] and [`module_path()`] translate.
//!
//! ```
//! use burn_flex::Flex;
//! use deepburn_models::gpt2::{CausalBatch, Gpt2, Gpt2Config};
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
mod attention;
mod batch;
mod block;
mod checkpoint;
mod checkpoint_writer;
mod classifier;
mod config;
mod config_json;
mod generate;
mod loss;
mod mlp;
mod model;
mod parameters;
mod precision;
mod tensor_file;

pub(crate) use checkpoint::{CONFIG, open_files};
pub(crate) use tensor_file::float_type;

pub use activation::Activation;
pub use batch::{CausalBatch, IGNORED_LABEL, InputError};
pub use checkpoint::{Checkpoint, CheckpointError, TensorProblem};
pub use checkpoint_writer::CheckpointWriter;
pub use classifier::{ClassifierConfig, Gpt2Classifier};
pub use config::{Carried, ConfigError, Gpt2Config};
pub use generate::{GenerateError, GenerateOptions, Generation, Sampling};
pub use loss::CausalLoss;
pub use model::Gpt2;
pub use parameters::{ParameterShape, hf_name, module_path};
pub use precision::SavedPrecision;
