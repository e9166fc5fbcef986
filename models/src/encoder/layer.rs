//! One encoder layer, as `torch.nn.TransformerEncoderLayer` computes it by default.
//!
//! Main type: [`EncoderLayer`]. With `x` as its input:
//!
//! ```text
//! y = norm1(x + dropout(out_proj(attention(in_proj(x)))))
//! z = norm2(y + dropout(linear2(dropout(relu(linear1(y))))))
//! ```

use burn::module::Module;
use burn::nn::{Dropout, DropoutConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Tensor, backend::Backend};
use deepburn_ops::{FusedOps, SelfAttention, dropout, self_attention};

use super::config::EncoderConfig;
use crate::norm::{NormKind, Normalization};
use crate::projection::{Linear, project, projection};
use crate::weights::WeightInit;

/// Self-attention over the tokens of a text, followed by a feed-forward network. The output of each
/// is added to the residual stream, which is then normalized (post-norm, unlike GPT-2).
#[derive(Module, Debug)]
pub(crate) struct EncoderLayer<B: Backend> {
    /// Projects the input to queries, keys and values in one matrix product.
    in_proj: Linear<B>,
    /// Projects the concatenated heads to the residual stream.
    out_proj: Linear<B>,
    /// Projects to the hidden width of the feed-forward network.
    linear1: Linear<B>,
    /// Projects back to the residual stream.
    linear2: Linear<B>,
    /// Normalizes the residual stream after the attention output is added.
    norm1: Normalization<B>,
    /// Normalizes the residual stream after the feed-forward output is added.
    norm2: Normalization<B>,
    /// Dropout for the attention weights, both sublayer outputs and the hidden activations.
    dropout: Dropout,
}

impl<B: Backend> EncoderLayer<B> {
    /// Returns layer number `layer`, counted from 0.
    pub(crate) fn new(init: &WeightInit<B>, layer: usize, config: &EncoderConfig) -> Self {
        let path = format!("layers.{layer}");
        let linear = |leaf: &str| projection(init, &format!("{path}.{leaf}"));
        let kind = NormKind::Layer { epsilon: config.layer_norm_epsilon };
        let norm = |leaf: &str| Normalization::new(init, &format!("{path}.{leaf}"), kind);
        Self {
            in_proj: linear("in_proj"),
            out_proj: linear("out_proj"),
            linear1: linear("linear1"),
            linear2: linear("linear2"),
            norm1: norm("norm1"),
            norm2: norm("norm2"),
            dropout: DropoutConfig::new(config.dropout).init(),
        }
    }

    /// Computes the layer. `x` and the result: `[texts * length, width]`.
    pub(crate) fn forward(&self, x: Tensor<B, 2>, attention: &SelfAttention) -> Tensor<B, 2>
    where
        B: FusedOps,
    {
        // Dropout of the attention weights is part of the fused op, so Burn's `Dropout` module is
        // not used. As in that module, dropout is disabled without autodiff.
        let probability = if B::ad_enabled(&x.device()) { self.dropout.prob } else { 0.0 };
        let attended = self_attention(project(&self.in_proj, x.clone()), attention, probability);
        let attended = dropout(&self.dropout, project(&self.out_proj, attended));
        let x = self.norm1.forward(attended + x);
        let inner = dropout(&self.dropout, relu(project(&self.linear1, x.clone())));
        let fed = dropout(&self.dropout, project(&self.linear2, inner));
        self.norm2.forward(fed + x)
    }
}
