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

use burn_backend::tensor::{Device, FloatTensor, IntTensor};
use burn_backend::{DType, FloatDType, Shape, TensorMetadata, get_device_settings};
use deepburn_kernels::ChaChaPosition;
use deepburn_ops::{
    AttentionDropout, AttentionMask, AttentionOps, AttentionOutput, AttentionSaved,
    CrossEntropyOps, ElementDropout, GateFunction, GatedGradients, GatedOps, GeluOps,
    HeadGradients, HeadLoss, LayerNormGradients, LayerNormOps, LayerNormOutput, LayerNormSaved,
    LinearGradients, LinearOps, MatmulOps, QuantizedMatrix, RandomOps, RmsNorm, RmsNormGradients,
    RmsNormOps, RmsNormOutput, RmsNormSaved, RotaryOps, RotatedHeads, SEED_DRAWS, SelfAttention,
    SumOps, is_without_data, seed_distribution, seed_from,
};

use crate::decorator::fused::fused_ops;
use crate::decorator::ops::float::draw_on_host;
use crate::decorator::ops::product::{cost, count, count_backward, rows_times};
use crate::decorator::ops::weight_gradients::weight_gradients;
use crate::decorator::ops::{forward, recorded, weight};
use crate::decorator::{Sharded, ZeroTensor};
use crate::recompute::{self, Cost};
use crate::session::{self, RandomStream};

// The output of a norm and the statistics of each row, which backward needs, are the results of one
// recorded op.
fused_ops!(forward, Sharded, MatmulOps);

/// Linear layers: `x [.., inputs]` times `weight`, plus an optional bias.
///
/// The methods for a quantized weight dequantize it. The blocks of a quantized parameter do not
/// come there: the other methods read them from its handle.
impl<B: MatmulOps + LinearOps> LinearOps for Sharded<B> {
    fn fused_linear(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: Option<FloatTensor<Self>>,
    ) -> FloatTensor<Self> {
        count(&[&weight], || rows_times(&x, weight.shape().num_elements()));
        let [output] = recorded!(
            cost(&x); x: float, weight: weight, bias: (maybe float) => [weight::linear::<B>(x, weight, bias)]
        );
        output
    }

    fn quantized_linear(
        x: FloatTensor<Self>,
        weight: &QuantizedMatrix<Self>,
        bias: Option<FloatTensor<Self>>,
    ) -> FloatTensor<Self> {
        Self::fused_linear(x, weight.dequantized(), bias)
    }

    fn quantized_x_gradient(
        grad: FloatTensor<Self>,
        weight: &QuantizedMatrix<Self>,
    ) -> FloatTensor<Self> {
        Self::linear_x_gradient(grad, weight.dequantized())
    }

    fn linear_x_gradient(grad: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self> {
        count(&[&weight], || rows_times(&grad, weight.shape().num_elements()));
        ZeroTensor::full(weight::linear_x_gradient::<B>(grad.into_full(), weight.into_weight()))
    }

    /// Returns the gradients of weight and bias. Neither operand is a parameter, so no gather is
    /// needed here, and a pipeline stage may defer the op.
    fn linear_gradients(grad: FloatTensor<Self>, x: FloatTensor<Self>) -> LinearGradients<Self> {
        let inputs = x.shape().as_slice().last().copied().unwrap_or(1);
        let outputs = grad.shape().as_slice().last().copied().unwrap_or(1);
        count(&[&grad], || rows_times(&x, inputs * outputs));
        let shapes = [[inputs, outputs].into(), [outputs].into()];
        let [weight, bias] = weight_gradients([grad, x], shapes, |[grad, x]| {
            let LinearGradients { weight, bias } = B::linear_gradients(grad, x);
            [weight, bias]
        });
        LinearGradients { weight, bias }
    }
}

/// The fused loss head: the output layer and the cross entropy of its logits. Only the logits of a
/// chunk of rows are in memory at a time. The methods for a quantized weight dequantize it, as for
/// linear layers.
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

    fn quantized_head_scores(
        hidden: FloatTensor<Self>,
        weight: &QuantizedMatrix<Self>,
        targets: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        Self::head_scores(hidden, weight.dequantized(), targets)
    }

    fn quantized_head_loss(
        hidden: FloatTensor<Self>,
        weight: &QuantizedMatrix<Self>,
        targets: IntTensor<Self>,
        wanted: bool,
    ) -> HeadLoss<Self> {
        let wanted = HeadGradients { hidden: wanted, weight: false };
        Self::head_loss(hidden, weight.dequantized(), targets, wanted)
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

/// Dropout draws from the rank's own stream. With recomputation, the elements are drawn again from
/// the same position.
impl<B: MatmulOps> RandomOps for Sharded<B> {
    /// Random tensors are drawn by the plain op.
    fn bernoulli(
        _position: &ChaChaPosition,
        _probability: f64,
        _shape: &Shape,
        _device: &Device<Self>,
        _dtype: FloatDType,
    ) -> Option<FloatTensor<Self>> {
        None
    }

    fn has_dropout(len: usize, dtype: FloatDType) -> bool {
        B::has_dropout(len, dtype)
    }

    fn take_dropout(
        _device: &Device<Self>,
        len: usize,
        dtype: FloatDType,
    ) -> Option<ChaChaPosition> {
        let take = |random: &mut RandomStream| {
            let position = random.on_device();
            // A u64 each, of two words.
            random.seek(position.word + 2 * len as u128);
            position
        };
        B::has_dropout(len, dtype).then(|| session::with_random(take)).flatten()
    }

    forward! {
        fn drop_elements(x: float, dropout: [ElementDropout]) -> float;
    }
}

/// Self-attention over rows of queries, keys and values.
///
/// Selective activation checkpointing treats attention as an expensive product. Backward needs the
/// output and one log-sum-exp per query and head, but not the matrix of scores.
impl<B: MatmulOps + AttentionOps> AttentionOps for Sharded<B> {
    /// Draws from the rank's own stream, which is on the host, so that nothing waits for the
    /// device. A random tensor of the default type would have the same numbers.
    fn dropout_seed(device: &Device<Self>) -> u64 {
        if is_without_data::<B>() {
            return B::dropout_seed(device);
        }
        let dtype = get_device_settings::<Self>(device).float_dtype;
        let drawn = session::with_random(|random| {
            draw_on_host(random, Shape::from(vec![SEED_DRAWS]), seed_distribution(), dtype)
        });
        match drawn {
            Some(draws) => seed_from(&draws),
            None => B::dropout_seed(device),
        }
    }

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
fn scores<B: SumOps>(projected: &ZeroTensor<B>, attention: &SelfAttention, products: u64) -> u64 {
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
fn note_unrecorded<B: SumOps>(operands: &[&ZeroTensor<B>]) {
    if let Some(recorder) = recompute::recorder::<B>() {
        operands.iter().for_each(|operand| operand.note_parameter(&recorder));
        operands.iter().for_each(|operand| operand.note_value(&recorder));
        // This frees the previous block.
        drop(recorder.begin_op(Cost::Low));
    }
}
