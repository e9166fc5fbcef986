//! Model architectures for DeepBurn, written as plain Burn modules.
//!
//! Nothing here knows of ranks, shards or DeepSpeed: a model is generic over its backend and is
//! sharded from outside.
//!
//! - [`gpt2`] is the GPT-2 of the `transformers` library, to the digit, and a classifier on top of it; [`encoder`] is a
//!   transformer encoder that classifies texts.
//! - [`causal_lm`] has what all language models share: batches, loss, generation. Classifiers take a [`TextBatch`].
//! - [`hf`] reads and writes model folders in the layout of Hugging Face.
//! - [`Architecture`] is what programs need to know of a model, and [`ForwardPass`] how it describes its training pass.

pub mod causal_lm;
pub mod encoder;
pub mod gpt2;
pub mod hf;

mod architecture;
mod forward_pass;
mod norm;
mod projection;
mod texts;
mod weights;

pub use architecture::{
    Architecture, BuildModel, LanguageModelConfig, TextClassifierConfig, TokenLimits,
};
pub use deepburn_safetensors::FloatType;
pub use forward_pass::{BatchShape, ForwardPass, PassTensor};
pub use texts::{TextBatch, TextBatchError, TextClassifier, TextLimits};
