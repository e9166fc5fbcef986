//! One transformer block.
//!
//! Main type: [`Block`]. GPT-2 uses pre-norm: only the inputs of the attention and of the MLP are normalised, not the
//! residual stream itself. Gradients therefore reach the embeddings through plain sums.

use burn::module::Module;
use burn::tensor::{Tensor, backend::Backend};
use deepburn_ops::FusedOps;

use super::attention::{Attention, KeyValues, SeqDims};
use super::config::Gpt2Config;
use super::mlp::Mlp;
use crate::norm::LayerNorm;
use crate::weights::WeightInit;

/// A transformer block: self-attention followed by an MLP. Each takes the normalised residual stream as input and adds
/// its output to the stream.
#[derive(Module, Debug)]
pub(crate) struct Block<B: Backend> {
    /// Normalises the input of the attention.
    ln_1: LayerNorm<B>,
    /// Causal self-attention: each position attends to itself and to earlier positions.
    attn: Attention<B>,
    /// Normalises the input of the MLP.
    ln_2: LayerNorm<B>,
    /// The MLP, which is applied to each position separately.
    mlp: Mlp<B>,
}

impl<B: Backend> Block<B> {
    /// Returns block number `block`, counted from 0.
    pub(crate) fn new(init: &WeightInit<B>, block: usize, config: &Gpt2Config) -> Self {
        let epsilon = config.layer_norm_epsilon;
        let path = format!("h.{block}");
        Self {
            ln_1: LayerNorm::new(init, &format!("{path}.ln_1"), epsilon),
            attn: Attention::new(init, &format!("{path}.attn"), block, config),
            ln_2: LayerNorm::new(init, &format!("{path}.ln_2"), epsilon),
            mlp: Mlp::new(init, &format!("{path}.mlp"), config),
        }
    }

    /// Computes the output for the rows `x`. `x` and the result: `[batch * queries, width]`.
    ///
    /// `cache` holds the keys and values of earlier positions in this block. It is only used for generation.
    pub(crate) fn forward(
        &self,
        x: Tensor<B, 2>,
        dims: SeqDims,
        cache: Option<&mut Option<KeyValues<B>>>,
    ) -> Tensor<B, 2>
    where
        B: FusedOps,
    {
        // Backends add in place if the left operand has no other reference. The branch is the left operand, because
        // autodiff still needs the residual stream.
        let x = self.attn.forward(self.ln_1.forward(x.clone()), dims, cache) + x;
        self.mlp.forward(self.ln_2.forward(x.clone())) + x
    }
}
