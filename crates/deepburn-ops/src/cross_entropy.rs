//! Softmax cross-entropy over large vocabularies, with the linear layer that makes the logits.
//!
//! Main trait: [`CrossEntropyOps`]. The logits of a chunk of tokens become their own gradient, so
//! not all of them exist at a time, and never beside their gradient. With unit weight for every
//! token, the gradients by hidden states and weight are made in forward, where the logits are;
//! backward multiplies by a number. That takes three products in all and reads the weight once.

use burn::tensor::{Int, Tensor};
use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::base::Checkpointer;
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn_backend::tensor::{FloatTensor, IntTensor};
use burn_backend::{Backend, DType, TensorMetadata};

use crate::portable;

/// Summed softmax cross-entropy.
///
/// A target below 0 masks its row: no loss, no gradient. Others must be below the vocabulary's
/// size; who has targets on the host checks them there. Losses are in at least f32.
pub trait CrossEntropyOps: Backend {
    /// Sum of the losses, `[1]`, of rows of `hidden` `[tokens, width]` whose logits are their
    /// products with the rows of `weight` `[vocab, width]`. This is a method that autodiff records.
    fn linear_cross_entropy(
        hidden: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        targets: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        Self::head_loss(hidden, weight, targets, HeadGradients { hidden: false, weight: false })
            .loss
    }

    /// The same, with those gradients of the sum that are wanted.
    fn head_loss(
        hidden: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        targets: IntTensor<Self>,
        wanted: HeadGradients<bool>,
    ) -> HeadLoss<Self> {
        portable::cross_entropy::head_loss::<Self>(hidden, weight, targets, wanted)
    }

    /// Sum of the losses, `[1]`, of `logits` `[tokens, vocab]`. This is a method that autodiff
    /// records.
    fn fused_cross_entropy(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
    ) -> FloatTensor<Self> {
        Self::logits_loss(logits, targets, false).0
    }

    /// The same, with the gradient of the sum, at least f32, if it is wanted.
    fn logits_loss(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
        gradient: bool,
    ) -> (FloatTensor<Self>, Option<FloatTensor<Self>>) {
        portable::cross_entropy::logits_loss::<Self>(logits, targets, gradient)
    }

    /// A matrix times the single element of `factor` `[1]`, rounded to `dtype` once.
    fn scale_gradient(
        gradient: FloatTensor<Self>,
        factor: FloatTensor<Self>,
        dtype: DType,
    ) -> FloatTensor<Self> {
        portable::cross_entropy::scale_gradient::<Self>(gradient, factor, dtype)
    }
}

/// Something for each of the two inputs of the head that may learn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadGradients<T> {
    /// By the hidden states, `[tokens, width]`.
    pub hidden: T,
    /// By the weight, `[vocab, width]`.
    pub weight: T,
}

/// Loss of a language-model head.
#[derive(Debug)]
pub struct HeadLoss<B: Backend> {
    /// Sum over the tokens, `[1]`, at least f32.
    pub loss: FloatTensor<B>,
    /// Gradients of that sum, at least f32 whatever the inputs are.
    pub gradients: HeadGradients<Option<FloatTensor<B>>>,
}

/// Bytes of f32 logits that a chunk takes at most.
const CHUNK_BYTES: usize = 64 << 20;

/// Returns the rows of logits, one for each token, that [`linear_cross_entropy`] computes at a time:
/// all, if their f32 logits take at most 64 MiB, else the chunks are of about equal size. It depends
/// on nothing else, so that sums are always the same.
pub fn logits_chunk_rows(tokens: usize, vocab: usize) -> usize {
    let most = (CHUNK_BYTES / (4 * vocab.max(1))).max(1);
    tokens.div_ceil(tokens.div_ceil(most).max(1)).max(1)
}

/// A gradient of the sum and the type it is to have in the end.
#[derive(Debug, Clone)]
struct UnitGradient<B: Backend> {
    gradient: FloatTensor<B>,
    dtype: DType,
}

impl<B: CrossEntropyOps> UnitGradient<B> {
    fn scaled(self, factor: FloatTensor<B>) -> FloatTensor<B> {
        B::scale_gradient(self.gradient, factor, self.dtype)
    }
}

#[derive(Debug)]
struct HeadStep;

impl<B: CrossEntropyOps> Backward<B, 2> for HeadStep {
    type State = HeadGradients<Option<UnitGradient<B>>>;

    fn backward(
        self,
        ops: Ops<Self::State, 2>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let factor = grads.consume::<B>(&ops.node);
        let [hidden, weight] = ops.parents;
        // The weight first: its gradient is large, and is reduced the moment it is there.
        if let (Some(node), Some(gradient)) = (weight, ops.state.weight) {
            grads.register::<B>(node.id, gradient.scaled(factor.clone()));
        }
        if let (Some(node), Some(gradient)) = (hidden, ops.state.hidden) {
            grads.register::<B>(node.id, gradient.scaled(factor));
        }
    }
}

#[derive(Debug)]
struct LogitsStep;

impl<B: CrossEntropyOps> Backward<B, 1> for LogitsStep {
    type State = Option<UnitGradient<B>>;

    fn backward(
        self,
        ops: Ops<Self::State, 1>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let Some(gradient) = ops.state else { return };
        unary::<B, _>(ops.parents, ops.node, grads, |factor| gradient.scaled(factor));
    }
}

impl<B: CrossEntropyOps, C: CheckpointStrategy> CrossEntropyOps for Autodiff<B, C> {
    fn linear_cross_entropy(
        hidden: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        targets: IntTensor<Self>,
    ) -> FloatTensor<Self> {
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

/// Summed cross-entropy, `[1]`, of a language-model head: logits are the products of rows of
/// `hidden` `[tokens, width]` with rows of `weight` `[vocab, width]`.
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

/// Summed cross-entropy, `[1]`, of `logits` `[tokens, vocab]`; targets as in
/// [`linear_cross_entropy`].
pub fn cross_entropy<B: CrossEntropyOps>(
    logits: Tensor<B, 2>,
    targets: Tensor<B, 1, Int>,
) -> Tensor<B, 1> {
    portable::tensor(B::fused_cross_entropy(portable::primitive(logits), targets.into_primitive()))
}
