//! Softmax cross-entropy fused with the preceding linear layer, with ops that every backend
//! supports.
//!
//! For a row of logits `l` and a target `t`, the loss is `log(sum(exp(l))) - l[t]` and its gradient
//! `softmax(l) - one_hot(t)`. The maximum of each row is subtracted from its logits before the
//! exponentials. A logit of NaN or plus infinity makes the loss and the gradient of its row NaN.
//!
//! Only one chunk of tokens is processed at a time ([`logits_chunk_rows`]). Several tensors of
//! `[rows, vocab]` exist for this chunk, in at least f32: the logits, the shifted logits, the
//! exponentials and the gradient.

use burn::tensor::{DType, Int, Tensor};
use burn_backend::{Backend, TensorMetadata};

use super::{cast, in_f32, matmul, primitive, tensor};
use crate::cross_entropy::head::{HeadGradients, HeadLoss, logits_chunk_rows};
use crate::matmul::MatmulOps;
use crate::sum::SumOps;

/// Returns the summed loss, `[1]`, of logits `[tokens, vocab]` and, if requested, its gradient with
/// respect to the logits.
///
/// A negative target is replaced by 0, which is a valid index, and its loss and gradient are masked
/// afterwards. A target beyond the vocabulary fails in the backend, or gives an arbitrary loss if
/// the backend does not check indices.
///
/// Each of the following steps runs as tensor ops on the device:
///
/// ```text
/// shifted      = logits - max of the row
/// loss         = log(sum(exp(shifted))) - shifted[target]     0 for masked rows
/// probability  = exp(shifted) / sum
/// gradient     = probability - 1 at the target                0 for masked rows
/// ```
fn chunk<B: SumOps>(
    logits: Tensor<B, 2>,
    targets: Tensor<B, 1, Int>,
    gradient: bool,
) -> (Tensor<B, 1>, Option<Tensor<B, 2>>) {
    let targets: Tensor<B, 2, Int> = targets.unsqueeze_dim(1);
    let masked = targets.clone().lower_elem(0);
    let targets = targets.clamp_min(0);
    let shifted = logits.clone() - logits.max_dim(1);
    let target = shifted.clone().gather(1, targets.clone());
    let exponentials = shifted.exp();
    let sums = exponentials.clone().sum_dim(1);
    let losses = (sums.clone().log() - target).mask_fill(masked.clone(), 0.0);
    let loss = tensor(B::sum(primitive(losses)));
    let gradient = gradient.then(|| {
        let probabilities = exponentials / sums;
        // The value -1 for each target, with the matching shape, element type and device.
        let ones = targets.clone().float().cast(probabilities.dtype()) * 0.0 - 1.0;
        let [rows, vocab] = probabilities.dims();
        probabilities
            .scatter(1, targets, ones, burn::tensor::IndexingUpdateOp::Add)
            .mask_fill(masked.expand([rows, vocab]), 0.0)
    });
    (loss, gradient)
}

/// Implements [`CrossEntropyOps::head_loss`](crate::CrossEntropyOps::head_loss).
///
/// Products are computed in the type of the inputs, so 16-bit inputs use the hardware's 16-bit
/// instructions. The gradient of the logits is first rounded to this type. Sums over chunks are
/// accumulated in at least f32.
///
/// Gradients that are not requested are not computed.
pub fn head_loss<B: MatmulOps>(
    hidden: B::FloatTensorPrimitive,
    weight: B::FloatTensorPrimitive,
    targets: B::IntTensorPrimitive,
    wanted: HeadGradients<bool>,
) -> HeadLoss<B> {
    let (hidden, weight): (Tensor<B, 2>, Tensor<B, 2>) = (tensor(hidden), tensor(weight));
    let targets: Tensor<B, 1, Int> = Tensor::from_primitive(targets);
    let ([tokens, width], [vocab, _]) = (hidden.dims(), weight.dims());
    let (device, dtype) = (hidden.device(), hidden.dtype());
    let sum_dtype = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
    let mut loss = Tensor::<B, 1>::zeros([1], (&device, sum_dtype));
    let mut hidden_grads = Vec::new();
    let mut weight_grad: Option<Tensor<B, 2>> = None;
    let step = logits_chunk_rows(tokens, vocab);
    for start in (0..tokens).step_by(step) {
        let rows = start..tokens.min(start + step);
        let rows_of_hidden = hidden.clone().slice([rows.clone(), 0..width]);
        let logits = in_f32(matmul(rows_of_hidden.clone(), weight.clone().transpose()));
        let any = wanted.hidden || wanted.weight;
        let (sum, gradient) = chunk(logits, targets.clone().slice([rows]), any);
        loss = loss + sum;
        // Rounded once for both products.
        let Some(gradient) = gradient.map(|gradient| cast(gradient, dtype)) else { continue };
        if wanted.hidden {
            hidden_grads.push(in_f32(matmul(gradient.clone(), weight.clone())));
        }
        if wanted.weight {
            let part = in_f32(matmul(gradient.transpose(), rows_of_hidden));
            weight_grad = Some(match weight_grad {
                Some(sum) => sum + part,
                None => part,
            });
        }
    }
    // Without tokens there are no chunks: the gradients are empty or 0.
    let zeros = |rows| Tensor::<B, 2>::zeros([rows, width], (&device, sum_dtype));
    let hidden_grad = wanted.hidden.then(|| match hidden_grads.is_empty() {
        true => zeros(0),
        false => Tensor::cat(hidden_grads, 0),
    });
    let weight_grad = wanted.weight.then(|| weight_grad.unwrap_or_else(|| zeros(vocab)));
    HeadLoss {
        loss: primitive(loss),
        gradients: HeadGradients {
            hidden: hidden_grad.map(primitive),
            weight: weight_grad.map(primitive),
        },
    }
}

