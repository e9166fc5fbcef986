//! A description of GPT-2's training pass, used to predict memory and step times.
//!
//! The description lists the ops of [`Gpt2::forward`](super::Gpt2::forward) and the loss, in the same order. Each fused
//! op of `deepburn-ops` counts as one op, because it saves tensors for backward once. Sizes are numbers of elements,
//! and `rows` is sequences × length.
//!
//! When the forward pass changes, this description must be changed in the same way. A test in the programs compares it
//! with the memory ledger of a real training step.

use super::activation::Activation;
use super::config::Gpt2Config;
use crate::forward_pass::{BatchShape, ForwardPass, PassTensor};

/// Describes the training pass of a language model.
///
/// As in the model, the final norm and the loss are only computed for rows with a target.
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
/// The final norm is not included, because the language-model head and the classification head apply it to different
/// rows.
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
