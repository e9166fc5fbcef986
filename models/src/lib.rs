//! Model architectures for DeepBurn, written as plain Burn modules.
//!
//! Models do not depend on ranks, shards or DeepSpeed. They are generic over the backend, and
//! sharding is applied from outside.
//!
//! - [`gpt2`] reimplements GPT-2 of the `transformers` library with matching logits, and adds a
//!   text classifier. [`encoder`] is a transformer encoder for text classification.
//! - [`causal_lm`] provides batches, loss and generation for all language models. Text classifiers
//!   use [`TextBatch`].
//! - [`hf`] reads and writes model folders in the layout of Hugging Face.
//! - [`Architecture`] is the interface between models and programs.

pub mod causal_lm;
pub mod decoder;
pub mod encoder;
pub mod families;
pub mod gpt2;
pub mod hf;

mod activation;
mod architecture;
mod batch_shape;
mod fnv;
mod label_loss;
mod label_smoothing;
mod norm;
mod projection;
mod text_error;
mod texts;
mod weights;

pub use activation::Activation;
pub use architecture::{
    Architecture, BuildModel, LanguageModelConfig, MatrixUse, SavedConfig, TextClassifierConfig,
    TokenLimits,
};
pub use batch_shape::BatchShape;
pub use deepburn_files::safetensors::FloatType;
pub use deepburn_lora as lora;
pub use label_loss::TextLabels;
pub use text_error::TextBatchError;
pub use texts::{TextBatch, TextClassifier, TextLimits};
