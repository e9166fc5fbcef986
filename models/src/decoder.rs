//! Decoders made of parts.
//!
//! - [`DecoderParts`] describes a model: its parts, their sizes, and the names of their parameters.
//! - [`DecoderConfig`] reads a `config.json` and returns the parts. Every model of this kind is a
//!   configuration: [`gpt2`](crate::gpt2) and the [families](crate::families) of Llama.
//! - [`Decoder`] is the module, made from the parts.
//! - [`PretrainedDecoder`] reads a folder in the layout of `transformers`, and [`Decoder::save`]
//!   writes one.
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

mod any;
mod architecture;
mod attention;
mod build;
mod config;
mod embedding;
mod feed_forward;
mod layer;
mod merge;
mod model;
mod named;
mod parameters;
mod parts;
mod pass;
mod pretrained;
mod rotary;
mod rotary_angles;
mod save;
mod stored_values;
mod unlearned;

pub(crate) use config::document;
pub(crate) use pretrained::SCORE;

pub use crate::norm::NormKind;
pub use any::AnyDecoder;
pub use config::DecoderConfig;
pub use model::Decoder;
pub use parts::{
    AttentionInputs, AttentionPart, DecoderParts, EmbeddingPart, FeedForwardInputs,
    FeedForwardPart, FileLayout, HeadPart, LayerPart, NormPart, ProjectionLayout, ProjectionPart,
};
pub use pass::DecoderCache;
pub use pretrained::PretrainedDecoder;
pub use rotary::{Rotary, RotaryScaling};
pub use stored_values::StoredValues;
