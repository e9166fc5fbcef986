//! Multi-head self-attention, causal or over padded sequences.
//!
//! Main trait: [`AttentionOps`]. Queries, keys and values come as one matrix, as a projection makes
//! them, and so does their gradient. Scores exist for a block of query rows at a time; backward makes
//! them again from the logarithm of each row's sum (Dao et al. 2022).

use std::sync::Arc;

use burn::tensor::{Bool, Distribution, Tensor};
use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::base::Checkpointer;
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn_backend::tensor::{BoolTensor, FloatTensor};
use burn_backend::{Backend, BackendTypes};

use crate::portable;

/// Query rows whose scores exist at the same time.
pub(crate) const QUERY_BLOCK: usize = 128;

/// Which keys a query sees.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reach {
    /// Those up to its own position.
    Causal,
    /// The first ones of its sequence, as many as this says for each sequence, at least one; those
    /// after them are padding.
    Lengths(Arc<[usize]>),
}

impl Reach {
    /// Keys that query `query` of sequence `sequence` sees, out of `positions`.
    pub(crate) fn seen(&self, sequence: usize, query: usize, positions: usize) -> usize {
        match self {
            Self::Causal => query + 1,
            Self::Lengths(lengths) => lengths[sequence].clamp(1, positions.max(1)),
        }
    }

    /// Keys that a block of queries up to `end` has to do with, out of `positions`.
    pub(crate) fn keys(&self, end: usize, positions: usize) -> usize {
        match self {
            Self::Causal => end,
            Self::Lengths(_) => positions,
        }
    }
}

/// How to attend.
#[derive(Debug, Clone, PartialEq)]
pub struct SelfAttention {
    /// Sequences.
    pub batch: usize,
    /// Heads; each is as wide as the model divided by their number.
    pub heads: usize,
    /// Factor of the scores.
    pub scale: f64,
    /// Multiply 16-bit queries and keys in f32 also where that is slower.
    pub upcast: bool,
    /// What is seen.
    pub reach: Reach,
}

/// Attention weights that are dropped; the others are divided by the share that stays.
#[derive(Debug, Clone)]
pub struct AttentionDropout<B: Backend> {
    /// True where a weight is dropped, `[batch * heads, positions, positions]`.
    pub dropped: BoolTensor<B>,
    /// Share of the weights that is dropped, below 1.
    pub probability: f64,
}

impl<B: Backend> AttentionDropout<B> {
    /// The same for another backend with the same kind of bool tensors.
    pub fn on<Other>(self) -> AttentionDropout<Other>
    where
        Other: Backend + BackendTypes<BoolTensorPrimitive = B::BoolTensorPrimitive>,
    {
        AttentionDropout { dropped: self.dropped, probability: self.probability }
    }
}

/// Self-attention of sequences of equal length.
///
/// Softmax is in at least f32, whatever the type of the input.
pub trait AttentionOps: Backend {
    /// `projected` is `[batch * positions, 3 * width]`: queries, keys and values side by side, each
    /// head after head. The result is `[batch * positions, width]`. At least one position. This is
    /// the method that autodiff records.
    fn self_attention(
        projected: FloatTensor<Self>,
        attention: &SelfAttention,
        dropout: Option<AttentionDropout<Self>>,
    ) -> FloatTensor<Self> {
        Self::attention_forward(projected, attention, dropout).output
    }

    /// The same, with what backward needs of each row.
    fn attention_forward(
        projected: FloatTensor<Self>,
        attention: &SelfAttention,
        dropout: Option<AttentionDropout<Self>>,
    ) -> AttentionOutput<Self> {
        portable::attention::forward::<Self>(projected, attention, dropout)
    }

    /// The gradient by `projected`, given that by the result.
    fn attention_backward(
        grad: FloatTensor<Self>,
        saved: AttentionSaved<Self>,
        attention: &SelfAttention,
    ) -> FloatTensor<Self> {
        portable::attention::backward::<Self>(grad, saved, attention)
    }
}

/// Result of a forward pass.
#[derive(Debug)]
pub struct AttentionOutput<B: Backend> {
    /// `[batch * positions, width]`.
    pub output: FloatTensor<B>,
    /// Logarithm of the sum of exponentials of each row of scores, `[batch * heads, positions]`, at
    /// least f32.
    pub log_sums: FloatTensor<B>,
}

/// What backward needs.
#[derive(Debug, Clone)]
pub struct AttentionSaved<B: Backend> {
    /// The input.
    pub projected: FloatTensor<B>,
    /// As in [`AttentionOutput`].
    pub output: FloatTensor<B>,
    /// As in [`AttentionOutput`].
    pub log_sums: FloatTensor<B>,
    /// As in forward.
    pub dropout: Option<AttentionDropout<B>>,
}

#[derive(Debug)]
struct AttentionStep;

impl<B: AttentionOps> Backward<B, 1> for AttentionStep {
    type State = (AttentionSaved<B>, SelfAttention);

    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let (saved, attention) = ops.state;
        unary::<B, _>(ops.parents, ops.node, grads, |grad| {
            B::attention_backward(grad, saved, &attention)
        });
    }
}

impl<B: AttentionOps, C: CheckpointStrategy> AttentionOps for Autodiff<B, C> {
    fn self_attention(
        projected: FloatTensor<Self>,
        attention: &SelfAttention,
        dropout: Option<AttentionDropout<Self>>,
    ) -> FloatTensor<Self> {
        let dropout = dropout.map(AttentionDropout::on::<B>);
        match AttentionStep.prepare::<C>([projected.node]).compute_bound().stateful() {
            OpsKind::Tracked(step) => {
                let projected = projected.primitive;
                let AttentionOutput { output, log_sums } =
                    B::attention_forward(projected.clone(), attention, dropout.clone());
                let saved = AttentionSaved { projected, output: output.clone(), log_sums, dropout };
                step.finish((saved, attention.clone()), output)
            }
            OpsKind::UnTracked(step) => {
                step.finish(B::self_attention(projected.primitive, attention, dropout))
            }
        }
    }
}

/// Self-attention of `projected` `[batch * positions, 3 * width]`, queries, keys and values
/// side by side; the result is `[batch * positions, width]`.
///
/// Each attention weight is dropped with probability `dropout`, drawn from the backend's random
/// numbers.
pub fn self_attention<B: AttentionOps>(
    projected: Tensor<B, 2>,
    attention: &SelfAttention,
    dropout: f64,
) -> Tensor<B, 2> {
    let drawn = (dropout > 0.0).then(|| {
        let positions = projected.dims()[0] / attention.batch.max(1);
        let shape = [attention.heads, positions, positions];
        // One sequence at a time: the draws are wider than what is kept of them.
        let draw = |_| {
            Tensor::<B, 3>::random(shape, Distribution::Default, &projected.device())
                .lower_elem(dropout)
        };
        let dropped: Tensor<B, 3, Bool> = Tensor::cat((0..attention.batch).map(draw).collect(), 0);
        AttentionDropout { dropped: dropped.into_primitive(), probability: dropout }
    });
    portable::tensor(B::self_attention(portable::primitive(projected), attention, drawn))
}

/// Attention of `queries` `[batch, heads, queries, head width]`, which are the last positions of
/// `keys` and `values`; the result is `[batch * queries, width]`. For generation: plain ops, and no
/// dropout.
pub fn attention_over_cache<B: Backend>(
    queries: Tensor<B, 4>,
    keys: Tensor<B, 4>,
    values: Tensor<B, 4>,
    attention: &SelfAttention,
) -> Tensor<B, 2> {
    portable::attention::over_cache(queries, keys, values, attention)
}
