//! One transformer block.
//!
//! Main type: [`Block`]. GPT-2 is pre-norm: the residual stream itself is never normalised between blocks, only what
//! the attention and the MLP read of it. Gradients therefore reach the embeddings through plain sums.

use burn::module::Module;
use burn::tensor::{Tensor, backend::Backend};
use deepburn_ops::FusedOps;

use super::attention::{Attention, KeyValues, SeqDims};
use super::config::Gpt2Config;
use super::mlp::Mlp;
use crate::norm::LayerNorm;
use crate::weights::WeightInit;

/// Attention and an MLP. Each reads the normalised residual stream and adds its output to the stream.
#[derive(Module, Debug)]
pub(crate) struct Block<B: Backend> {
    /// Normalises what the attention reads.
    ln_1: LayerNorm<B>,
    /// Lets each position read itself and those before it.
    attn: Attention<B>,
    /// Normalises what the MLP reads.
    ln_2: LayerNorm<B>,
    /// Transforms each position separately.
    mlp: Mlp<B>,
}

impl<B: Backend> Block<B> {
    /// Makes block number `block`, from 0.
    pub(crate) fn new(init: &WeightInit<B>, block: usize, config: &Gpt2Config) -> Self {
        let (width, epsilon) = (config.n_embd, config.layer_norm_epsilon);
        let path = format!("h.{block}");
        Self {
            ln_1: LayerNorm::new(init, &format!("{path}.ln_1"), width, epsilon),
            attn: Attention::new(init, &format!("{path}.attn"), block, config),
            ln_2: LayerNorm::new(init, &format!("{path}.ln_2"), width, epsilon),
            mlp: Mlp::new(init, &format!("{path}.mlp"), config),
        }
    }

    /// Computes the output for the rows `x`. `x` and the result: `[batch * queries, width]`.
    ///
    /// `cache` has the keys and values of earlier positions of this block, for generation.
    pub(crate) fn forward(
        &self,
        x: Tensor<B, 2>,
        dims: SeqDims,
        cache: Option<&mut Option<KeyValues<B>>>,
    ) -> Tensor<B, 2>
    where
        B: FusedOps,
    {
        // Backends add in place where they can. The branch is the left operand because nothing else holds it, while the
        // stream is still needed by autodiff.
        let x = self.attn.forward(self.ln_1.forward(x.clone()), dims, cache) + x;
        self.mlp.forward(self.ln_2.forward(x.clone())) + x
    }
}
