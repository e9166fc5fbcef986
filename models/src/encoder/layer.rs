//! One encoder layer, as `torch.nn.TransformerEncoderLayer` computes it by default.
//!
//! Main type: [`EncoderLayer`]. With `x` as its input:
//!
//! ```text
//! y = norm1(x + dropout(out_proj(attention(in_proj(x)))))
//! z = norm2(y + dropout(linear2(dropout(relu(linear1(y))))))
//! ```

use burn::module::Module;
use burn::nn::{Dropout, DropoutConfig, Linear};
use burn::tensor::activation::relu;
use burn::tensor::{Tensor, backend::Backend};
use deepburn_ops::{FusedOps, SelfAttention, self_attention};

use super::config::EncoderConfig;
use super::parameters::default_std;
use crate::norm::LayerNorm;
use crate::projection::{conv1d, project};
use crate::weights::WeightInit;

/// Attention over the tokens of a text and a feed-forward half. Each is added to the residual
/// stream, which is then normalised (post-norm, unlike GPT-2).
#[derive(Module, Debug)]
pub(crate) struct EncoderLayer<B: Backend> {
    /// Queries, keys and values as one product.
    in_proj: Linear<B>,
    /// Merged heads to the residual stream.
    out_proj: Linear<B>,
    /// To the inner width.
    linear1: Linear<B>,
    /// Back to the stream.
    linear2: Linear<B>,
    /// Normalises the sum with the attention.
    norm1: LayerNorm<B>,
    /// Normalises the sum with the feed-forward half.
    norm2: LayerNorm<B>,
    /// Of the attention weights, of both outputs and of the inner values.
    dropout: Dropout,
}

impl<B: Backend> EncoderLayer<B> {
    /// Makes layer number `layer`, from 0.
    pub(crate) fn new(init: &WeightInit<B>, layer: usize, config: &EncoderConfig) -> Self {
        let (width, inner) = (config.embed_dim, config.hidden_dim);
        let path = format!("layers.{layer}");
        // Glorot and Bengio 2010. torch initialises the three projections as one matrix of `3 * width` outputs, so the
        // fans are `width` and `3 * width`.
        let in_std = (2.0 / (4 * width) as f64).sqrt();
        let linear = |leaf: &str, shape: [usize; 2], std| {
            conv1d(init, &format!("{path}.{leaf}"), shape, std)
        };
        let norm = |leaf: &str| {
            LayerNorm::new(init, &format!("{path}.{leaf}"), width, config.layer_norm_epsilon)
        };
        Self {
            in_proj: linear("in_proj", [width, 3 * width], in_std),
            out_proj: linear("out_proj", [width, width], default_std(width)),
            linear1: linear("linear1", [width, inner], default_std(width)),
            linear2: linear("linear2", [inner, width], default_std(inner)),
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
        // Attention has its dropout inside the fused op, so the rule of Burn's module is repeated here: none without
        // autodiff.
        let dropout = if B::ad_enabled(&x.device()) { self.dropout.prob } else { 0.0 };
        let attended = self_attention(project(&self.in_proj, x.clone()), attention, dropout);
        let attended = self.dropout.forward(project(&self.out_proj, attended));
        let x = self.norm1.forward(attended + x);
        let inner = self.dropout.forward(relu(project(&self.linear1, x.clone())));
        let fed = self.dropout.forward(project(&self.linear2, inner));
        self.norm2.forward(fed + x)
    }
}
