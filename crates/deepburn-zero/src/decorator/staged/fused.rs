//! The fused ops of [`Staged`].
//!
//! `staged!` runs an op with several results on the stage that holds its operands, as `stage!` does
//! for the tables. The op is a function that is generic over the backend, because other stages run
//! it on `Meta`.

use burn_backend::DType;
use burn_backend::tensor::{FloatTensor, IntTensor};
use deepburn_meta::Meta;
use deepburn_ops::{
    AttentionDropout, AttentionOps, AttentionOutput, AttentionSaved, CrossEntropyOps, GateFunction,
    GatedGradients, GatedOps, GeluOps, HeadGradients, HeadLoss, LayerNormGradients, LayerNormOps,
    LayerNormOutput, LayerNormSaved, LinearGradients, LinearOps, MatmulOps, RmsNorm,
    RmsNormGradients, RmsNormOps, RmsNormOutput, RmsNormSaved, RotaryOps, RotatedHeads,
    SelfAttention,
};

use super::ops::{absent, held, stage};
use super::{PlacedTensor, Staged};
use crate::decorator::Sharded;
use crate::pipeline::OperandHolders;

/// Runs an op whose results are an array of floats. With `maybe`, each result is optional.
macro_rules! staged {
    ($($arg:ident: $kind:tt),* => $run:ident) => {
        staged!(@run each, $($arg: $kind),* => $run)
    };
    (maybe $($arg:ident: $kind:tt),* => $run:ident) => {
        staged!(@run maybe, $($arg: $kind),* => $run)
    };
    (@place each $results:expr, $place:expr) => { $results.map($place) };
    (@place maybe $results:expr, $place:expr) => { $results.map(|result| result.map($place)) };
    (@run $mode:ident, $($arg:ident: $kind:tt),* => $run:ident) => {{
        let mut operands = OperandHolders::default();
        $( stage!(@see operands $kind $arg); )*
        match operands.site::<B>() {
            None => {
                $( let $arg = stage!(@open $kind $arg); )*
                staged!(@place $mode $run::<Sharded<B>>($($arg),*), PlacedTensor::Everywhere)
            }
            Some(site) => {
                $( let $arg = stage!(@bring site $kind $arg); )*
                if site.is_here() {
                    $( let $arg = stage!(@open $kind $arg); )*
                    staged!(@place $mode $run::<Sharded<B>>($($arg),*), |it| site.hold(it))
                } else {
                    $( let $arg = stage!(@meta $kind $arg); )*
                    deepburn_meta::without_work(|| {
                        staged!(@place $mode $run::<Meta>($($arg),*), |it| site.absent(&it))
                    })
                }
            }
        }
    }};
}

impl<B: MatmulOps + LayerNormOps> LayerNormOps for Staged<B> {
    stage! {
        fn fused_layer_norm(x: float, gamma: float, beta: float, epsilon: [f64]) -> float;
    }

    fn layer_norm_forward(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        epsilon: f64,
    ) -> LayerNormOutput<Self> {
        fn run<O: LayerNormOps>(
            x: FloatTensor<O>,
            gamma: FloatTensor<O>,
            beta: FloatTensor<O>,
            epsilon: f64,
        ) -> [FloatTensor<O>; 3] {
            let normed = O::layer_norm_forward(x, gamma, beta, epsilon);
            [normed.output, normed.mean, normed.reciprocal_deviation]
        }
        let [output, mean, reciprocal_deviation] =
            staged!(x: float, gamma: float, beta: float, epsilon: [f64] => run);
        LayerNormOutput { output, mean, reciprocal_deviation }
    }

    fn layer_norm_backward(
        grad: FloatTensor<Self>,
        saved: LayerNormSaved<Self>,
    ) -> LayerNormGradients<Self> {
        fn run<O: LayerNormOps>(
            grad: FloatTensor<O>,
            x: FloatTensor<O>,
            gamma: FloatTensor<O>,
            mean: FloatTensor<O>,
            reciprocal_deviation: FloatTensor<O>,
        ) -> [FloatTensor<O>; 3] {
            let saved = LayerNormSaved { x, gamma, mean, reciprocal_deviation };
            let LayerNormGradients { x, gamma, beta } = O::layer_norm_backward(grad, saved);
            [x, gamma, beta]
        }
        let LayerNormSaved { x, gamma, mean, reciprocal_deviation } = saved;
        let [x, gamma, beta] = staged!(
            grad: float, x: float, gamma: float, mean: float, reciprocal_deviation: float => run
        );
        LayerNormGradients { x, gamma, beta }
    }
}

