//! Multi-head self-attention, causal or over padded sequences.
//!
//! Main trait: [`AttentionOps`]. Queries, keys and values come as one matrix,
//! as a fused projection computes them, and so does their gradient. The
//! complete matrix of scores never exists: scores are computed for a block of
//! query rows at a time, and backward recomputes them from the logarithm of
//! each row's sum (Dao et al. 2022).

pub(crate) mod dimensions;
pub(crate) mod dropout;
pub(crate) mod saved;

use burn::tensor::{Distribution, Tensor};
use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::base::Checkpointer;
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn_backend::Backend;
use burn_backend::tensor::FloatTensor;

use crate::portable;
pub use dimensions::{AttentionMask, SelfAttention};
pub use dropout::AttentionDropout;
pub use saved::{AttentionOutput, AttentionSaved};

/// The number of random bits that are drawn as one f32, whose significand has 24 bits. A seed is
/// made of two draws.
const DRAWN_BITS: u32 = 24;

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
