//! The tables of the fused ops of `deepburn-ops`, and their expansion for [`Staged`] and
//! [`Autocast`]. [`Sharded`](crate::Sharded) expands the tables without products, and has the other
//! ops in `ops/fused.rs`.
//!
//! A fused op computes internally in f32, regardless of the type of its operands. Only the operands
//! of products and the operands that determine the result type are cast. Only the op that a model
//! calls casts its operands: the autodiff node of this op calls the forward and the backward method
//! of the inner backend, with operands that already have one type.

use burn_backend::tensor::Device;
use burn_backend::{DType, FloatDType};
use deepburn_kernels::ChaChaPosition;
use deepburn_ops::{
    AttentionDropout, AttentionOps, AttentionOutput, AttentionSaved, CrossEntropyOps,
    ElementDropout, GateFunction, GatedGradients, GatedOps, GeluOps, HeadGradients, HeadLoss,
    LayerNormGradients, LayerNormOps, LayerNormOutput, LayerNormSaved, LinearGradients, LinearOps,
    MatmulOps, RandomOps, RmsNorm, RmsNormGradients, RmsNormOps, RmsNormOutput, RmsNormSaved,
    RotaryOps, RotatedHeads, SelfAttention,
};

use crate::decorator::Sharded;
use crate::decorator::autocast::ops::cast;
use crate::decorator::autocast::{Autocast, TracksParameters};
use crate::decorator::staged::Staged;
use crate::decorator::staged::ops::stage;
use crate::pipeline::stages;

/// Implements the ops that need only the data of their operands, for a decorator of backends that
/// implement `$bound`; see [`ops`](crate::decorator::ops) for the syntax of the tables.
macro_rules! fused_ops {
    ($with:ident, $decorator:ident, $bound:ident) => {
        impl<B: $bound + LayerNormOps> LayerNormOps for $decorator<B> {
            $with! {
                #[full] fn fused_layer_norm(x: float, gamma: float, beta: float, epsilon: [f64])
                    -> float;
                #[saving] fn layer_norm_forward(x: float, gamma: float, beta: float, epsilon: [f64])
                    -> (LayerNormOutput { output: float, mean: float, reciprocal_deviation: float });
                #[uncast] fn layer_norm_backward(
                    grad: float,
                    saved: (LayerNormSaved { x: float, gamma: float, mean: float, reciprocal_deviation: float }),
                ) -> (LayerNormGradients { x: float, gamma: float, beta: float });
            }
        }

        // Under autocast the op runs in f32, and no quotient is rounded.
        impl<B: $bound + RmsNormOps> RmsNormOps for $decorator<B> {
            $with! {
                #[full] fn fused_rms_norm(x: float, weight: float, norm: [RmsNorm]) -> float;
                #[saving] fn rms_norm_forward(x: float, weight: float, norm: [RmsNorm])
                    -> (RmsNormOutput { output: float, reciprocal_root: float });
                #[uncast] fn rms_norm_backward(
                    grad: float,
                    saved: (RmsNormSaved { x: float, weight: float, reciprocal_root: float }),
                    norm: [RmsNorm],
                ) -> (RmsNormGradients { x: float, weight: float });
            }
        }

        // Backward recomputes the activation from the input.
        impl<B: $bound + GeluOps> GeluOps for $decorator<B> {
            $with! {
                fn gelu_tanh(x: float) -> float;
                fn gelu_tanh_backward(grad: float, x: float) -> float;
            }
        }

        // Backward recomputes the function from the gate.
        impl<B: $bound + GatedOps> GatedOps for $decorator<B> {
            $with! {
                fn gated(gate: float, up: float, function: [GateFunction]) -> float;
                fn gated_joint(joint: float, function: [GateFunction]) -> float;
                fn gated_joint_backward(grad: float, joint: float, function: [GateFunction])
                    -> float;
                #[uncast] fn gated_backward(
                    grad: float, gate: float, up: float, function: [GateFunction],
                ) -> (GatedGradients { gate: float, up: float });
            }
        }

        // The table of sines and cosines is a constant of the pass. It is f32 and is not cast: the
        // op rounds it to the type of the rotated matrix.
        impl<B: $bound + RotaryOps> RotaryOps for $decorator<B> {
            $with! {
                #[uncast] fn rotate_heads(x: float, cos: float, sin: float, heads: [RotatedHeads])
                    -> float;
                #[uncast] fn rotate_heads_back(
                    grad: float, cos: float, sin: float, heads: [RotatedHeads],
                ) -> float;
            }
        }
    };
}
pub(crate) use fused_ops;

