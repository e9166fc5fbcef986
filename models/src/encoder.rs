//! A transformer encoder for text classification, such as sentiment analysis of film reviews.
//!
//! - [`EncoderConfig`] is its configuration. The fields have the same names as in `config.json`.
//! - [`Encoder`] is the model: embeddings and sinusoidal positions, encoder layers as
//!   `torch.nn.TransformerEncoderLayer` computes them (normalization after each sum, ReLU), the
//!   mean over the tokens of a text, and a classification head with two layers.
//! - [`TextBatch`](crate::TextBatch) is its input: texts padded to one length, and the length of
//!   each text. Padding is excluded from attention and from the mean.
//!
//! ```
//! use burn_flex::Flex;
//! use deepburn_models::encoder::{Encoder, EncoderConfig};
//! use deepburn_models::{TextBatch, TextClassifier};
//!
//! let config = EncoderConfig { vocab_size: 50, embed_dim: 8, num_heads: 2, ..EncoderConfig::guide() };
//! let device = Default::default();
//! let model = Encoder::<Flex>::new(&config, 42, &device)?;
//! // Two texts, of three tokens and of one.
//! let batch = TextBatch::new(config.limits(), &[7, 8, 9, 3, 0, 0], &[3, 1], &[1, 0], &device)?;
//! assert_eq!(model.forward(&batch).dims(), [2, config.num_classes]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod architecture;
mod config;
mod layer;
mod model;
mod parameters;
mod positions;

pub use config::{EncoderConfig, ModelType};
pub use model::Encoder;