impl<B: MatmulOps + RmsNormOps> RmsNormOps for Staged<B> {
    stage! {
        fn fused_rms_norm(x: float, weight: float, norm: [RmsNorm]) -> float;
    }

    fn rms_norm_forward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        norm: RmsNorm,
    ) -> RmsNormOutput<Self> {
        fn run<O: RmsNormOps>(
            x: FloatTensor<O>,
            weight: FloatTensor<O>,
            norm: RmsNorm,
        ) -> [FloatTensor<O>; 2] {
            let RmsNormOutput { output, reciprocal_root } = O::rms_norm_forward(x, weight, norm);
            [output, reciprocal_root]
        }
        let [output, reciprocal_root] = staged!(x: float, weight: float, norm: [RmsNorm] => run);
        RmsNormOutput { output, reciprocal_root }
    }

    fn rms_norm_backward(
        grad: FloatTensor<Self>,
        saved: RmsNormSaved<Self>,
        norm: RmsNorm,
    ) -> RmsNormGradients<Self> {
        fn run<O: RmsNormOps>(
            grad: FloatTensor<O>,
            x: FloatTensor<O>,
            weight: FloatTensor<O>,
            reciprocal_root: FloatTensor<O>,
            norm: RmsNorm,
        ) -> [FloatTensor<O>; 2] {
            let saved = RmsNormSaved { x, weight, reciprocal_root };
            let RmsNormGradients { x, weight } = O::rms_norm_backward(grad, saved, norm);
            [x, weight]
        }
        let RmsNormSaved { x, weight, reciprocal_root } = saved;
        let [x, weight] = staged!(
            grad: float, x: float, weight: float, reciprocal_root: float, norm: [RmsNorm] => run
        );
        RmsNormGradients { x, weight }
    }
}

impl<B: MatmulOps + GeluOps> GeluOps for Staged<B> {
    stage! {
        fn gelu_tanh(x: float) -> float;
        fn gelu_tanh_backward(grad: float, x: float) -> float;
    }
}

impl<B: MatmulOps + GatedOps> GatedOps for Staged<B> {
    stage! {
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
        fn run<O: GatedOps>(
            grad: FloatTensor<O>,
            gate: FloatTensor<O>,
            up: FloatTensor<O>,
            function: GateFunction,
        ) -> [FloatTensor<O>; 2] {
            let GatedGradients { gate, up } = O::gated_backward(grad, gate, up, function);
            [gate, up]
        }
        let [gate, up] =
            staged!(grad: float, gate: float, up: float, function: [GateFunction] => run);
        GatedGradients { gate, up }
    }
}

impl<B: MatmulOps + RotaryOps> RotaryOps for Staged<B> {
    stage! {
        fn rotate_heads(x: float, cos: float, sin: float, heads: [RotatedHeads]) -> float;
        fn rotate_heads_back(grad: float, cos: float, sin: float, heads: [RotatedHeads]) -> float;
    }
}

impl<B: MatmulOps + LinearOps> LinearOps for Staged<B> {
    stage! {
        fn fused_linear(x: float, weight: float, bias: maybe_float) -> float;
        fn linear_x_gradient(grad: float, weight: float) -> float;
    }

    fn linear_gradients(grad: FloatTensor<Self>, x: FloatTensor<Self>) -> LinearGradients<Self> {
        fn run<O: LinearOps>(grad: FloatTensor<O>, x: FloatTensor<O>) -> [FloatTensor<O>; 2] {
            let LinearGradients { weight, bias } = O::linear_gradients(grad, x);
            [weight, bias]
        }
        let [weight, bias] = staged!(grad: float, x: float => run);
        LinearGradients { weight, bias }
    }
}

