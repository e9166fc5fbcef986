//! Fused ops, with operands cast to one type.
//!
//! A fused op computes internally in f32, regardless of the type of its operands. Only the operands
//! of products and the operands that determine the result type are cast. Methods with an output or
//! saved-state struct are not generated, because these structs are generic over the backend. Each
//! method moves the fields into the struct of the other backend.

use burn_backend::DType;
use burn_backend::tensor::{FloatTensor, IntTensor};
use deepburn_ops::{
    AttentionDropout, AttentionOps, AttentionOutput, AttentionSaved, CrossEntropyOps, GateFunction,
    GatedGradients, GatedOps, GeluOps, HeadGradients, HeadLoss, LayerNormGradients, LayerNormOps,
    LayerNormOutput, LayerNormSaved, LinearGradients, LinearOps, RmsNorm, RmsNormGradients,
    RmsNormOps, RmsNormOutput, RmsNormSaved, RotaryOps, RotatedHeads, SelfAttention,
};

use super::ops::cast;
use super::{Autocast, CastRule, Operands, TracksParameters, in_type};

/// Only the op that a model calls casts its operands. The autodiff node of this op calls
/// `layer_norm_forward` and `layer_norm_backward` of the inner backend, with operands that already
/// have one type.
impl<B: TracksParameters + LayerNormOps> LayerNormOps for Autocast<B> {
    cast! {
        #[full] fn fused_layer_norm(x: float, gamma: float, beta: float, epsilon: [f64]) -> float;
    }

    fn layer_norm_forward(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        epsilon: f64,
    ) -> LayerNormOutput<Self> {
        let LayerNormOutput { output, mean, reciprocal_deviation } =
            B::layer_norm_forward(x, gamma, beta, epsilon);
        LayerNormOutput { output, mean, reciprocal_deviation }
    }

    fn layer_norm_backward(
        grad: FloatTensor<Self>,
        saved: LayerNormSaved<Self>,
    ) -> LayerNormGradients<Self> {
        let LayerNormSaved { x, gamma, mean, reciprocal_deviation } = saved;
        let saved = LayerNormSaved { x, gamma, mean, reciprocal_deviation };
        let LayerNormGradients { x, gamma, beta } = B::layer_norm_backward(grad, saved);
        LayerNormGradients { x, gamma, beta }
    }
}

/// As for layer norm. Under autocast the op runs in f32, and no quotient is rounded.
impl<B: TracksParameters + RmsNormOps> RmsNormOps for Autocast<B> {
    cast! {
        #[full] fn fused_rms_norm(x: float, weight: float, norm: [RmsNorm]) -> float;
    }

    fn rms_norm_forward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        norm: RmsNorm,
    ) -> RmsNormOutput<Self> {
        let RmsNormOutput { output, reciprocal_root } = B::rms_norm_forward(x, weight, norm);
        RmsNormOutput { output, reciprocal_root }
    }

    fn rms_norm_backward(
        grad: FloatTensor<Self>,
        saved: RmsNormSaved<Self>,
        norm: RmsNorm,
    ) -> RmsNormGradients<Self> {
        let RmsNormSaved { x, weight, reciprocal_root } = saved;
        let saved = RmsNormSaved { x, weight, reciprocal_root };
        let RmsNormGradients { x, weight } = B::rms_norm_backward(grad, saved, norm);
        RmsNormGradients { x, weight }
    }
}

impl<B: TracksParameters + GeluOps> GeluOps for Autocast<B> {
    cast! {
        fn gelu_tanh(x: float) -> float;
        fn gelu_tanh_backward(grad: float, x: float) -> float;
    }
}

impl<B: TracksParameters + GatedOps> GatedOps for Autocast<B> {
    cast! {
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
        let GatedGradients { gate, up } = B::gated_backward(grad, gate, up, function);
        GatedGradients { gate, up }
    }
}

/// The table is f32 and is not cast: the op rounds it to the type of the rotated matrix.
impl<B: TracksParameters + RotaryOps> RotaryOps for Autocast<B> {
    fn rotate_heads(
        x: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        heads: RotatedHeads,
    ) -> FloatTensor<Self> {
        B::rotate_heads(x, cos, sin, heads)
    }

