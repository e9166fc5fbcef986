//! The op families with a forward and a backward pass.

use burn_backend::tensor::{FloatTensor, IntTensor};
use burn_backend::{DType, TensorMetadata};
use deepburn_meta::{Meta, meta_tensor};

use super::{accumulated, report};
use crate::{
    AttentionDropout, AttentionMask, AttentionOps, AttentionOutput, AttentionSaved,
    CrossEntropyOps, GateFunction, GatedGradients, GatedOps, GeluOps, HeadGradients, HeadLoss,
    LayerNormGradients, LayerNormOps, LayerNormOutput, LayerNormSaved, LinearGradients, LinearOps,
    MatmulOps, RandomOps, RmsNorm, RmsNormGradients, RmsNormOps, RmsNormOutput, RmsNormSaved,
    RotaryOps, RotatedHeads, SelfAttention, SumOps,
};

impl MatmulOps for Meta {}

impl SumOps for Meta {}

impl RandomOps for Meta {}

impl LayerNormOps for Meta {
    fn layer_norm_forward(
        x: FloatTensor<Self>,
        _gamma: FloatTensor<Self>,
        _beta: FloatTensor<Self>,
        _epsilon: f64,
    ) -> LayerNormOutput<Self> {
        let (rows, dtype) = (x.shape()[0], accumulated(x.dtype()));
        let [mean, reciprocal_deviation] = [(); 2].map(|()| meta_tensor([rows, 1], dtype));
        // Read once and written once; weights and statistics are small in comparison.
        report(0, [&x, &x]);
        LayerNormOutput { output: x, mean, reciprocal_deviation }
    }

    fn layer_norm_backward(
        grad: FloatTensor<Self>,
        saved: LayerNormSaved<Self>,
    ) -> LayerNormGradients<Self> {
        let x = meta_tensor(grad.shape(), saved.x.dtype());
        report(0, [&grad, &saved.x, &x]);
        LayerNormGradients { x, gamma: saved.gamma.clone(), beta: saved.gamma }
    }
}

impl RmsNormOps for Meta {
    fn rms_norm_forward(
        x: FloatTensor<Self>,
        _weight: FloatTensor<Self>,
        _norm: RmsNorm,
    ) -> RmsNormOutput<Self> {
        let reciprocal_root = meta_tensor([x.shape()[0], 1], accumulated(x.dtype()));
        report(0, [&x, &x]);
        RmsNormOutput { output: x, reciprocal_root }
    }

    fn rms_norm_backward(
        grad: FloatTensor<Self>,
        saved: RmsNormSaved<Self>,
        _norm: RmsNorm,
    ) -> RmsNormGradients<Self> {
        // The gradient of `x` is as large as `x`.
        report(0, [&grad, &saved.x, &saved.x]);
        RmsNormGradients { x: saved.x, weight: saved.weight }
    }
}

impl GeluOps for Meta {
    fn gelu_tanh(x: FloatTensor<Self>) -> FloatTensor<Self> {
        report(0, [&x, &x]);
        x
    }

    fn gelu_tanh_backward(grad: FloatTensor<Self>, x: FloatTensor<Self>) -> FloatTensor<Self> {
        report(0, [&grad, &x, &x]);
        x
    }
}

impl GatedOps for Meta {
    fn gated(
        gate: FloatTensor<Self>,
        up: FloatTensor<Self>,
        _function: GateFunction,
    ) -> FloatTensor<Self> {
        report(0, [&gate, &up, &gate]);
        gate
    }

    fn gated_backward(
        grad: FloatTensor<Self>,
        gate: FloatTensor<Self>,
        up: FloatTensor<Self>,
        _function: GateFunction,
    ) -> GatedGradients<Self> {
        report(0, [&grad, &gate, &up, &gate, &up]);
        GatedGradients { gate, up }
    }

    fn gated_joint(joint: FloatTensor<Self>, _function: GateFunction) -> FloatTensor<Self> {
        let output = meta_tensor([joint.shape()[0], joint.shape()[1] / 2], joint.dtype());
        report(0, [&joint, &output]);
        output
    }

    fn gated_joint_backward(
        grad: FloatTensor<Self>,
        joint: FloatTensor<Self>,
        _function: GateFunction,
    ) -> FloatTensor<Self> {
        report(0, [&grad, &joint, &joint]);
        joint
    }
}

impl RotaryOps for Meta {
    fn rotate_heads(
        x: FloatTensor<Self>,
        _cos: FloatTensor<Self>,
        _sin: FloatTensor<Self>,
        _heads: RotatedHeads,
    ) -> FloatTensor<Self> {
        report(0, [&x, &x]);
        x
    }

    fn rotate_heads_back(
        grad: FloatTensor<Self>,
        _cos: FloatTensor<Self>,
        _sin: FloatTensor<Self>,
        _heads: RotatedHeads,
    ) -> FloatTensor<Self> {
        // In place in the flex kernel: read once and written once.
        report(0, [&grad, &grad]);
        grad
    }
}