/// Implements the ops with products, for a decorator of the backend `$inner`. [`Sharded`]
/// implements them by hand, because their operations are counted.
macro_rules! counted_fused_ops {
    ($with:ident, $decorator:ident, $bound:ident, $inner:ty, $takes_dropout:expr) => {
        impl<B: $bound + LinearOps> LinearOps for $decorator<B> {
            $with! {
                #[product] fn fused_linear(x: float, weight: float, bias: (maybe float)) -> float;
                fn linear_x_gradient(grad: float, weight: float) -> float;
                #[uncast] fn linear_gradients(grad: float, x: float)
                    -> (LinearGradients { weight: float, bias: float });
            }
        }

        impl<B: $bound + CrossEntropyOps> CrossEntropyOps for $decorator<B> {
            $with! {
                #[product] fn linear_cross_entropy(hidden: float, weight: float, targets: int)
                    -> float;
                #[product] fn head_scores(hidden: float, weight: float, targets: int) -> float;
                #[product] fn head_loss(
                    hidden: float, weight: float, targets: int, wanted: [HeadGradients<bool>],
                )
                    -> (HeadLoss {
                        loss: float, gradients: (HeadGradients { hidden: (maybe float), weight: (maybe float) })
                    });
                #[uncast] fn logits_loss(logits: float, targets: int, gradient: [bool])
                    -> (float, (maybe float));
                fn fused_cross_entropy(logits: float, targets: int) -> float;
                fn scale_gradient(gradient: float, factor: float, dtype: [DType]) -> float;
            }
        }

        /// Random tensors are drawn by the plain op.
        impl<B: $bound> RandomOps for $decorator<B> {
            fn take_dropout(
                device: &Device<Self>, len: usize, dtype: FloatDType,
            ) -> Option<ChaChaPosition> {
                $takes_dropout.then(|| <$inner>::take_dropout(device, len, dtype)).flatten()
            }

            $with! {
                #[uncast] fn drop_elements(x: float, dropout: [ElementDropout]) -> float;
            }
        }

        impl<B: $bound + AttentionOps> AttentionOps for $decorator<B> {
            fn dropout_seed(device: &Device<Self>) -> u64 {
                <$inner>::dropout_seed(device)
            }

            $with! {
                #[product] fn self_attention(
                    projected: float, attention: [&SelfAttention],
                    dropout: [Option<AttentionDropout>],
                ) -> float;
                #[product] fn attention_forward(
                    projected: float, attention: [&SelfAttention],
                    dropout: [Option<AttentionDropout>],
                ) -> (AttentionOutput { output: float, log_sums: float });
                #[uncast] fn attention_backward(
                    grad: float,
                    saved: (AttentionSaved { projected: float, output: float, log_sums: float, dropout: [Option<AttentionDropout>] }),
                    attention: [&SelfAttention],
                ) -> float;
                #[uncast] fn write_to_cache(cache: float, rows: float, start: [usize]) -> float;
                // One type for all three: a cache has the type of the queries in every model.
                #[product] fn attention_over_cache(
                    queries: float, keys: float, values: float, filled: [usize],
                    attention: [&SelfAttention],
                ) -> float;
            }
        }
    };
}

fused_ops!(stage, Staged, MatmulOps);
// The stages of a pipeline leave the ops of other stages out, and their random numbers with them.
counted_fused_ops!(stage, Staged, MatmulOps, Sharded<B>, stages::<B>().is_none());

fused_ops!(cast, Autocast, TracksParameters);
counted_fused_ops!(cast, Autocast, TracksParameters, B, true);