impl<B: MatmulOps + CrossEntropyOps> CrossEntropyOps for Staged<B> {
    stage! {
        fn linear_cross_entropy(hidden: float, weight: float, targets: int) -> float;
        fn head_scores(hidden: float, weight: float, targets: int) -> float;
        fn fused_cross_entropy(logits: float, targets: int) -> float;
        fn scale_gradient(gradient: float, factor: float, dtype: [DType]) -> float;
    }

    fn head_loss(
        hidden: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        targets: IntTensor<Self>,
        wanted: HeadGradients<bool>,
    ) -> HeadLoss<Self> {
        fn run<O: CrossEntropyOps>(
            hidden: FloatTensor<O>,
            weight: FloatTensor<O>,
            targets: IntTensor<O>,
            wanted: HeadGradients<bool>,
        ) -> [Option<FloatTensor<O>>; 3] {
            let HeadLoss { loss, gradients } = O::head_loss(hidden, weight, targets, wanted);
            [Some(loss), gradients.hidden, gradients.weight]
        }
        let [loss, hidden, weight] = staged!(
            maybe hidden: float, weight: float, targets: int, wanted: [HeadGradients<bool>] => run
        );
        let Some(loss) = loss else { unreachable!("`run` returns a loss") };
        HeadLoss { loss, gradients: HeadGradients { hidden, weight } }
    }

    fn logits_loss(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
        gradient: bool,
    ) -> (FloatTensor<Self>, Option<FloatTensor<Self>>) {
        fn run<O: CrossEntropyOps>(
            logits: FloatTensor<O>,
            targets: IntTensor<O>,
            gradient: bool,
        ) -> [Option<FloatTensor<O>>; 2] {
            let (loss, gradient) = O::logits_loss(logits, targets, gradient);
            [Some(loss), gradient]
        }
        let [loss, gradient] = staged!(maybe logits: float, targets: int, gradient: [bool] => run);
        let Some(loss) = loss else { unreachable!("`run` returns a loss") };
        (loss, gradient)
    }
}

impl<B: MatmulOps + AttentionOps> AttentionOps for Staged<B> {
    stage! {
        fn self_attention(
            projected: float, attention: [&SelfAttention], dropout: [Option<AttentionDropout>],
        ) -> float;
        fn write_to_cache(cache: float, rows: float, start: [usize]) -> float;
        fn attention_over_cache(
            queries: float, keys: float, values: float, filled: [usize],
            attention: [&SelfAttention],
        ) -> float;
    }

    fn attention_forward(
        projected: FloatTensor<Self>,
        attention: &SelfAttention,
        dropout: Option<AttentionDropout>,
    ) -> AttentionOutput<Self> {
        fn run<O: AttentionOps>(
            projected: FloatTensor<O>,
            attention: &SelfAttention,
            dropout: Option<AttentionDropout>,
        ) -> [FloatTensor<O>; 2] {
            let AttentionOutput { output, log_sums } =
                O::attention_forward(projected, attention, dropout);
            [output, log_sums]
        }
        let [output, log_sums] = staged!(
            projected: float, attention: [&SelfAttention],
            dropout: [Option<AttentionDropout>] => run
        );
        AttentionOutput { output, log_sums }
    }

    fn attention_backward(
        grad: FloatTensor<Self>,
        saved: AttentionSaved<Self>,
        attention: &SelfAttention,
    ) -> FloatTensor<Self> {
        fn run<O: AttentionOps>(
            grad: FloatTensor<O>,
            projected: FloatTensor<O>,
            output: FloatTensor<O>,
            log_sums: FloatTensor<O>,
            dropout: Option<AttentionDropout>,
            attention: &SelfAttention,
        ) -> [FloatTensor<O>; 1] {
            let saved = AttentionSaved { projected, output, log_sums, dropout };
            [O::attention_backward(grad, saved, attention)]
        }
        let AttentionSaved { projected, output, log_sums, dropout } = saved;
        let [gradient] = staged!(
            grad: float, projected: float, output: float, log_sums: float,
            dropout: [Option<AttentionDropout>], attention: [&SelfAttention] => run
        );
        gradient
    }
}
