//! Activations of the models that `finetune` trains, for memory forecasts.
//!
//! Each function repeats the forward pass of a model of `deepburn-models` op by op, with sizes in place of tensors. The
//! resulting graph knows what every op saves for backward, so that the peak of a pass can be found for any activation
//! checkpointing. A test compares it with the ledger of a real training step, so that a change of a
//! model without one here fails.

mod graph_builder;
#[cfg(test)]
mod tests;

use deepburn::ops::logits_chunk_rows;
use deepburn::zero::estimate::{ActivationGraph, ActivationOp, BackwardOp, KeptTensor};
use deepburn_config::{Precision, PrecisionPlan};
use deepburn_models::gpt2::{Activation, ClassifierConfig, Gpt2Config};
use deepburn_models::imdb::EncoderConfig;

use graph_builder::{GraphBuilder, Sized};

/// Bytes of an element of an integer tensor.
const INT_BYTES: u64 = 4;

/// The shape of the largest micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BatchShape {
    /// Sequences.
    pub(crate) sequences: u64,
    /// Tokens of each sequence, padding included.
    pub(crate) length: u64,
}

impl BatchShape {
    /// Returns the number of tokens, which is the number of rows of most activations.
    fn rows(self) -> u64 {
        self.sequences.saturating_mul(self.length)
    }
}

/// Returns the forward pass of a GPT-2 language model.
pub(crate) fn of_language_model(
    config: &Gpt2Config,
    batch: BatchShape,
    precision: &PrecisionPlan,
) -> ActivationGraph {
    let mut builder = GraphBuilder::new(precision);
    // Token ids, the positions that predict a token, and their targets.
    let targets = batch.sequences.saturating_mul(batch.length.saturating_sub(1)).max(1);
    builder.graph.hold(INT_BYTES * (batch.rows() + 2 * targets));
    let hidden = hidden(&mut builder, config, batch);
    let width = config.n_embd as u64;
    let chosen = builder.select(hidden, targets * width);
    builder.graph.end_blocks();
    let normed = builder.layer_norm(chosen, width);
    builder.loss_head(normed, [width, config.vocab_size as u64], config.tie_word_embeddings);
    builder.graph
}

/// Returns the forward pass of a GPT-2 classifier.
pub(crate) fn of_gpt2_classifier(
    config: &ClassifierConfig,
    batch: BatchShape,
    precision: &PrecisionPlan,
) -> ActivationGraph {
    let mut builder = GraphBuilder::new(precision);
    builder.graph.hold(text_batch_bytes(batch));
    let hidden = hidden(&mut builder, &config.body, batch);
    let width = config.body.n_embd as u64;
    let last = builder.select(hidden, batch.sequences * width);
    builder.graph.end_blocks();
    let normed = builder.layer_norm(last, width);
    let logits = builder.linear(normed, [width, config.num_classes as u64], false);
    builder.logits_loss(logits);
    builder.graph
}

/// Returns the forward pass of an encoder with its classifier.
pub(crate) fn of_encoder(
    config: &EncoderConfig,
    batch: BatchShape,
    precision: &PrecisionPlan,
) -> ActivationGraph {
    let [width, inner, heads, classes] =
        [config.embed_dim, config.hidden_dim, config.num_heads, config.num_classes]
            .map(|size| size as u64);
    let mut builder = GraphBuilder::new(precision);
    builder.graph.hold(text_batch_bytes(batch));
    let (rows, dropout) = (batch.rows(), config.dropout);
    let mut x = builder.lookup(rows * width, config.vocab_size as u64 * width);
    x = builder.dropout(x, dropout);
    for _ in 0..config.num_layers {
        builder.graph.start_block();
        let projected = builder.linear(x, [width, 3 * width], true);
        let attended = builder.attention(projected, rows * width, rows * heads, batch.length);
        let attended = builder.linear(attended, [width, width], true);
        let attended = builder.dropout(attended, dropout);
        let sum = builder.add(attended, x);
        let normed = builder.layer_norm(sum, width);
        let fed = builder.linear(normed, [width, inner], true);
        let fed = builder.keeping(fed, KeptTensor::Input(0));
        let fed = builder.dropout(fed, dropout);
        let fed = builder.linear(fed, [inner, width], true);
        let fed = builder.dropout(fed, dropout);
        let sum = builder.add(fed, normed);
        x = builder.layer_norm(sum, width);
    }
    let means = builder.weighted_means(x, rows, batch.sequences * width, batch.length);
    builder.graph.end_blocks();
    let fed = builder.linear(means, [width, inner], true);
    let fed = builder.keeping(fed, KeptTensor::Input(0));
    let fed = builder.dropout(fed, dropout);
    let logits = builder.linear(fed, [inner, classes], true);
    builder.logits_loss(logits);
    builder.graph
}

/// Returns the bytes of the logits that the loss of a language model computes at a time.
pub(crate) fn logits_bytes(config: &Gpt2Config, batch: BatchShape) -> u64 {
    let tokens = batch.sequences.saturating_mul(batch.length.saturating_sub(1)).max(1);
    let rows = logits_chunk_rows(tokens as usize, config.vocab_size) as u64;
    rows.saturating_mul(4 * config.vocab_size.max(1) as u64)
}

/// Returns the bytes of a text batch: token ids, the weight of each token in the mean of its text, and labels.
fn text_batch_bytes(batch: BatchShape) -> u64 {
    INT_BYTES * (batch.rows() + batch.sequences) + 4 * batch.rows()
}

/// Appends all blocks of a GPT-2 and returns the residual stream after them.
fn hidden(builder: &mut GraphBuilder, config: &Gpt2Config, batch: BatchShape) -> Sized {
    let [width, inner, heads] =
        [config.n_embd, config.inner_width(), config.n_head].map(|size| size as u64);
    let rows = batch.rows();
    let tokens = builder.lookup(rows * width, config.vocab_size as u64 * width);
    let mut x = builder.add_positions(tokens, config.n_positions as u64 * width);
    x = builder.dropout(x, config.embd_pdrop);
    for _ in 0..config.n_layer {
        builder.graph.start_block();
        let normed = builder.layer_norm(x, width);
        let projected = builder.linear(normed, [width, 3 * width], true);
        let attended = builder.attention(projected, rows * width, rows * heads, batch.length);
        let attended = builder.linear(attended, [width, width], true);
        let attended = builder.dropout(attended, config.resid_pdrop);
        x = builder.add(attended, x);
        let normed = builder.layer_norm(x, width);
        let fed = builder.linear(normed, [width, inner], true);
        let fed = activation(builder, config.activation_function, fed);
        let fed = builder.linear(fed, [inner, width], true);
        let fed = builder.dropout(fed, config.resid_pdrop);
        x = builder.add(fed, x);
    }
    x
}

/// Appends the activation function of a GPT-2 block.
fn activation(builder: &mut GraphBuilder, function: Activation, x: Sized) -> Sized {
    match function {
        Activation::Tanh => builder.keeping(x, KeptTensor::Output(0)),
        Activation::Silu => {
            let gate = builder.keeping(x, KeptTensor::Output(0));
            let [product] = builder.graph.push(&ActivationOp {
                inputs: &[x.id, gate.id],
                outputs: &[x.bytes()],
                saved: &[KeptTensor::Input(0), KeptTensor::Input(1)],
                backward: BackwardOp::Unary,
                ..ActivationOp::NONE
            });
            Sized { id: product, ..x }
        }
        _ => builder.keeping(x, KeptTensor::Input(0)),
    }
}

/// Returns the bytes of an element.
fn bytes_of(precision: Precision) -> u64 {
    precision.bytes() as u64
}
