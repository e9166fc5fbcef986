//! Fused ops of `deepburn-ops`: norms, activations, linear layer, rotary embedding, attention and
//! cross entropy.
//!
//! The autodiff nodes of these ops are defined above this backend and save its tensors. A parameter
//! that backward needs is therefore saved as a handle, and an activation as a value of its block's
//! tape. Forward ops are recorded for recomputation. Backward ops are not recorded, because they
//! run after the recording has ended.
//!
//! Products are counted for model FLOPs ([`operations`](crate::ledger)), in forward and in
//! backward.

use burn_backend::tensor::{FloatTensor, IntTensor};
use burn_backend::{Backend, DType, TensorMetadata};
use deepburn_ops::{
    AttentionDropout, AttentionMask, AttentionOps, AttentionOutput, AttentionSaved,
    CrossEntropyOps, GateFunction, GatedGradients, GatedOps, GeluOps, HeadGradients, HeadLoss,
    LayerNormGradients, LayerNormOps, LayerNormOutput, LayerNormSaved, LinearGradients, LinearOps,
    MatmulOps, QuantizedMatrix, RmsNorm, RmsNormGradients, RmsNormOps, RmsNormOutput, RmsNormSaved,
    RotaryOps, RotatedHeads, SelfAttention,
};

use crate::decorator::ops::product::{count, count_backward, rows_times};
use crate::decorator::ops::{forward, recorded, weight};
use crate::decorator::{Sharded, ZeroTensor};
use crate::recompute::{self, Cost};

/// Layer norm. The output, the mean and the reciprocal standard deviation of each row are the three
/// results of one recorded op. Backward needs the input and both statistics.
impl<B: MatmulOps + LayerNormOps> LayerNormOps for Sharded<B> {
    forward! {
        fn fused_layer_norm(x: float, gamma: float, beta: float, epsilon: [f64]) -> float;
    }

    fn layer_norm_forward(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        epsilon: f64,
    ) -> LayerNormOutput<Self> {
        let [output, mean, reciprocal_deviation] = recorded!(
            Cost::Low; x: float, gamma: float, beta: float, epsilon: [f64] => {
                let normed = B::layer_norm_forward(x, gamma, beta, epsilon);
                [normed.output, normed.mean, normed.reciprocal_deviation]
            }
        );
        LayerNormOutput { output, mean, reciprocal_deviation }
    }

    fn layer_norm_backward(
        grad: FloatTensor<Self>,
        saved: LayerNormSaved<Self>,
    ) -> LayerNormGradients<Self> {
        let saved = LayerNormSaved {
            x: saved.x.into_full(),
            gamma: saved.gamma.into_full(),
            mean: saved.mean.into_full(),
            reciprocal_deviation: saved.reciprocal_deviation.into_full(),
        };
        let LayerNormGradients { x, gamma, beta } = B::layer_norm_backward(grad.into_full(), saved);
        LayerNormGradients {
            x: ZeroTensor::full(x),
            gamma: ZeroTensor::full(gamma),
            beta: ZeroTensor::full(beta),
        }
    }
}

/// RMS norm. The output and the reciprocal root of each row are the two results of one recorded op.
impl<B: MatmulOps + RmsNormOps> RmsNormOps for Sharded<B> {
    forward! {
        fn fused_rms_norm(x: float, weight: float, norm: [RmsNorm]) -> float;
    }

    fn rms_norm_forward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        norm: RmsNorm,
    ) -> RmsNormOutput<Self> {
        let [output, reciprocal_root] = recorded!(
            Cost::Low; x: float, weight: float, norm: [RmsNorm] => {
                let normed = B::rms_norm_forward(x, weight, norm);
                [normed.output, normed.reciprocal_root]
            }
        );
        RmsNormOutput { output, reciprocal_root }
    }

    fn rms_norm_backward(
        grad: FloatTensor<Self>,
        saved: RmsNormSaved<Self>,
        norm: RmsNorm,
    ) -> RmsNormGradients<Self> {
        let saved = RmsNormSaved {
            x: saved.x.into_full(),
            weight: saved.weight.into_full(),
            reciprocal_root: saved.reciprocal_root.into_full(),
        };
        let RmsNormGradients { x, weight } = B::rms_norm_backward(grad.into_full(), saved, norm);
        RmsNormGradients { x: ZeroTensor::full(x), weight: ZeroTensor::full(weight) }
    }
}

