//! Activations of the models that `finetune` trains, as the forecast counts them.
//!
//! Main type: [`BatchShape`]. Each function here repeats the forward pass of a model of `deepburn-models`, op by op,
//! as tensors with a size and no data. A test compares the result with the ledger of a training step.

mod layers;
#[cfg(test)]
mod tests;

use deepburn::zero::estimate::{ActivationGraph, ActivationOp, BackwardOp, KeptTensor};
use deepburn_config::{Precision, PrecisionPlan};
use deepburn_models::gpt2::{Activation, ClassifierConfig, Gpt2Config};
use deepburn_models::imdb::EncoderConfig;

use layers::{Layers, Sized};

/// Bytes of an element of an integer tensor.
const INT_BYTES: u64 = 4;

/// The most that a micro-batch holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BatchShape {
    /// Sequences.
    pub(crate) sequences: u64,
    /// Tokens of each, padding included.
    pub(crate) length: u64,
}

impl BatchShape {
    fn rows(self) -> u64 {
        self.sequences.saturating_mul(self.length)
    }
}

/// The pass of a GPT-2 language model.
pub(crate) fn of_language_model(
    config: &Gpt2Config,
    batch: BatchShape,
    precision: &PrecisionPlan,
) -> ActivationGraph {
    let mut layers = Layers::new(precision);
    // Token ids, positions that predict something, and their targets.
    let targets = batch.sequences.saturating_mul(batch.length.saturating_sub(1)).max(1);
    layers.graph.hold(INT_BYTES * (batch.rows() + 2 * targets));
    let hidden = hidden(&mut layers, config, batch);
    let width = config.n_embd as u64;
    let chosen = layers.select(hidden, targets * width);
    layers.graph.end_blocks();
    let normed = layers.layer_norm(chosen, width);
    let head = config.vocab_size as u64 * width;
    layers.loss_head(normed, head, config.tie_word_embeddings);
    layers.graph
}

/// The pass of GPT-2 with a classifier.
pub(crate) fn of_gpt2_classifier(
    config: &ClassifierConfig,
    batch: BatchShape,
    precision: &PrecisionPlan,
) -> ActivationGraph {
    let mut layers = Layers::new(precision);
    layers.graph.hold(text_batch_bytes(batch));
    let hidden = hidden(&mut layers, &config.body, batch);
    let width = config.body.n_embd as u64;
    let last = layers.select(hidden, batch.sequences * width);
    layers.graph.end_blocks();
    let normed = layers.layer_norm(last, width);
    let logits = layers.linear(normed, [width, config.num_classes as u64], false);
    layers.logits_loss(logits);
    layers.graph
}

/// The pass of the encoder with its classifier.
pub(crate) fn of_encoder(
    config: &EncoderConfig,
    batch: BatchShape,
    precision: &PrecisionPlan,
) -> ActivationGraph {
    let [width, inner, heads, classes] =
        [config.embed_dim, config.hidden_dim, config.num_heads, config.num_classes]
            .map(|size| size as u64);
    let mut layers = Layers::new(precision);
    layers.graph.hold(text_batch_bytes(batch));
    let (rows, dropout) = (batch.rows(), config.dropout);
    let mut x = layers.lookup(rows * width, config.vocab_size as u64 * width);
    x = layers.dropout(x, dropout);
    for _ in 0..config.num_layers {
        layers.graph.start_block();
        let projected = layers.linear(x, [width, 3 * width], true);
        let attended = layers.attention(projected, rows * width, rows * heads);
        let attended = layers.linear(attended, [width, width], true);
        let attended = layers.dropout(attended, dropout);
        let sum = layers.add(attended, x);
        let normed = layers.layer_norm(sum, width);
        let fed = layers.linear(normed, [width, inner], true);
        let fed = layers.keeping(fed, KeptTensor::Input(0));
        let fed = layers.dropout(fed, dropout);
        let fed = layers.linear(fed, [inner, width], true);
        let fed = layers.dropout(fed, dropout);
        let sum = layers.add(fed, normed);
        x = layers.layer_norm(sum, width);
    }
    let means = layers.weighted_means(x, rows, batch.sequences * width, batch.length);
    layers.graph.end_blocks();
    let fed = layers.linear(means, [width, inner], true);
    let fed = layers.keeping(fed, KeptTensor::Input(0));
    let fed = layers.dropout(fed, dropout);
    let logits = layers.linear(fed, [inner, classes], true);
    layers.logits_loss(logits);
    layers.graph
}

/// Bytes of the logits that the loss of a language model has at a time: all of them up to 64 MiB, otherwise in
/// chunks of equal size.
pub(crate) fn logits_bytes(config: &Gpt2Config, batch: BatchShape) -> u64 {
    let row = 4 * config.vocab_size.max(1) as u64;
    let tokens = batch.sequences.saturating_mul(batch.length.saturating_sub(1)).max(1);
    let chunks = tokens.div_ceil(((64 << 20) / row).max(1));
    tokens.div_ceil(chunks).saturating_mul(row)
}

/// Token ids, the weight of each in its text's mean, and labels.
fn text_batch_bytes(batch: BatchShape) -> u64 {
    INT_BYTES * (batch.rows() + batch.sequences) + 4 * batch.rows()
}

/// The residual stream after all blocks of a GPT-2.
fn hidden(layers: &mut Layers, config: &Gpt2Config, batch: BatchShape) -> Sized {
    let [width, inner, heads] =
        [config.n_embd, config.inner_width(), config.n_head].map(|size| size as u64);
    let rows = batch.rows();
    let tokens = layers.lookup(rows * width, config.vocab_size as u64 * width);
    let mut x = layers.add_positions(tokens, config.n_positions as u64 * width);
    x = layers.dropout(x, config.embd_pdrop);
    for _ in 0..config.n_layer {
        layers.graph.start_block();
        let normed = layers.layer_norm(x, width);
        let projected = layers.linear(normed, [width, 3 * width], true);
        let attended = layers.attention(projected, rows * width, rows * heads);
        let attended = layers.linear(attended, [width, width], true);
        let attended = layers.dropout(attended, config.resid_pdrop);
        x = layers.add(attended, x);
        let normed = layers.layer_norm(x, width);
        let fed = layers.linear(normed, [width, inner], true);
        let fed = activation(layers, config.activation_function, fed);
        let fed = layers.linear(fed, [inner, width], true);
        let fed = layers.dropout(fed, config.resid_pdrop);
        x = layers.add(fed, x);
    }
    x
}

/// The activation function of a GPT-2 block.
fn activation(layers: &mut Layers, function: Activation, x: Sized) -> Sized {
    match function {
        Activation::Tanh => layers.keeping(x, KeptTensor::Output(0)),
        Activation::Silu => {
            let gate = layers.keeping(x, KeptTensor::Output(0));
            let [product] = layers.graph.push(&ActivationOp {
                inputs: &[x.id, gate.id],
                outputs: &[x.bytes()],
                saved: &[KeptTensor::Input(0), KeptTensor::Input(1)],
                backward: BackwardOp::Unary,
                ..ActivationOp::NONE
            });
            Sized { id: product, ..x }
        }
        _ => layers.keeping(x, KeptTensor::Input(0)),
    }
}

/// Bytes of an element in a type.
fn bytes_of(precision: Precision) -> u64 {
    precision.bytes() as u64
}