impl LinearOps for Meta {
    fn fused_linear(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        _bias: Option<FloatTensor<Self>>,
    ) -> FloatTensor<Self> {
        let output = meta_tensor([x.shape()[0], weight.shape()[1]], x.dtype());
        report(products(&x, &weight), [&x, &weight, &output]);
        output
    }

    fn linear_x_gradient(grad: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self> {
        let output = meta_tensor([grad.shape()[0], weight.shape()[0]], grad.dtype());
        report(products(&grad, &weight), [&grad, &weight, &output]);
        output
    }

    fn linear_gradients(grad: FloatTensor<Self>, x: FloatTensor<Self>) -> LinearGradients<Self> {
        let (inputs, outputs, dtype) = (x.shape()[1], grad.shape()[1], grad.dtype());
        let weight = meta_tensor([inputs, outputs], dtype);
        report(products(&grad, &weight), [&grad, &x, &weight]);
        LinearGradients { weight, bias: meta_tensor([outputs], dtype) }
    }
}

impl CrossEntropyOps for Meta {
    fn head_loss(
        hidden: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        _targets: IntTensor<Self>,
        wanted: HeadGradients<bool>,
    ) -> HeadLoss<Self> {
        let dtype = accumulated(hidden.dtype());
        // A product for the logits, and one for each gradient. The logits of a chunk are written
        // and read by each.
        let passes = 1 + u64::from(wanted.hidden) + u64::from(wanted.weight);
        let logits = meta_tensor([hidden.shape()[0], weight.shape()[0]], dtype);
        for _ in 0..passes {
            report(products(&hidden, &weight), [&hidden, &weight, &logits]);
        }
        HeadLoss {
            loss: meta_tensor([1], dtype),
            gradients: HeadGradients {
                hidden: wanted.hidden.then(|| meta_tensor(hidden.shape(), dtype)),
                weight: wanted.weight.then(|| meta_tensor(weight.shape(), dtype)),
            },
        }
    }

    fn logits_loss(
        logits: FloatTensor<Self>,
        _targets: IntTensor<Self>,
        gradient: bool,
    ) -> (FloatTensor<Self>, Option<FloatTensor<Self>>) {
        let dtype = accumulated(logits.dtype());
        report(0, [&logits, &logits]);
        (meta_tensor([1], dtype), gradient.then(|| meta_tensor(logits.shape(), dtype)))
    }

    fn scale_gradient(
        gradient: FloatTensor<Self>,
        _factor: FloatTensor<Self>,
        dtype: DType,
    ) -> FloatTensor<Self> {
        let scaled = meta_tensor(gradient.shape(), dtype);
        report(0, [&gradient, &scaled]);
        scaled
    }
}

impl AttentionOps for Meta {
    fn attention_forward(
        projected: FloatTensor<Self>,
        attention: &SelfAttention,
        _dropout: Option<AttentionDropout>,
    ) -> AttentionOutput<Self> {
        let (rows, width) = (projected.shape()[0], attention.output_width(projected.shape()[1]));
        let (batch, dtype) = (attention.batch, projected.dtype());
        let positions = rows / batch.max(1);
        let output = meta_tensor([rows, width], dtype);
        // Queries times keys, and probabilities times values.
        report(2 * scores(&projected, attention), [&projected, &output]);
        AttentionOutput {
            output,
            log_sums: meta_tensor([batch * attention.heads, positions], accumulated(dtype)),
        }
    }

    fn attention_backward(
        grad: FloatTensor<Self>,
        saved: AttentionSaved<Self>,
        attention: &SelfAttention,
    ) -> FloatTensor<Self> {
        // The scores again, and the gradients of values, probabilities, queries and keys.
        let operations = 5 * scores(&saved.projected, attention);
        report(operations, [&grad, &saved.projected, &saved.projected]);
        saved.projected
    }
}

/// Returns the operations of multiplying each row of `rows` by `matrix`, one of whose axes is the
/// length of a row.
fn products(rows: &FloatTensor<Meta>, matrix: &FloatTensor<Meta>) -> u64 {
    2 * (rows.shape()[0] * matrix.shape().num_elements()) as u64
}

/// Returns the operations of one product of all queries and keys. The kernels skip most of the keys
/// that a causal mask or a window hides.
fn scores(projected: &FloatTensor<Meta>, attention: &SelfAttention) -> u64 {
    let (rows, width) = (projected.shape()[0], attention.output_width(projected.shape()[1]));
    let positions = rows / attention.batch.max(1);
    let pairs = match &attention.mask {
        AttentionMask::Causal | AttentionMask::Since(_) => {
            attention.batch * positions * (positions + 1) / 2
        }
        // The first queries see fewer keys than the window has.
        AttentionMask::Window(window) => {
            let window = positions.min(*window);
            attention.batch * (positions * window - window * window.saturating_sub(1) / 2)
        }
        AttentionMask::Lengths(_) => attention.batch * positions * positions,
    };
    2 * (pairs * width) as u64
}