/// GELU with the tanh approximation, which backward recomputes from the input.
impl<B: MatmulOps + GeluOps> GeluOps for Sharded<B> {
    forward! {
        fn gelu_tanh(x: float) -> float;
        fn gelu_tanh_backward(grad: float, x: float) -> float;
    }
}

/// Gated activations, whose function backward recomputes from the gate.
impl<B: MatmulOps + GatedOps> GatedOps for Sharded<B> {
    forward! {
        fn gated(gate: float, up: float, function: [GateFunction]) -> float;
        fn gated_joint(joint: float, function: [GateFunction]) -> float;
        fn gated_joint_backward(grad: float, joint: float, function: [GateFunction]) -> float;
    }

    fn gated_backward(
        grad: FloatTensor<Self>,
        gate: FloatTensor<Self>,
        up: FloatTensor<Self>,
        function: GateFunction,
    ) -> GatedGradients<Self> {
        let [grad, gate, up] = [grad, gate, up].map(ZeroTensor::into_full);
        let GatedGradients { gate, up } = B::gated_backward(grad, gate, up, function);
        GatedGradients { gate: ZeroTensor::full(gate), up: ZeroTensor::full(up) }
    }
}

/// Rotary embeddings. The table is a constant of the pass.
impl<B: MatmulOps + RotaryOps> RotaryOps for Sharded<B> {
    forward! {
        fn rotate_heads(x: float, cos: float, sin: float, heads: [RotatedHeads]) -> float;
        fn rotate_heads_back(grad: float, cos: float, sin: float, heads: [RotatedHeads]) -> float;
    }
}

/// Linear layers: `x [.., inputs]` times `weight`, plus an optional bias.
impl<B: MatmulOps + LinearOps> LinearOps for Sharded<B> {
    fn fused_linear(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: Option<FloatTensor<Self>>,
    ) -> FloatTensor<Self> {
        count(&[&weight], || rows_times(&x, weight.shape().num_elements()));
        let cost = Cost::of_product(x.shape().as_slice().last().copied().unwrap_or(1));
        let [output] = recorded!(
            cost; x: float, weight: weight, bias: maybe_float => [weight::linear::<B>(x, weight, bias)]
        );
        output
    }

    fn linear_x_gradient(grad: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self> {
        count(&[&weight], || rows_times(&grad, weight.shape().num_elements()));
        ZeroTensor::full(weight::linear_x_gradient::<B>(grad.into_full(), weight.into_weight()))
    }

    /// Dequantizes the weight. The blocks of a quantized parameter do not come here: the methods
    /// above read them from its handle.
    fn quantized_linear(
        x: FloatTensor<Self>,
        weight: &QuantizedMatrix<Self>,
        bias: Option<FloatTensor<Self>>,
    ) -> FloatTensor<Self> {
        Self::fused_linear(x, weight.dequantized(), bias)
    }

    /// Dequantizes the weight, as in [`quantized_linear`](LinearOps::quantized_linear).
    fn quantized_x_gradient(
        grad: FloatTensor<Self>,
        weight: &QuantizedMatrix<Self>,
    ) -> FloatTensor<Self> {
        Self::linear_x_gradient(grad, weight.dequantized())
    }

    /// Returns the gradients of weight and bias. Neither operand is a parameter, so no gather is
    /// needed here.
    fn linear_gradients(grad: FloatTensor<Self>, x: FloatTensor<Self>) -> LinearGradients<Self> {
        let inputs = x.shape().as_slice().last().copied().unwrap_or(1);
        let outputs = grad.shape().as_slice().last().copied().unwrap_or(1);
        count(&[&grad], || rows_times(&x, inputs * outputs));
        let LinearGradients { weight, bias } = B::linear_gradients(grad.into_full(), x.into_full());
        LinearGradients { weight: ZeroTensor::full(weight), bias: ZeroTensor::full(bias) }
    }
}

/// The fused loss head: the output layer and the cross entropy of its logits. Only the logits of a
/// chunk of rows are in memory at a time.
impl<B: MatmulOps + CrossEntropyOps> CrossEntropyOps for Sharded<B> {
    /// Returns the loss without gradients, for evaluation or for a part of the model that is not
    /// trained.
    fn linear_cross_entropy(
        hidden: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        targets: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        count(&[&weight], || rows_times(&hidden, weight.shape().num_elements()));
        let [loss] = recorded!(
            Cost::Low; hidden: float, weight: weight, targets: int
                => [weight::linear_cross_entropy::<B>(hidden, weight, targets)]
        );
        loss
    }

