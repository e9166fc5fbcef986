//! A description of the ops of a training pass, used to predict memory and step times.
//!
//! Main trait: [`ForwardPass`]. A model's [`Architecture::describe`](crate::Architecture::describe) lists the ops of
//! its forward pass through this trait, with sizes in place of tensors. When a model's `forward` changes, `describe`
//! must be changed in the same way. A test in the programs compares the description with a real training step.

use deepburn_ops::logits_chunk_rows;

use crate::hf::ProblemType;

/// The size of an integer tensor element in bytes.
const INT_BYTES: u64 = 4;

/// The maximum size of a micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchShape {
    /// The number of sequences.
    pub sequences: u64,
    /// The number of tokens per sequence, including padding.
    pub length: u64,
}

impl BatchShape {
    /// Returns the total number of tokens, including padding.
    #[must_use]
    pub fn rows(self) -> u64 {
        self.sequences.saturating_mul(self.length)
    }

    /// Returns the number of positions that predict a next token, at least 1.
    #[must_use]
    pub fn targets(self) -> u64 {
        self.sequences.saturating_mul(self.length.saturating_sub(1)).max(1)
    }

    /// Returns the size of a language-model batch in bytes: token ids, the positions with a target, and the targets.
    pub(crate) fn causal_bytes(self) -> u64 {
        INT_BYTES * (self.rows() + 2 * self.targets())
    }

    /// Returns the size of a text batch in bytes: token ids, labels of 4 bytes for `outputs` outputs of the model, and
    /// one f32 mean-pooling weight per token.
    pub(crate) fn text_bytes(self, problem_type: ProblemType, outputs: u64) -> u64 {
        let each = match problem_type {
            ProblemType::SingleLabelClassification => 1,
            ProblemType::MultiLabelClassification => outputs,
            // One more number says whether the row is a text.
            ProblemType::Regression => outputs.saturating_add(1),
        };
        let labels = self.sequences.saturating_mul(each);
        INT_BYTES.saturating_mul(self.rows().saturating_add(labels)) + 4 * self.rows()
    }

    /// Returns the size in bytes of one chunk of f32 logits. The language-model loss computes the logits in such
    /// chunks.
    pub(crate) fn logits_bytes(self, vocab_size: usize) -> u64 {
        let rows = logits_chunk_rows(self.targets() as usize, vocab_size) as u64;
        rows.saturating_mul(4 * vocab_size.max(1) as u64)
    }
}

/// The index of a tensor in the described pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PassTensor(pub usize);

/// Records the ops of a training pass. Sizes are numbers of elements.
pub trait ForwardPass {
    /// Adds `bytes` that stay allocated during the whole pass.
    fn hold(&mut self, bytes: u64);

    /// Begins a block, the unit of activation checkpointing.
    fn start_block(&mut self);

    /// Ends the last block.
    fn end_blocks(&mut self);

    /// Appends an embedding lookup with an output of `numel` elements, from a table of `table` elements.
    fn lookup(&mut self, numel: u64, table: u64) -> PassTensor;

    /// Appends the addition of position embeddings from a table of `table` elements. All sequences use the same rows.
    fn add_positions(&mut self, x: PassTensor, table: u64) -> PassTensor;

    /// Appends layer normalisation over rows of `width` elements.
    fn layer_norm(&mut self, x: PassTensor, width: u64) -> PassTensor;

    /// Appends a linear layer of `[in, out]` features.
    fn linear(&mut self, x: PassTensor, features: [u64; 2], has_bias: bool) -> PassTensor;

    /// Appends attention over sequences of `length` tokens. `x` contains the projected queries, keys and values. The
    /// output has `numel` elements, and `queries` is the number of queries over all heads.
    fn attention(&mut self, x: PassTensor, numel: u64, queries: u64, length: u64) -> PassTensor;

    /// Appends dropout.
    fn dropout(&mut self, x: PassTensor, probability: f64) -> PassTensor;

    /// Appends the sum of a branch and the residual stream.
    fn add(&mut self, branch: PassTensor, x: PassTensor) -> PassTensor;

    /// Appends a selection of rows of `x` with `numel` elements in total.
    fn select(&mut self, x: PassTensor, numel: u64) -> PassTensor;

    /// Appends an element-wise op that keeps its input for backward, such as ReLU.
    fn elementwise(&mut self, x: PassTensor) -> PassTensor;

    /// Appends an element-wise op that keeps its output for backward, such as tanh.
    fn elementwise_of_output(&mut self, x: PassTensor) -> PassTensor;

    /// Appends `x * sigmoid(x)`.
    fn silu(&mut self, x: PassTensor) -> PassTensor;

    /// Appends the mean over the tokens of each sequence, computed as a matrix product with weights. The input has
    /// `rows` rows in sequences of `length` tokens; the output has `numel` elements.
    fn weighted_means(&mut self, x: PassTensor, rows: u64, numel: u64, length: u64) -> PassTensor;

    /// Appends the output layer and the loss of a language model, from `[width, vocab_size]` features.
    fn loss_head(&mut self, x: PassTensor, features: [u64; 2], is_tied: bool);

    /// Appends the cross-entropy loss of a classifier's logits.
    fn logits_loss(&mut self, logits: PassTensor);
}

/// Describes the loss of a classifier with `numel` logits, as [`TextClassifier::loss`](crate::TextClassifier::loss)
/// computes it.
pub(crate) fn describe_loss(
    pass: &mut dyn ForwardPass,
    problem_type: ProblemType,
    logits: PassTensor,
    numel: u64,
) {
    let compared = match problem_type {
        ProblemType::SingleLabelClassification => logits,
        // Each logit is copied next to a 0.
        ProblemType::MultiLabelClassification => pass.select(logits, numel.saturating_mul(2)),
        // The square keeps the deviation.
        ProblemType::Regression => pass.elementwise(logits),
    };
    pass.logits_loss(compared);
}
