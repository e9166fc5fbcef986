//! Multi-head self-attention, causal or over padded sequences.
//!
//! Main trait: [`AttentionOps`]. Queries, keys and values are the columns of one matrix, the output
//! of a fused projection. Their gradient has the same layout. The full score matrix is never
//! materialized: scores are computed for one block of query rows at a time. The backward pass
//! recomputes them from the saved log-sum-exp of each row, as FlashAttention does (Dao et al.
//! 2022).

pub(crate) mod dimensions;
pub(crate) mod dropout;
mod key_list;
pub(crate) mod saved;

use burn::tensor::Tensor;
use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_autodiff::ops::Backward;
use burn_backend::tensor::{Device, FloatTensor};

use crate::autodiff_step::{backward_step, record};
use crate::matmul::MatmulOps;
use crate::portable;
pub use dimensions::{AttentionMask, SelfAttention};
pub use dropout::{AttentionDropout, SEED_DRAWS, seed_distribution, seed_from};
pub use key_list::KeyList;
pub use saved::{AttentionOutput, AttentionSaved};

/// Self-attention of sequences of equal length. Softmax is computed in at least f32.
pub trait AttentionOps: MatmulOps {
    /// Computes the self-attention of `projected`, shape
    /// `[batch * positions, (heads + 2 * key_value_heads) * head width]`. Its columns are the
    /// queries of all heads, then the keys, then the values. There must be at least one position.
    /// Returns `[batch * positions, heads * head width]`. Autodiff records this method.
    fn self_attention(
        projected: FloatTensor<Self>,
        attention: &SelfAttention,
        dropout: Option<AttentionDropout>,
    ) -> FloatTensor<Self> {
        Self::attention_forward(projected, attention, dropout).output
    }

    /// Draws the seed of a dropout from the backend's random numbers. The provided method draws on
    /// the device and waits for it.
    fn dropout_seed(device: &Device<Self>) -> u64 {
        let draws = Tensor::<Self, 1>::random([SEED_DRAWS], seed_distribution(), device);
        seed_from(&draws.into_data())
    }

    /// Computes the same output, and the log-sum-exp of each row, which the backward pass needs.
    fn attention_forward(
        projected: FloatTensor<Self>,
        attention: &SelfAttention,
        dropout: Option<AttentionDropout>,
    ) -> AttentionOutput<Self> {
        portable::attention::forward::<Self>(projected, attention, dropout)
    }

    /// Returns the gradient with respect to `projected`. `grad` is the gradient of the output.
    fn attention_backward(
        grad: FloatTensor<Self>,
        saved: AttentionSaved<Self>,
        attention: &SelfAttention,
    ) -> FloatTensor<Self> {
        portable::attention::backward::<Self>(grad, saved, attention)
    }

    /// Returns `cache` `[batch, key_value_heads, room, head width]` with `rows`
    /// `[batch, key_value_heads, count, head width]` at the positions from `start` on. A backend
    /// that overrides this method writes in place if the cache has no other owner.
    fn write_to_cache(
        cache: FloatTensor<Self>,
        rows: FloatTensor<Self>,
        start: usize,
    ) -> FloatTensor<Self> {
        portable::cache::write::<Self>(cache, rows, start)
    }

    /// Computes the attention of `queries` over the first `filled` positions of cached keys and
    /// values. Returns `[batch * queries, heads * head width]`. Autodiff does not record this
    /// method as one step.
    fn attention_over_cache(
        queries: FloatTensor<Self>,
        keys: FloatTensor<Self>,
        values: FloatTensor<Self>,
        filled: usize,
        attention: &SelfAttention,
    ) -> FloatTensor<Self> {
        portable::cache::attention::<Self>(queries, [keys, values], filled, attention)
    }
}

backward_step! {
    /// The autodiff step. Its parent is the projected matrix.
    AttentionStep<1>: AttentionOps,
    |grad, (saved, attention): (AttentionSaved<B>, SelfAttention)| {
        [B::attention_backward(grad, saved, &attention)]
    }
}

impl<B: AttentionOps, C: CheckpointStrategy> AttentionOps for Autodiff<B, C> {
    fn dropout_seed(device: &Device<Self>) -> u64 {
        B::dropout_seed(device)
    }

    fn self_attention(
        projected: FloatTensor<Self>,
        attention: &SelfAttention,
        dropout: Option<AttentionDropout>,
    ) -> FloatTensor<Self> {
        record(
            AttentionStep.prepare::<C>([projected.node]),
            projected.primitive,
            |projected| {
                // The backward pass computes the corrections of softmax's derivative from the
                // output. Cloning a tensor only clones its handle.
                let AttentionOutput { output, log_sums } =
                    B::attention_forward(projected.clone(), attention, dropout);
                let saved = AttentionSaved { projected, output: output.clone(), log_sums, dropout };
                ((saved, attention.clone()), output)
            },
            // Without a backward pass, a backend need not return the log-sums.
            |projected| B::self_attention(projected, attention, dropout),
        )
    }
}

/// Computes self-attention of `projected`, shape
/// `[batch * positions, (heads + 2 * key_value_heads) * head width]`, whose columns are the
/// queries, then the keys, then the values. Returns `[batch * positions, heads * head width]`.
///
/// Each attention weight is dropped with probability `dropout`. The seed of the selection is
/// sampled from the backend's random number generator.
pub fn self_attention<B: AttentionOps>(
    projected: Tensor<B, 2>,
    attention: &SelfAttention,
    dropout: f64,
) -> Tensor<B, 2> {
    // The backend samples the seed. In sharded training it uses the rank's random stream.
    // Checkpoints save this stream, so a resumed run drops the same weights.
    let drawn = (dropout > 0.0).then(|| AttentionDropout {
        seed: B::dropout_seed(&projected.device()),
        probability: dropout,
    });
    portable::tensor(B::self_attention(portable::primitive(projected), attention, drawn))
}

/// Computes the attention of `queries`, shape `[batch, heads, queries, head width]`, over the first
/// `filled` positions of `keys` and `values`, `[batch, key_value_heads, room, head width]`. The
/// queries are the last of these positions. Returns `[batch * queries, heads * head width]`. Used
/// for generation, without dropout.
pub fn attention_over_cache<B: AttentionOps>(
    queries: Tensor<B, 4>,
    [keys, values]: [Tensor<B, 4>; 2],
    filled: usize,
    attention: &SelfAttention,
) -> Tensor<B, 2> {
    let [queries, keys, values] = [queries, keys, values].map(portable::primitive);
    portable::tensor(B::attention_over_cache(queries, keys, values, filled, attention))
}

/// Returns `cache` `[batch, key_value_heads, room, head width]` with `rows`
/// `[batch, key_value_heads, count, head width]` at the positions from `start` on. On flex, the
/// cache is updated in place if it has no other owner; other backends may copy it.
pub fn write_to_cache<B: AttentionOps>(
    cache: Tensor<B, 4>,
    rows: Tensor<B, 4>,
    start: usize,
) -> Tensor<B, 4> {
    portable::tensor(B::write_to_cache(
        portable::primitive(cache),
        portable::primitive(rows),
        start,
    ))
}
