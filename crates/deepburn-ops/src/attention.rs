//! Multi-head self-attention, causal or over padded sequences.
//!
//! Main trait: [`AttentionOps`]. Queries, keys and values come as one matrix,
//! as a fused projection computes them, and so does their gradient. The
//! complete matrix of scores never exists: scores are computed for a block of
//! query rows at a time, and backward recomputes them from the logarithm of
//! each row's sum (Dao et al. 2022).

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

/// The number of random bits that are drawn as one f32, whose significand has 24 bits. A seed is
/// made of two draws.
const DRAWN_BITS: u32 = 24;

/// The number of query rows whose scores exist at the same time.
pub(crate) const QUERY_BLOCK: usize = 128;

/// The keys that a query attends to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AttentionMask {
    /// Keys up to the query's own position.
    Causal,
    /// The first keys of the query's sequence; the others are padding. The list has the length of
    /// each sequence, and a length of 0 counts as 1.
    Lengths(Arc<[usize]>),
}

impl AttentionMask {
    /// Returns the number of keys, out of `positions`, that query `query` of sequence `sequence`
    /// attends to.
    ///
    /// # Panics
    ///
    /// Panics if the list of lengths is shorter than the batch.
    pub(crate) fn seen(&self, sequence: usize, query: usize, positions: usize) -> usize {
        match self {
            Self::Causal => query + 1,
            Self::Lengths(lengths) => lengths[sequence].clamp(1, positions.max(1)),
        }
    }

    /// Returns the number of keys, out of `positions`, that a block of queries up to `end` has to be
    /// multiplied with.
    pub(crate) fn keys(&self, end: usize, positions: usize) -> usize {
        match self {
            Self::Causal => end,
            Self::Lengths(_) => positions,
        }
    }
}

/// The dimensions and options of an attention.
#[derive(Debug, Clone, PartialEq)]
pub struct SelfAttention {
    /// The number of sequences.
    pub batch: usize,
    /// The number of heads. The width of a head is the model's width divided by
    /// it.
    pub heads: usize,
    /// The factor of the scores.
    pub scale: f64,
    /// Whether 16-bit queries and keys are multiplied in f32 even if this is slower. The flex
    /// kernels always add in f32.
    pub upcast: bool,
    /// The keys that a query attends to.
    pub mask: AttentionMask,
}

/// Dropout of attention weights. Whether a weight is dropped is a function of
/// its position, so backward needs no mask. The other weights are divided by
/// the fraction that is kept.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionDropout {
    /// The seed of the selection.
    pub seed: u64,
    /// The fraction of weights that is dropped, below 1.
    pub probability: f64,
}

impl AttentionDropout {
    /// Returns true if the weight of key `key` is dropped for query `row`,
    /// which is counted over the queries of all heads of all sequences.
    pub fn drops(self, row: usize, key: usize) -> bool {
        self.row(row).drops(key as u32)
    }

    /// Returns the factor of the weights that are kept.
    pub(crate) fn factor(self) -> f64 {
        1.0 / (1.0 - self.probability)
    }

    /// Returns the random numbers of query `row`, which is counted over the queries of all heads of
    /// all sequences.
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

/// The random numbers of one query.
#[derive(Clone, Copy)]
pub(crate) struct DropoutRow {
    /// Combined with the number of the key.
    low: u32,
    /// Combined with the result of the hash.
    high: u32,
    /// A number below it drops the weight: the probability in units of 2^-32.
    threshold: u32,
}

impl DropoutRow {
    /// Returns true if the weight of key `key` is dropped. Integer arithmetic only, so that a loop
    /// over keys vectorises.
    #[inline(always)]
    pub(crate) fn drops(self, key: u32) -> bool {
        // A 32-bit finaliser with low bias (Wellons, "Prospecting for hash functions").
        let mut x = self.low ^ key.wrapping_mul(0x9e37_79b9);
        x = (x ^ (x >> 16)).wrapping_mul(0x7feb_352d);
        x = (x ^ (x >> 15)).wrapping_mul(0x846c_a68b);
        (x ^ (x >> 16) ^ self.high) < self.threshold
    }
}

/// Self-attention of sequences of equal length. Softmax is computed in at least
/// f32.
pub trait AttentionOps: Backend {
    /// Computes the attention of `projected`, shape `[batch * positions, 3 *
    /// width]`: queries, keys and values side by side, each head after head.
    /// There must be at least one position. Returns `[batch * positions,
    /// width]`. Autodiff records this method.
    fn self_attention(
        projected: FloatTensor<Self>,
        attention: &SelfAttention,
        dropout: Option<AttentionDropout>,
    ) -> FloatTensor<Self> {
        Self::attention_forward(projected, attention, dropout).output
    }