    fn rotate_heads_back(
        grad: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        heads: RotatedHeads,
    ) -> FloatTensor<Self> {
        B::rotate_heads_back(grad, cos, sin, heads)
    }
}

impl<B: TracksParameters + LinearOps> LinearOps for Autocast<B> {
    cast! {
        #[product] fn fused_linear(x: float, weight: float, bias: maybe_float) -> float;
        fn linear_x_gradient(grad: float, weight: float) -> float;
    }

    fn linear_gradients(grad: FloatTensor<Self>, x: FloatTensor<Self>) -> LinearGradients<Self> {
        let LinearGradients { weight, bias } = B::linear_gradients(grad, x);
        LinearGradients { weight, bias }
    }
}

impl<B: TracksParameters + CrossEntropyOps> CrossEntropyOps for Autocast<B> {
    cast! {
        #[product] fn linear_cross_entropy(hidden: float, weight: float, targets: int) -> float;
        #[product] fn head_scores(hidden: float, weight: float, targets: int) -> float;
        fn fused_cross_entropy(logits: float, targets: int) -> float;
        fn scale_gradient(gradient: float, factor: float, dtype: [DType]) -> float;
    }

    /// Casts the hidden states and the weight like the operands of a product. The targets are
    /// integers and are not cast.
    fn head_loss(
        hidden: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        targets: IntTensor<Self>,
        wanted: HeadGradients<bool>,
    ) -> HeadLoss<Self> {
        let mut operands = Operands::default();
        [&hidden, &weight].into_iter().for_each(|tensor| operands.see::<B>(tensor));
        let dtype = operands.common(CastRule::Product);
        let [hidden, weight] = [hidden, weight].map(|tensor| in_type::<B>(tensor, dtype));
        let HeadLoss { loss, gradients: HeadGradients { hidden, weight } } =
            B::head_loss(hidden, weight, targets, wanted);
        HeadLoss { loss, gradients: HeadGradients { hidden, weight } }
    }

    fn logits_loss(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
        gradient: bool,
    ) -> (FloatTensor<Self>, Option<FloatTensor<Self>>) {
        B::logits_loss(logits, targets, gradient)
    }
}

impl<B: TracksParameters + AttentionOps> AttentionOps for Autocast<B> {
    fn self_attention(
        projected: FloatTensor<Self>,
        attention: &SelfAttention,
        dropout: Option<AttentionDropout>,
    ) -> FloatTensor<Self> {
        B::self_attention(product_operand::<B>(projected), attention, dropout)
    }

    fn attention_forward(
        projected: FloatTensor<Self>,
        attention: &SelfAttention,
        dropout: Option<AttentionDropout>,
    ) -> AttentionOutput<Self> {
        let AttentionOutput { output, log_sums } =
            B::attention_forward(product_operand::<B>(projected), attention, dropout);
        AttentionOutput { output, log_sums }
    }

    fn attention_backward(
        grad: FloatTensor<Self>,
        saved: AttentionSaved<Self>,
        attention: &SelfAttention,
    ) -> FloatTensor<Self> {
        let AttentionSaved { projected, output, log_sums, dropout } = saved;
        let saved = AttentionSaved { projected, output, log_sums, dropout };
        B::attention_backward(grad, saved, attention)
    }

    fn write_to_cache(
        cache: FloatTensor<Self>,
        rows: FloatTensor<Self>,
        start: usize,
    ) -> FloatTensor<Self> {
        B::write_to_cache(cache, rows, start)
    }

    fn attention_over_cache(
        queries: FloatTensor<Self>,
        keys: FloatTensor<Self>,
        values: FloatTensor<Self>,
        filled: usize,
        attention: &SelfAttention,
    ) -> FloatTensor<Self> {
        let [queries, keys, values] = [queries, keys, values].map(product_operand::<B>);
        B::attention_over_cache(queries, keys, values, filled, attention)
    }
}

/// Casts the single operand of a product. Its type changes only under autocast.
fn product_operand<B: TracksParameters>(tensor: FloatTensor<B>) -> FloatTensor<B> {
    let mut operands = Operands::default();
    operands.see::<B>(&tensor);
    in_type::<B>(tensor, operands.common(CastRule::Product))
}
