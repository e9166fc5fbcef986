//! Fused tensor ops for Burn backends.
//!
//! Each family of ops has one extension trait, which connects the kernels to a backend.
//! [`OptimizerOps`] updates the elements that a rank owns, [`MatmulOps`] multiplies matrices, and
//! [`SumOps`] sums all elements of a tensor, the parts of ranks, and rows of a table.
//! [`LayerNormOps`], [`RmsNormOps`], [`GeluOps`], [`GatedOps`], [`LinearOps`], [`RotaryOps`],
//! [`AttentionOps`] and [`CrossEntropyOps`], together [`FusedOps`], have a forward and a backward
//! pass. Provided methods use ops that every backend supports, or copy to host memory. A backend
//! overrides a method if it has its own kernel.
//!
//! | Family | flex (CPU) | LibTorch | CubeCL (GPUs) | fusion |
//! |---|---|---|---|---|
//! | [`LayerNormOps`] | kernel | LibTorch's forward, own backward formula | kernel | provided |
//! | [`RmsNormOps`], [`GatedOps`], [`RotaryOps`] | kernel | provided | kernel | provided |
//! | [`GeluOps`] | kernel | LibTorch's | kernel | provided |
//! | [`LinearOps`] | own products | LibTorch's products | the backend's products, kernel for bias gradients | the backend's products |
//! | [`MatmulOps`] | own products | LibTorch's products | the backend's products | the same |
//! | [`CrossEntropyOps`] | kernel | ops in place | kernel | provided |
//! | [`AttentionOps`] | kernel | LibTorch's on the CPU if causal | kernel | provided |
//! | [`SumOps`] | Burn's, in order | LibTorch's | kernel | kernel |
//! | [`RandomOps`] | drawn on the host | drawn on the host | kernel | drawn on the host |
//! | [`OptimizerOps`] | kernel | kernel on the CPU, else host memory | kernel | kernel |
//!
//! Frozen matrices may be operands in 8 or 4 bits ([`QuantizedMatrix`]): [`LinearOps`] and
//! [`CrossEntropyOps`] have products with them.
//!
//! Products of f32 matrices on a device with tensor cores use them only after [`allow_tf32`].
//!
//! The features `flex`, `tch`, `cube` and `fusion` select the backends. On
//! [`Meta`](deepburn_meta::Meta), the backend without data, every family returns tensors of the
//! right shape and type. The kernels support f32, f16 and bf16; f64 tensors use [`portable`], which
//! works on every backend.
//!
//! `Autodiff<B>` records each fused op as one step that saves only the values that its backward
//! formula needs. Models call the functions on tensors: [`layer_norm`], [`rms_norm`],
//! [`gelu_tanh`], [`gated`], [`gated_joint`], [`linear`], [`rotate_heads`], [`self_attention`],
//! [`linear_cross_entropy`], [`cross_entropy`].

mod attention;
mod autodiff_step;
mod cross_entropy;
mod gated;
mod gelu;
mod host;
mod layout;
mod linear;
mod matmul;
mod meta;
mod norm;
mod optimizer;
pub mod portable;
mod quantized;
mod random;
mod rms_norm;
mod rotary;
mod rows;
mod shared_storage;
mod stream;
mod sum;

#[cfg(feature = "cube")]
mod cube;
#[cfg(feature = "flex")]
mod flex;
#[cfg(feature = "fusion")]
mod fusion;
#[cfg(feature = "tch")]
mod tch;

pub use attention::{
    AttentionDropout, AttentionMask, AttentionOps, AttentionOutput, AttentionSaved, KeyList,
    SEED_DRAWS, SelfAttention, attention_over_cache, seed_distribution, seed_from, self_attention,
    write_to_cache,
};
pub use cross_entropy::{
    CrossEntropyOps, HeadGradients, HeadLoss, cross_entropy, linear_cross_entropy, linear_scores,
    logits_chunk_rows, num_predicted,
};
pub use gated::{GateFunction, GatedGradients, GatedOps, gated, gated_joint};
pub use gelu::{GeluOps, gelu_tanh};
pub use host::{
    each_float_bytes, float_bytes, float_from_host, float_into_host, int_from_host, int_into_host,
    is_in_host_memory, read_float, shared_bytes, view_float,
};
pub use layout::LayoutOps;
pub use linear::{LinearGradients, LinearOps, linear};
pub use matmul::{MatmulOps, allow_tf32};
pub use meta::is_without_data;
// Work that is not an op: what a program copies, and computes in host memory.
pub use deepburn_meta::{Work, report_work};
pub use norm::{LayerNormGradients, LayerNormOps, LayerNormOutput, LayerNormSaved, layer_norm};
pub use optimizer::{OptimizerOps, ParameterUpdate, UpdateArrays};
pub use quantized::{QuantizedMatrix, dequantize, quantize, quantized_rows};
pub use random::{ElementDropout, RandomOps, dropout};
pub use rms_norm::{
    RmsNorm, RmsNormGradients, RmsNormOps, RmsNormOutput, RmsNormSaved, RmsWeight, rms_norm,
};
pub use rotary::{RotaryOps, RotatedHeads, rotate_heads};
pub use rows::{RowBlock, add_rows_on_host};
pub use shared_storage::{join_shards, shard_of_whole};
pub use stream::StreamOps;
pub use sum::SumOps;

/// The op families with a forward and a backward pass, which a fused model requires from its
/// backend. Implemented for every backend that implements all of them.
pub trait FusedOps:
    LayerNormOps
    + RmsNormOps
    + GeluOps
    + GatedOps
    + LinearOps
    + RotaryOps
    + AttentionOps
    + CrossEntropyOps
{
}

impl<B> FusedOps for B where
    B: LayerNormOps
        + RmsNormOps
        + GeluOps
        + GatedOps
        + LinearOps
        + RotaryOps
        + AttentionOps
        + CrossEntropyOps
{
}
