//! The steps that autodiff records for fused ops: one step for each op, with the values that its
//! backward formula needs.

use std::fmt;
use std::marker::PhantomData;

use burn_autodiff::checkpoint::retro_forward::RetroForward;
use burn_autodiff::checkpoint::state::BackwardStates;
use burn_autodiff::checkpoint::strategy::{BalancedCheckpointing, CheckpointStrategy};
use burn_autodiff::ops::{Backward, OpsKind, OpsPrep};
use burn_autodiff::{Autodiff, NodeId};
use burn_backend::Backend;
use burn_backend::tensor::FloatTensor;

/// Declares a step of an op family with a number of parents, its state, and the function that
/// returns the gradients of all parents from the gradient of the output and the state.
///
/// All gradients are computed together, because they need the same pass over the elements.
/// Gradients of parents that are not tracked are dropped. A step whose gradients are registered one
/// by one has a block instead, which gets the recorded op, the gradients and the checkpointer.
macro_rules! backward_step {
    ($(#[$meta:meta])* $step:ident<$parents:literal>: $family:ident,
     |$grad:ident, $state:tt: $type:ty| $gradients:expr) => {
        backward_step! {
            $(#[$meta])*
            $step<$parents>: $family, $type, |ops, grads, _checkpointer| {
                let ($grad, $state) = (grads.consume::<B>(&ops.node), ops.state);
                let gradients: [FloatTensor<B>; $parents] = $gradients;
                for (parent, gradient) in ops.parents.into_iter().zip(gradients) {
                    if let Some(parent) = parent {
                        grads.register::<B>(parent.id, gradient);
                    }
                }
            }
        }
    };
    ($(#[$meta:meta])* $step:ident<$parents:literal>: $family:ident, $type:ty,
     |$ops:ident, $grads:ident, $checkpointer:ident| $backward:block) => {
        $(#[$meta])*
        #[derive(Debug)]
        struct $step;

        impl<B: $family> burn_autodiff::ops::Backward<B, $parents> for $step {
            type State = $type;

            fn backward(
                self,
                $ops: burn_autodiff::ops::Ops<Self::State, $parents>,
                $grads: &mut burn_autodiff::grads::Gradients,
                $checkpointer: &mut burn_autodiff::checkpoint::base::Checkpointer,
            ) $backward
        }
    };
}
pub(crate) use backward_step;

/// Runs an op and records `step`, if one of its parents is tracked. `tracked` returns the state of
/// the step and the output; `untracked` only returns the output.
///
/// The op is recorded as compute-bound: Burn's own activation checkpointing keeps the output
/// instead of computing it again.
pub(crate) fn record<B, C, S, I, const N: usize>(
    step: OpsPrep<S, B, S::State, C, N>,
    inputs: I,
    tracked: impl FnOnce(I) -> (S::State, FloatTensor<B>),
    untracked: impl FnOnce(I) -> FloatTensor<B>,
) -> FloatTensor<Autodiff<B, C>>
where
    B: Backend,
    C: CheckpointStrategy,
    S: Backward<B, N>,
{
    match step.compute_bound().stateful() {
        OpsKind::Tracked(step) => {
            let (state, output) = tracked(inputs);
            step.finish(state, output)
        }
        OpsKind::UnTracked(step) => step.finish(untracked(inputs)),
    }
}

/// Runs an op of a few operations per element, and records `step` if an operand is tracked. `state`
/// returns the state of the step, which keeps the operands.
///
/// The op is recorded as memory-bound with every checkpointing strategy: a linear layer that reads
/// its output does not keep it. Backward computes it again from the operands, which are kept in any
/// case, with the same bits. In a block of GPT-2, GELU's output is a quarter of the activations,
/// and takes one pass over its input.
pub(crate) fn record_elementwise<B, S, F, const N: usize>(
    step: S,
    operands: [FloatTensor<Autodiff<B>>; N],
    state: impl FnOnce([FloatTensor<B>; N]) -> S::State,
    function: F,
) -> FloatTensor<Autodiff<B>>
where
    B: Backend,
    S: Backward<B, N>,
    F: Fn([FloatTensor<B>; N]) -> FloatTensor<B> + Clone + Send + 'static,
{
    let again = ElementwiseAgain::<B, F, N> {
        operands: operands.each_ref().map(|operand| operand.node.id),
        function: function.clone(),
        backend: PhantomData,
    };
    let prepared = step
        .prepare::<BalancedCheckpointing>(operands.each_ref().map(|operand| operand.node.clone()))
        .memory_bound()
        .retro_forward(again)
        .parents(&operands);
    let operands = operands.map(|operand| operand.primitive);
    match prepared.stateful() {
        OpsKind::Tracked(step) => step.finish(state(operands.clone()), function(operands)),
        OpsKind::UnTracked(step) => step.finish(function(operands)),
    }
}

/// Computes the output of a recorded op again, in the backward pass.
struct ElementwiseAgain<B, F, const N: usize> {
    /// The nodes of the operands.
    operands: [NodeId; N],
    /// The op.
    function: F,
    backend: PhantomData<fn() -> B>,
}

impl<B, F, const N: usize> fmt::Debug for ElementwiseAgain<B, F, N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ElementwiseAgain").field("operands", &self.operands).finish_non_exhaustive()
    }
}

impl<B, F, const N: usize> RetroForward for ElementwiseAgain<B, F, N>
where
    B: Backend,
    F: Fn([FloatTensor<B>; N]) -> FloatTensor<B> + Send + 'static,
{
    fn forward(&self, states: &mut BackwardStates, output: NodeId) {
        let operands = self.operands.each_ref().map(|id| states.get_state::<FloatTensor<B>>(id));
        states.save(output, (self.function)(operands));
    }
}
