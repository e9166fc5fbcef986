//! The encoder model with its classification head.
//!
//! Main type: [`Encoder`]. With T texts of L tokens each, of width D:
//!
//! ```text
//! ids [T, L] → embedding + positions [T·L, D] → layers [T·L, D] → mean over own tokens [T, D]
//!            → classifier [T, classes]
//! ```

use burn::module::Module;
use burn::nn::{Dropout, DropoutConfig, Embedding};
use burn::tensor::activation::relu;
use burn::tensor::{Int, Tensor, backend::Backend};
use deepburn_ops::{AttentionMask, FusedOps, SelfAttention, dropout};

use super::config::EncoderConfig;
use super::layer::EncoderLayer;
use super::parameters::weight_map;
use super::positions::sinusoids;
use crate::hf::ModelConfigError;
use crate::projection::{Linear, project, projection};
use crate::texts::{TextBatch, TextClassifier};
use crate::weights::WeightInit;

/// A transformer encoder with a classification head on the mean over the tokens of a text.
///
/// Dropout is only active on autodiff backends.
#[derive(Module, Debug)]
pub struct Encoder<B: Backend> {
    /// Token embeddings, `[vocab, width]`.
    embedding: Embedding<B>,
    /// The layers, in order.
    layers: Vec<EncoderLayer<B>>,
    /// The first layer of the classification head: from the mean over the tokens to the hidden
    /// width.
    classifier1: Linear<B>,
    /// The second layer of the classification head: from the hidden width to one logit per class.
    classifier2: Linear<B>,
    /// Dropout for the embeddings and the hidden activations of the classification head.
    dropout: Dropout,
    /// The configuration that the module was built from.
    #[module(skip)]
    config: EncoderConfig,
}

impl<B: Backend> Encoder<B> {
    /// Returns a model with random initial weights. Embeddings have standard deviation
    /// `initializer_range`, linear layers have PyTorch's default standard deviations, biases are 0
    /// and normalization weights are 1.
    ///
    /// The values of a parameter depend only on `seed` and its path, and are generated when the
    /// parameter is first used.
    ///
    /// # Errors
    /// Returns [`ModelConfigError`] if `config` is inconsistent.
    pub fn new(
        config: &EncoderConfig,
        seed: u64,
        device: &B::Device,
    ) -> Result<Self, ModelConfigError> {
        config.validate()?;
        Self::with(config, &WeightInit::new(weight_map(config), seed, device))
    }

    /// Returns a model with the weights that `init` provides.
    pub(crate) fn with(
        config: &EncoderConfig,
        init: &WeightInit<B>,
    ) -> Result<Self, ModelConfigError> {
        config.validate()?;
        Ok(Self {
            embedding: Embedding { weight: init.param("embedding.weight") },
            layers: (0..config.num_layers)
                .map(|layer| EncoderLayer::new(init, layer, config))
                .collect(),
            classifier1: projection(init, "classifier1"),
            classifier2: projection(init, "classifier2"),
            dropout: DropoutConfig::new(config.dropout).init(),
            config: config.clone(),
        })
    }

    /// Returns the model's configuration.
    #[must_use]
    pub fn config(&self) -> &EncoderConfig {
        &self.config
    }
}

impl<B: FusedOps> TextClassifier<B> for Encoder<B> {
    fn forward(&self, batch: &TextBatch<B>) -> Tensor<B, 2> {
        let [texts, length] = batch.input_ids.dims();
        let EncoderConfig { embed_dim: width, num_heads: heads, .. } = self.config;
        let attention = SelfAttention {
            batch: texts,
            heads,
            key_value_heads: heads,
            scale: 1.0 / ((width / heads) as f64).sqrt(),
            soft_cap: None,
            upcast: false,
            mask: AttentionMask::Lengths(batch.lengths.clone().into()),
        };
        let mut x = self.embed(batch.input_ids.clone());
        for layer in &self.layers {
            x = layer.forward(x, &attention);
        }
        let weights = batch.weights.clone().cast(x.dtype());
        // The mean over the tokens of each text is computed as a product of one row of weights with
        // a matrix. Padding has weight 0, so the mean of a text does not depend on the other texts
        // in the batch.
        let means = weights.swap_dims(1, 2).matmul(x.reshape([texts, length, width]));
        let inner = relu(project(&self.classifier1, means.reshape([texts, width])));
        project(&self.classifier2, dropout(&self.dropout, inner))
    }
}

impl<B: FusedOps> Encoder<B> {
    /// Returns the token embeddings plus positions, `[texts * length, width]`.
    fn embed(&self, input_ids: Tensor<B, 2, Int>) -> Tensor<B, 2> {
        let [texts, length] = input_ids.dims();
        let width = self.config.embed_dim;
        let tokens = self.embedding.forward(input_ids).reshape([texts, length * width]);
        let positions = sinusoids::<B>(length, width, &tokens.device()).cast(tokens.dtype());
        // With one row per text, the position encodings are the same row for all texts, so they are
        // added by broadcasting.
        let embedded = tokens + positions.reshape([1, length * width]);
        dropout(&self.dropout, embedded.reshape([texts * length, width]))
    }
}