    forward! {
        fn fused_cross_entropy(logits: float, targets: int) -> float;
        fn scale_gradient(gradient: float, factor: float, dtype: [DType]) -> float;
    }

    /// Returns the loss together with the gradients that `wanted` selects, for an upstream gradient
    /// of 1.
    ///
    /// The op is not recorded. Its results include the gradients, which backward only multiplies by
    /// a scalar, and recomputing them would need a second pass over the vocabulary. The operands
    /// are still noted, because they may end a block.
    fn head_loss(
        hidden: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        targets: IntTensor<Self>,
        wanted: HeadGradients<bool>,
    ) -> HeadLoss<Self> {
        let product = || rows_times(&hidden, weight.shape().num_elements());
        count(&[&weight], product);
        // The gradients are computed here, while the logits of a chunk are in memory. Their
        // operations count as backward.
        let gradients = u64::from(wanted.hidden) + u64::from(wanted.weight);
        count_backward(&weight, || gradients * product());
        note_unrecorded(&[&hidden, &weight]);
        let (hidden, weight) = (hidden.into_full(), weight.into_weight());
        let HeadLoss { loss, gradients } =
            weight::head_loss::<B>(hidden, weight, targets.into_inner(), wanted);
        HeadLoss {
            loss: ZeroTensor::full(loss),
            gradients: HeadGradients {
                hidden: gradients.hidden.map(ZeroTensor::full),
                weight: gradients.weight.map(ZeroTensor::full),
            },
        }
    }

    /// Not recorded, because evaluations have no backward pass.
    fn head_scores(
        hidden: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        targets: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        count(&[&weight], || rows_times(&hidden, weight.shape().num_elements()));
        note_unrecorded(&[&hidden, &weight]);
        let (hidden, weight) = (hidden.into_full(), weight.into_weight());
        ZeroTensor::full(weight::head_scores::<B>(hidden, weight, targets.into_inner()))
    }

    /// Dequantizes the weight, as in [`quantized_linear`](LinearOps::quantized_linear).
    fn quantized_head_scores(
        hidden: FloatTensor<Self>,
        weight: &QuantizedMatrix<Self>,
        targets: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        Self::head_scores(hidden, weight.dequantized(), targets)
    }

    /// Dequantizes the weight, as in [`quantized_linear`](LinearOps::quantized_linear).
    fn quantized_head_loss(
        hidden: FloatTensor<Self>,
        weight: &QuantizedMatrix<Self>,
        targets: IntTensor<Self>,
        wanted: bool,
    ) -> HeadLoss<Self> {
        let wanted = HeadGradients { hidden: wanted, weight: false };
        Self::head_loss(hidden, weight.dequantized(), targets, wanted)
    }