    /// Computes the same, and the values of each row that backward needs.
    fn attention_forward(
        projected: FloatTensor<Self>,
        attention: &SelfAttention,
        dropout: Option<AttentionDropout>,
    ) -> AttentionOutput<Self> {
        portable::attention::forward::<Self>(projected, attention, dropout)
    }

    /// Returns the gradient with respect to `projected` from the gradient
    /// `grad` of the result.
    fn attention_backward(
        grad: FloatTensor<Self>,
        saved: AttentionSaved<Self>,
        attention: &SelfAttention,
    ) -> FloatTensor<Self> {
        portable::attention::backward::<Self>(grad, saved, attention)
    }
}

/// The result of a forward pass.
#[derive(Debug)]
pub struct AttentionOutput<B: Backend> {
    /// `[batch * positions, width]`.
    pub output: FloatTensor<B>,
    /// The logarithm of the sum of exponentials of each row of scores, `[batch
    /// * heads, positions]`, in at least f32.
    pub log_sums: FloatTensor<B>,
}

/// The values that backward needs.
#[derive(Debug, Clone)]
pub struct AttentionSaved<B: Backend> {
    /// The input.
    pub projected: FloatTensor<B>,
    /// See [`AttentionOutput`].
    pub output: FloatTensor<B>,
    /// See [`AttentionOutput`].
    pub log_sums: FloatTensor<B>,
    /// The same as in forward.
    pub dropout: Option<AttentionDropout>,
}

/// The autodiff step. Its parent is the projected matrix.
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

/// Computes self-attention of `projected`, shape `[batch * positions, 3 *
/// width]`, with queries, keys and values side by side. Returns `[batch *
/// positions, width]`.
///
/// Each attention weight is dropped with probability `dropout`, which uses the
/// backend's random numbers.
pub fn self_attention<B: AttentionOps>(
    projected: Tensor<B, 2>,
    attention: &SelfAttention,
    dropout: f64,
) -> Tensor<B, 2> {
    // The seed is drawn by the backend. In sharded training this is the rank's random stream, which
    // checkpoints contain, so a resumed run drops the same weights.
    let drawn = (dropout > 0.0).then(|| {
        let range = Distribution::Uniform(0.0, f64::from(1 << DRAWN_BITS));
        let draws = Tensor::<B, 1>::random([2], range, &projected.device()).into_data();
        let seed = draws.iter::<f32>().fold(0, |seed, draw| seed << DRAWN_BITS | draw as u64);
        AttentionDropout { seed, probability: dropout }
    });
    portable::tensor(B::self_attention(portable::primitive(projected), attention, drawn))
}

/// Computes the attention of `queries`, shape `[batch, heads, queries, head
/// width]`, at the last positions of `keys` and `values`. Returns `[batch *
/// queries, width]`. For generation: it uses plain ops and no dropout.
pub fn attention_over_cache<B: Backend>(
    queries: Tensor<B, 4>,
    keys: Tensor<B, 4>,
    values: Tensor<B, 4>,
    attention: &SelfAttention,
) -> Tensor<B, 2> {
    portable::attention::over_cache(queries, keys, values, attention)
}