/// Implements [`CrossEntropyOps::head_scores`](crate::CrossEntropyOps::head_scores).
pub fn head_scores<B: MatmulOps>(
    hidden: B::FloatTensorPrimitive,
    weight: B::FloatTensorPrimitive,
    targets: B::IntTensorPrimitive,
) -> B::FloatTensorPrimitive {
    let (hidden, weight): (Tensor<B, 2>, Tensor<B, 2>) = (tensor(hidden), tensor(weight));
    let targets: Tensor<B, 1, Int> = Tensor::from_primitive(targets);
    let ([tokens, width], [vocab, _]) = (hidden.dims(), weight.dims());
    let sum_dtype = if hidden.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
    let mut scores = Tensor::<B, 1>::zeros([2], (&hidden.device(), sum_dtype));
    let step = logits_chunk_rows(tokens, vocab);
    for start in (0..tokens).step_by(step) {
        let rows = start..tokens.min(start + step);
        let hidden = hidden.clone().slice([rows.clone(), 0..width]);
        let logits = in_f32(matmul(hidden, weight.clone().transpose()));
        let targets = targets.clone().slice([rows]);
        // Counted while the logits of the chunk are in memory.
        let predicted = num_predicted(logits.clone(), targets.clone());
        scores = scores + Tensor::cat(vec![chunk(logits, targets, false).0, predicted], 0);
    }
    primitive(scores)
}

/// Implements [`num_predicted`](crate::num_predicted) for logits in at least f32. A masked target
/// is negative, so it equals no index. The count of a chunk is exact in f32, so the order of its
/// additions does not matter.
pub fn num_predicted<B: Backend>(logits: Tensor<B, 2>, targets: Tensor<B, 1, Int>) -> Tensor<B, 1> {
    let dtype = logits.dtype();
    let is_predicted = logits.argmax(1).equal(targets.unsqueeze_dim(1));
    is_predicted.float().cast(dtype).sum()
}

/// Implements [`CrossEntropyOps::logits_loss`](crate::CrossEntropyOps::logits_loss).
pub fn logits_loss<B: SumOps>(
    logits: B::FloatTensorPrimitive,
    targets: B::IntTensorPrimitive,
    gradient: bool,
) -> (B::FloatTensorPrimitive, Option<B::FloatTensorPrimitive>) {
    let logits: Tensor<B, 2> = in_f32(tensor(logits));
    let (loss, gradient) = chunk(logits, Tensor::from_primitive(targets), gradient);
    (primitive(loss), gradient.map(primitive))
}

/// Implements [`CrossEntropyOps::scale_gradient`](crate::CrossEntropyOps::scale_gradient). The
/// factor is not copied to the host.
pub fn scale_gradient<B: Backend>(
    gradient: B::FloatTensorPrimitive,
    factor: B::FloatTensorPrimitive,
    dtype: DType,
) -> B::FloatTensorPrimitive {
    debug_assert_eq!(factor.shape().num_elements(), 1);
    let gradient: Tensor<B, 2> = tensor(gradient);
    let factor: Tensor<B, 1> = cast(tensor(factor), gradient.dtype());
    primitive(cast(gradient * factor.unsqueeze::<2>(), dtype))
}
