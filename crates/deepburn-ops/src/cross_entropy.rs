//! Softmax cross-entropy over large vocabularies, fused with the linear layer that computes the
//! logits.
//!
//! Main trait: [`CrossEntropyOps`]. With a vocabulary of 50,257 tokens, the logits and their
//! gradient would be the largest tensors of a GPT-2 training step. This op computes the logits of
//! one chunk of tokens at a time and overwrites them with their gradient.
//!
//! The op returns a scalar, the sum of the losses, so its output gradient is a scalar too. The
//! forward pass therefore computes the gradients of the hidden states and of the weight while the
//! logits are in memory. The backward pass only multiplies them by the output gradient. The op
//! takes three matrix products in total and reads the weight only in the forward pass.
//!
//! ```text
//! forward    logits = hidden W^T     chunk of rows, at most 64 MiB of f32
//!            loss  += sum of log(sum(exp(l))) - l[target]
//!            logits = softmax - one_hot
//!            dh     = logits W       saved for backward, [tokens, width]
//!            dW    += logits^T h     saved for backward, [vocab, width]
//! backward   dh * factor, dW * factor, each rounded to its type once
//! ```
//!
//! The saved gradients are in at least f32. For GPT-2's head of 50,257 by 768 weights, the weight
//! gradient takes 147 MiB.

pub(crate) mod head;

use burn::tensor::{Int, Tensor};
use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_autodiff::ops::{Backward, OpsKind, unary};
use burn_backend::tensor::{FloatTensor, IntTensor};
use burn_backend::{Backend, DType, TensorMetadata};

use crate::autodiff_step::backward_step;
use crate::matmul::MatmulOps;
use crate::portable;
use crate::quantized::QuantizedMatrix;
pub use head::{HeadGradients, HeadLoss, logits_chunk_rows};

/// Summed softmax cross-entropy.
///
/// A target below 0 masks its row: it contributes no loss and no gradient. Other targets must be
/// below the size of the vocabulary; a caller with targets on the host should check this there.
/// Losses are computed in at least f32.
pub trait CrossEntropyOps: MatmulOps {
    /// Returns the sum of the losses, `[1]`. The logits are `hidden weight^T`, where `hidden` is
    /// `[tokens, width]` and `weight` is `[vocab, width]`. Autodiff records this method.
    fn linear_cross_entropy(
        hidden: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        targets: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        Self::head_loss(hidden, weight, targets, HeadGradients { hidden: false, weight: false })
            .loss
    }

    /// Computes the same loss and the requested gradients of it.
    fn head_loss(
        hidden: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        targets: IntTensor<Self>,
        wanted: HeadGradients<bool>,
    ) -> HeadLoss<Self> {
        portable::cross_entropy::head_loss::<Self>(hidden, weight, targets, wanted)
    }

    /// Computes [`head_loss`](Self::head_loss) with a quantized weight `[vocab, width]`, which has
    /// no gradient. Returns the loss and, if `wanted` is set, the gradient of the hidden states.
    fn quantized_head_loss(
        hidden: FloatTensor<Self>,
        weight: &QuantizedMatrix<Self>,
        targets: IntTensor<Self>,
        wanted: bool,
    ) -> HeadLoss<Self> {
        let wanted = HeadGradients { hidden: wanted, weight: false };
        Self::head_loss(hidden, weight.dequantized(), targets, wanted)
    }

    /// Returns, as `[2]`, the sum of the losses, which is equal to
    /// [`linear_cross_entropy`](Self::linear_cross_entropy)'s, and the number of targets that are
    /// predicted: their logit is the largest of their row, and the first one with its value. For
    /// evaluations; autodiff does not record it.
    fn head_scores(
        hidden: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        targets: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        portable::cross_entropy::head_scores::<Self>(hidden, weight, targets)
    }

    /// Computes [`head_scores`](Self::head_scores) with a quantized weight `[vocab, width]`.
    fn quantized_head_scores(
        hidden: FloatTensor<Self>,
        weight: &QuantizedMatrix<Self>,
        targets: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        Self::head_scores(hidden, weight.dequantized(), targets)
    }

    /// Returns the sum of the losses, `[1]`, of `logits` `[tokens, vocab]`. Autodiff records this
    /// method.
    fn fused_cross_entropy(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        Self::logits_loss(logits, targets, false).0
    }

    /// Computes the same loss and, if requested, its gradient in at least f32.
    fn logits_loss(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
        gradient: bool,
    ) -> (FloatTensor<Self>, Option<FloatTensor<Self>>) {
        portable::cross_entropy::logits_loss::<Self>(logits, targets, gradient)
    }

    /// Multiplies a matrix by the single element of `factor` `[1]` and rounds to `dtype` once.
    fn scale_gradient(
        gradient: FloatTensor<Self>,
        factor: FloatTensor<Self>,
        dtype: DType,
    ) -> FloatTensor<Self> {
        portable::cross_entropy::scale_gradient::<Self>(gradient, factor, dtype)
    }
}

/// A gradient of the summed loss, and the element type of the final gradient.
///
/// It is computed for an output gradient of 1. The backward pass multiplies it by the actual output
/// gradient.
#[derive(Debug, Clone)]
struct UnitGradient<B: Backend> {
    gradient: FloatTensor<B>,
    dtype: DType,
}

