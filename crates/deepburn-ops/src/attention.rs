//! Multi-head self-attention, causal or over padded sequences.
//!
//! Main trait: [`AttentionOps`]. Queries, keys and values come as one matrix, as a projection makes
//! them, and so does their gradient. Scores exist for a block of query rows at a time; backward makes
//! them again from the logarithm of each row's sum (Dao et al. 2022).

use std::sync::Arc;

use burn::tensor::{Distribution, Tensor};
use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::base::Checkpointer;
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn_backend::Backend;
use burn_backend::tensor::FloatTensor;

use crate::portable;

/// Bits of a random f32.
const DRAWN_BITS: u32 = 24;

/// Query rows whose scores exist at the same time.
pub(crate) const QUERY_BLOCK: usize = 128;

/// The keys that a query attends to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AttentionMask {
    /// Keys up to the query's own position.
    Causal,
    /// The first keys of the query's sequence, as many as its length, at least one. The others are padding.
    Lengths(Arc<[usize]>),
}

impl AttentionMask {
    /// Returns how many of `positions` keys query `query` of sequence `sequence` attends to.
    pub(crate) fn seen(&self, sequence: usize, query: usize, positions: usize) -> usize {
        match self {
            Self::Causal => query + 1,
            Self::Lengths(lengths) => lengths[sequence].clamp(1, positions.max(1)),
        }
    }

    /// Returns how many of `positions` keys a block of queries up to `end` attends to.
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
    /// The keys that a query attends to.
    pub mask: AttentionMask,
}

/// Attention weights that are dropped, as a function of their place, so that no mask is kept for
/// backward; the others are divided by the share that stays.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionDropout {
    /// Fixes which.
    pub seed: u64,
    /// Share of the weights that is dropped, below 1.
    pub probability: f64,
}

impl AttentionDropout {
    /// Whether the weight of key `key` is dropped for query `row`, counted over the queries of all
    /// heads of all sequences.
    pub fn drops(self, row: usize, key: usize) -> bool {
        self.row(row).drops(key as u32)
    }

    /// What the dropped weights left to be multiplied with.
    pub(crate) fn factor(self) -> f64 {
        1.0 / (1.0 - self.probability)
    }

    pub(crate) fn row(self, row: usize) -> DropoutRow {
        // SplitMix64 (Steele et al. 2014).
        let mut z = self.seed.wrapping_add((row as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        let threshold = (self.probability * 2_f64.powi(32)) as u32;
        DropoutRow { low: z as u32, high: (z >> 32) as u32, threshold }
    }
}

/// The draws of one query.
#[derive(Clone, Copy)]
pub(crate) struct DropoutRow {
    low: u32,
    high: u32,
    /// Draws below it drop.
    threshold: u32,
}

impl DropoutRow {
    #[inline(always)]
    pub(crate) fn drops(self, key: u32) -> bool {
        // A 32-bit finaliser with low bias (Wellons, "Prospecting for hash functions").
        let mut x = self.low ^ key.wrapping_mul(0x9e37_79b9);
        x = (x ^ (x >> 16)).wrapping_mul(0x7feb_352d);
        x = (x ^ (x >> 15)).wrapping_mul(0x846c_a68b);
        (x ^ (x >> 16) ^ self.high) < self.threshold
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
        dropout: Option<AttentionDropout>,
    ) -> FloatTensor<Self> {
        Self::attention_forward(projected, attention, dropout).output
    }

    /// The same, with what backward needs of each row.
    fn attention_forward(
        projected: FloatTensor<Self>,
        attention: &SelfAttention,
        dropout: Option<AttentionDropout>,
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
    pub dropout: Option<AttentionDropout>,
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
        dropout: Option<AttentionDropout>,
    ) -> FloatTensor<Self> {
        match AttentionStep.prepare::<C>([projected.node]).compute_bound().stateful() {
            OpsKind::Tracked(step) => {
                let projected = projected.primitive;
                let AttentionOutput { output, log_sums } =
                    B::attention_forward(projected.clone(), attention, dropout);
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
        let range = Distribution::Uniform(0.0, f64::from(1 << DRAWN_BITS));
        let draws = Tensor::<B, 1>::random([2], range, &projected.device()).into_data();
        let seed = draws.iter::<f32>().fold(0, |seed, draw| seed << DRAWN_BITS | draw as u64);
        AttentionDropout { seed, probability: dropout }
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