    /// Returns the loss of given logits and, if `gradient` is set, its gradient with respect to
    /// them. Not recorded, for the same reason as [`head_loss`](CrossEntropyOps::head_loss).
    fn logits_loss(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
        gradient: bool,
    ) -> (FloatTensor<Self>, Option<FloatTensor<Self>>) {
        note_unrecorded(&[&logits]);
        let (loss, gradient) = B::logits_loss(logits.into_full(), targets.into_inner(), gradient);
        (ZeroTensor::full(loss), gradient.map(ZeroTensor::full))
    }
}

/// Self-attention over rows of queries, keys and values.
///
/// Selective activation checkpointing treats attention as an expensive product. Backward needs the
/// output and one log-sum-exp per query and head, but not the matrix of scores.
impl<B: MatmulOps + AttentionOps> AttentionOps for Sharded<B> {
    fn self_attention(
        projected: FloatTensor<Self>,
        attention: &SelfAttention,
        dropout: Option<AttentionDropout>,
    ) -> FloatTensor<Self> {
        count(&[&projected], || scores(&projected, attention, 2));
        let [output] = recorded!(
            Cost::High;
            projected: float, attention: [&SelfAttention], dropout: [Option<AttentionDropout>]
                => [B::self_attention(projected, attention, dropout)]
        );
        output
    }

    fn attention_forward(
        projected: FloatTensor<Self>,
        attention: &SelfAttention,
        dropout: Option<AttentionDropout>,
    ) -> AttentionOutput<Self> {
        count(&[&projected], || scores(&projected, attention, 2));
        let [output, log_sums] = recorded!(
            Cost::High;
            projected: float, attention: [&SelfAttention], dropout: [Option<AttentionDropout>] => {
                let attended = B::attention_forward(projected, attention, dropout);
                [attended.output, attended.log_sums]
            }
        );
        AttentionOutput { output, log_sums }
    }

    fn attention_backward(
        grad: FloatTensor<Self>,
        saved: AttentionSaved<Self>,
        attention: &SelfAttention,
    ) -> FloatTensor<Self> {
        count(&[&grad], || scores(&saved.projected, attention, 4));
        let saved = AttentionSaved {
            projected: saved.projected.into_full(),
            output: saved.output.into_full(),
            log_sums: saved.log_sums.into_full(),
            dropout: saved.dropout,
        };
        ZeroTensor::full(B::attention_backward(grad.into_full(), saved, attention))
    }

    forward! {
        fn write_to_cache(cache: float, rows: float, start: [usize]) -> float;
        #[product]
        fn attention_over_cache(
            queries: float, keys: float, values: float, filled: [usize],
            attention: [&SelfAttention],
        ) -> float;
    }
}

/// Returns the number of operations in `products` attention products. Each product pairs all
/// queries with all keys of a sequence in the batch.
///
/// Forward has two products, scores and values. Backward has four: the gradients of values,
/// probabilities, queries and keys. `projected` has a row per position. Masked positions count in
/// full, as in the convention for model FLOPs; padding beyond a row's length does not.
fn scores<B: Backend>(projected: &ZeroTensor<B>, attention: &SelfAttention, products: u64) -> u64 {
    let shape = projected.shape();
    let (rows, width) = (shape.as_slice()[0], attention.output_width(shape.as_slice()[1]));
    let length = rows / attention.batch.max(1);
    let pairs = match &attention.mask {
        AttentionMask::Causal | AttentionMask::Since(_) => attention.batch * length * length,
        AttentionMask::Window(window) => attention.batch * length * length.min(*window),
        AttentionMask::Lengths(lengths) => lengths.iter().map(|length| length * length).sum(),
    };
    products * 2 * (pairs * width) as u64
}

/// Notes the operands of an op that is not recorded, because its results are small or are
/// gradients.
fn note_unrecorded<B: Backend>(operands: &[&ZeroTensor<B>]) {
    if let Some(recorder) = recompute::recorder::<B>() {
        operands.iter().for_each(|operand| operand.note_parameter(&recorder));
        operands.iter().for_each(|operand| operand.note_value(&recorder));
        // This frees the previous block.
        drop(recorder.begin_op(Cost::Low));
    }
}
