//! The ops of a training pass, for programs that predict memory and time.
//!
//! Main trait: [`ForwardPass`]. A model repeats its forward pass on it
//! ([`Architecture::describe`](crate::Architecture::describe)), op by op, with sizes in place of tensors. A change of a
//! model's `forward` needs the same change there; a test of the programs compares both with a training step.

use deepburn_ops::logits_chunk_rows;

/// Bytes of an element of an integer tensor.
const INT_BYTES: u64 = 4;

/// The most that a micro-batch holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchShape {
    /// Sequences.
    pub sequences: u64,
    /// Tokens of each, padding included.
    pub length: u64,
}

impl BatchShape {
    /// Returns the number of tokens of all sequences.
    #[must_use]
    pub fn rows(self) -> u64 {
        self.sequences.saturating_mul(self.length)
    }

    /// Positions that predict the next token, at least 1.
    #[must_use]
    pub fn targets(self) -> u64 {
        self.sequences.saturating_mul(self.length.saturating_sub(1)).max(1)
    }

    /// Returns the bytes of a batch of a language model: token ids, positions that predict something, and their
    /// targets.
    pub(crate) fn causal_bytes(self) -> u64 {
        INT_BYTES * (self.rows() + 2 * self.targets())
    }

    /// Returns the bytes of a batch of texts: token ids, the weight of each in its text's mean, and labels.
    pub(crate) fn text_bytes(self) -> u64 {
        INT_BYTES * (self.rows() + self.sequences) + 4 * self.rows()
    }

    /// Returns the bytes of the f32 logits that the loss of a language model computes at a time.
    pub(crate) fn logits_bytes(self, vocab_size: usize) -> u64 {
        let rows = logits_chunk_rows(self.targets() as usize, vocab_size) as u64;
        rows.saturating_mul(4 * vocab_size.max(1) as u64)
    }
}

/// A tensor of a described pass, by its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PassTensor(pub usize);

/// Takes the description of a training pass. Sizes are numbers of elements.
pub trait ForwardPass {
    /// Counts bytes that live as long as the pass.
    fn hold(&mut self, bytes: u64);

    /// Begins a block, the unit of activation checkpointing.
    fn start_block(&mut self);

    /// Ends the last block.
    fn end_blocks(&mut self);

    /// Rows of an embedding of `table` elements, `numel` in all.
    fn lookup(&mut self, numel: u64, table: u64) -> PassTensor;

    /// Appends the sum with rows of an embedding of `table` elements, the same for each sequence.
    fn add_positions(&mut self, x: PassTensor, table: u64) -> PassTensor;

    /// Appends layer normalisation over rows of `width` elements.
    fn layer_norm(&mut self, x: PassTensor, width: u64) -> PassTensor;

    /// Appends a linear layer of `[in, out]` features.
    fn linear(&mut self, x: PassTensor, features: [u64; 2], has_bias: bool) -> PassTensor;

    /// Appends attention over sequences of `length` tokens, from projected queries, keys and values. The output has
    /// `numel` elements; `queries` counts the queries of all heads.
    fn attention(&mut self, x: PassTensor, numel: u64, queries: u64, length: u64) -> PassTensor;

    /// Appends dropout.
    fn dropout(&mut self, x: PassTensor, probability: f64) -> PassTensor;

    /// Appends the sum of a branch and the residual stream.
    fn add(&mut self, branch: PassTensor, x: PassTensor) -> PassTensor;

    /// Appends a selection of the rows of `x`, `numel` elements in all.
    fn select(&mut self, x: PassTensor, numel: u64) -> PassTensor;

    /// Appends an element-wise op that keeps its input for backward, such as ReLU.
    fn elementwise(&mut self, x: PassTensor) -> PassTensor;

    /// Appends an element-wise op that keeps its output for backward, such as tanh.
    fn elementwise_of_output(&mut self, x: PassTensor) -> PassTensor;

    /// Appends `x * sigmoid(x)`.
    fn silu(&mut self, x: PassTensor) -> PassTensor;

    /// Appends the mean over the tokens of each sequence, of `length` tokens in `rows` rows, as a product with
    /// weights. The output has `numel` elements.
    fn weighted_means(&mut self, x: PassTensor, rows: u64, numel: u64, length: u64) -> PassTensor;

    /// Appends the output layer and the loss of a language model, from `[width, vocab_size]` features.
    fn loss_head(&mut self, x: PassTensor, features: [u64; 2], is_tied: bool);

    /// Appends the loss of a classifier, of its logits.
    fn logits_loss(&mut self, logits: PassTensor);
}
