//! The ops of a training pass of GPT-2, for predictions of memory and time.
//!
//! They repeat [`Gpt2::forward`](super::Gpt2::forward) and the loss, in the same order. The fused ops of
//! `deepburn-ops` are one op each, as they save tensors for backward once. Sizes are numbers of elements;
//! `rows` is sequences × length.
//!
//! A change of the forward pass needs the same change here. A test of the programs compares the description
//! with the ledger of a training step.

use super::activation::Activation;
use super::config::Gpt2Config;
use crate::forward_pass::{BatchShape, ForwardPass, PassTensor};

/// Describes the pass of a language model.
///
/// Only rows that predict something reach the final norm and the loss, as in the model.
pub(crate) fn describe_head(config: &Gpt2Config, pass: &mut dyn ForwardPass, batch: BatchShape) {
    let width = config.n_embd as u64;
    pass.hold(batch.causal_bytes());
    let hidden = describe_body(config, pass, batch);
    let chosen = pass.select(hidden, batch.targets() * width);
    pass.end_blocks();
    let normed = pass.layer_norm(chosen, width);
    pass.loss_head(normed, [width, config.vocab_size as u64], config.tie_word_embeddings);
}

/// Describes the embeddings and all blocks. Returns the residual stream.
///
/// The final norm is not included: the two heads apply it to different rows.
pub(crate) fn describe_body(
    config: &Gpt2Config,
    pass: &mut dyn ForwardPass,
    batch: BatchShape,
) -> PassTensor {
    let [width, inner, heads] =
        [config.n_embd, config.inner_width(), config.n_head].map(|size| size as u64);
    let rows = batch.rows();
    let tokens = pass.lookup(rows * width, config.vocab_size as u64 * width);
    let mut x = pass.add_positions(tokens, config.n_positions as u64 * width);
    x = pass.dropout(x, config.embd_pdrop);
    for _ in 0..config.n_layer {
        pass.start_block();
        let normed = pass.layer_norm(x, width);
        let projected = pass.linear(normed, [width, 3 * width], true);
        let attended = pass.attention(projected, rows * width, rows * heads, batch.length);
        let attended = pass.linear(attended, [width, width], true);
        let attended = pass.dropout(attended, config.resid_pdrop);
        x = pass.add(attended, x);
        let normed = pass.layer_norm(x, width);
        let fed = pass.linear(normed, [width, inner], true);
        let fed = match config.activation_function {
            Activation::Tanh => pass.elementwise_of_output(fed),
            Activation::Silu => pass.silu(fed),
            _ => pass.elementwise(fed),
        };
        let fed = pass.linear(fed, [inner, width], true);
        let fed = pass.dropout(fed, config.resid_pdrop);
        x = pass.add(fed, x);
    }
    x
}