impl<B: CrossEntropyOps> UnitGradient<B> {
    /// Returns the gradient multiplied by `factor` `[1]`, in its final type.
    fn scaled(self, factor: FloatTensor<B>) -> FloatTensor<B> {
        B::scale_gradient(self.gradient, factor, self.dtype)
    }
}

backward_step! {
    /// The autodiff step of the head. Its parents are the hidden states and the weight.
    HeadStep<2>: CrossEntropyOps, HeadGradients<Option<UnitGradient<B>>>, |ops, grads, _checkpointer| {
        let factor = grads.consume::<B>(&ops.node);
        let [hidden, weight] = ops.parents;
        // The weight gradient is registered first. It is large, and its reduction starts as soon as
        // it is complete.
        if let (Some(node), Some(gradient)) = (weight, ops.state.weight) {
            grads.register::<B>(node.id, gradient.scaled(factor.clone()));
        }
        if let (Some(node), Some(gradient)) = (hidden, ops.state.hidden) {
            grads.register::<B>(node.id, gradient.scaled(factor));
        }
    }
}

backward_step! {
    /// The autodiff step of a loss of given logits. The forward pass has already computed the
    /// gradient.
    LogitsStep<1>: CrossEntropyOps, Option<UnitGradient<B>>, |ops, grads, _checkpointer| {
        let Some(gradient) = ops.state else { return };
        unary::<B, _>(ops.parents, ops.node, grads, |factor| gradient.scaled(factor));
    }
}

/// Gradients of untracked inputs are not computed. If no input is tracked, the forward pass skips
/// the second and third product.
impl<B: CrossEntropyOps, C: CheckpointStrategy> CrossEntropyOps for Autodiff<B, C> {
    fn linear_cross_entropy(
        hidden: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        targets: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        // The forward pass computes the gradients, so it must know which of them the backward pass
        // will use.
        let wanted = HeadGradients { hidden: hidden.is_tracked(), weight: weight.is_tracked() };
        let (hidden_dtype, weight_dtype) = (hidden.dtype(), weight.dtype());
        let HeadLoss { loss, gradients } =
            B::head_loss(hidden.primitive, weight.primitive, targets, wanted);
        match HeadStep.prepare::<C>([hidden.node, weight.node]).compute_bound().stateful() {
            OpsKind::Tracked(step) => {
                let unit = |dtype| move |gradient| UnitGradient { gradient, dtype };
                let saved = HeadGradients {
                    hidden: gradients.hidden.map(unit(hidden_dtype)),
                    weight: gradients.weight.map(unit(weight_dtype)),
                };
                step.finish(saved, loss)
            }
            OpsKind::UnTracked(step) => step.finish(loss),
        }
    }

    fn fused_cross_entropy(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        let (tracked, dtype) = (logits.is_tracked(), logits.dtype());
        let (loss, gradient) = B::logits_loss(logits.primitive, targets, tracked);
        match LogitsStep.prepare::<C>([logits.node]).compute_bound().stateful() {
            OpsKind::Tracked(step) => {
                step.finish(gradient.map(|gradient| UnitGradient { gradient, dtype }), loss)
            }
            OpsKind::UnTracked(step) => step.finish(loss),
        }
    }
}

/// Returns the summed cross-entropy, `[1]`, of a language-model head. The logits are
/// `hidden weight^T`, where `hidden` is `[tokens, width]` and `weight` is `[vocab, width]`.
///
/// `targets` `[tokens]` below 0 are masked; others must be below the size of the vocabulary.
pub fn linear_cross_entropy<B: CrossEntropyOps>(
    hidden: Tensor<B, 2>,
    weight: Tensor<B, 2>,
    targets: Tensor<B, 1, Int>,
) -> Tensor<B, 1> {
    portable::tensor(B::linear_cross_entropy(
        portable::primitive(hidden),
        portable::primitive(weight),
        targets.into_primitive(),
    ))
}

/// Returns, as `[2]`, the summed cross-entropy of [`linear_cross_entropy`] and the number of
/// targets that are predicted ([`CrossEntropyOps::head_scores`]).
pub fn linear_scores<B: CrossEntropyOps>(
    hidden: Tensor<B, 2>,
    weight: Tensor<B, 2>,
    targets: Tensor<B, 1, Int>,
) -> Tensor<B, 1> {
    portable::tensor(B::head_scores(
        portable::primitive(hidden),
        portable::primitive(weight),
        targets.into_primitive(),
    ))
}

/// Returns the number of targets `[tokens]` whose logit is the largest of their row of `logits`
/// `[tokens, vocab]`, as `[1]` in at least f32. Masked targets are not counted.
pub fn num_predicted<B: Backend>(logits: Tensor<B, 2>, targets: Tensor<B, 1, Int>) -> Tensor<B, 1> {
    portable::cross_entropy::num_predicted(portable::in_f32(logits), targets)
}

/// Returns the summed cross-entropy, `[1]`, of `logits` `[tokens, vocab]`, with targets as in
/// [`linear_cross_entropy`].
pub fn cross_entropy<B: CrossEntropyOps>(
    logits: Tensor<B, 2>,
    targets: Tensor<B, 1, Int>,
) -> Tensor<B, 1> {
    portable::tensor(B::fused_cross_entropy(portable::primitive(logits), targets.into_primitive()))
}
