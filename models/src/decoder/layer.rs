//! One layer.
//!
//! Main type: [`Layer`]. Only the inputs and, in some models, the outputs of attention and
//! feed-forward network are normalized, not the residual stream itself. Gradients therefore reach
//! the embeddings through plain sums.

use burn::module::Module;
use burn::nn::{Dropout, DropoutConfig};
use burn::tensor::{Tensor, backend::Backend};
use deepburn_ops::{FusedOps, dropout};

use super::attention::Attention;
use super::feed_forward::FeedForward;
use super::parts::{LayerPart, NormPart};
use super::pass::{DecoderPass, KeyValues};
use crate::norm::Normalization;
use crate::weights::WeightInit;

/// Self-attention followed by a feed-forward network. Each takes the normalized residual stream as
/// input and adds its output to the stream.
#[derive(Module, Debug)]
pub(crate) struct Layer<B: Backend> {
    /// Normalizes the input of the attention.
    attention_norm: Normalization<B>,
    /// Causal self-attention.
    attention: Attention<B>,
    /// Normalizes the output of the attention.
    attention_output_norm: Option<Normalization<B>>,
    /// Normalizes the input of the feed-forward network.
    feed_forward_norm: Normalization<B>,
    /// The feed-forward network.
    feed_forward: FeedForward<B>,
    /// Normalizes the output of the feed-forward network.
    feed_forward_output_norm: Option<Normalization<B>>,
    /// Dropout for the outputs.
    dropout: Dropout,
}

impl<B: Backend> Layer<B> {
    /// Returns the layer at module path `path`. `rotation` is the index of its rotation in a pass.
    pub(crate) fn new(
        init: &WeightInit<B>,
        path: &str,
        part: &LayerPart,
        rotation: Option<usize>,
    ) -> Self {
        let at = |leaf: &str| format!("{path}.{leaf}");
        let norm = |leaf: &str, part: &NormPart| Normalization::new(init, &at(leaf), part.kind);
        let optional = |leaf: &str, part: &Option<NormPart>| part.map(|part| norm(leaf, &part));
        Self {
            attention_norm: norm("attention_norm", &part.attention_norm),
            attention: Attention::new(init, &at("attention"), &part.attention, rotation),
            attention_output_norm: optional("attention_output_norm", &part.attention_output_norm),
            feed_forward_norm: norm("feed_forward_norm", &part.feed_forward_norm),
            feed_forward: FeedForward::new(init, &at("feed_forward"), &part.feed_forward),
            feed_forward_output_norm: optional(
                "feed_forward_output_norm",
                &part.feed_forward_output_norm,
            ),
            dropout: DropoutConfig::new(part.dropout).init(),
        }
    }
}

impl<B: FusedOps> Layer<B> {
    /// Computes the output for the rows `x`. `x` and the result: `[batch * queries, width]`.
    ///
    /// `cache` holds the keys and values of earlier positions in this layer. It is only used for
    /// generation.
    pub(crate) fn forward(
        &self,
        x: Tensor<B, 2>,
        pass: &DecoderPass<B>,
        cache: Option<&mut Option<KeyValues<B>>>,
    ) -> Tensor<B, 2> {
        // Backends add in place if the left operand has no other reference. The branch is the left
        // operand, because autodiff still needs the residual stream.
        let attended = self.attention.forward(self.attention_norm.forward(x.clone()), pass, cache);
        let x = self.output(attended, self.attention_output_norm.as_ref()) + x;
        let fed = self.feed_forward.forward(self.feed_forward_norm.forward(x.clone()));
        self.output(fed, self.feed_forward_output_norm.as_ref()) + x
    }

    /// Normalizes an output and applies dropout.
    fn output(&self, x: Tensor<B, 2>, norm: Option<&Normalization<B>>) -> Tensor<B, 2> {
        let x = match norm {
            Some(norm) => norm.forward(x),
            None => x,
        };
        dropout(&self.dropout, x)
    }
}
