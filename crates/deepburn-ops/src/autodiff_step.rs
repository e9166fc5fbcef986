//! The steps that autodiff records for fused ops: one step for each op, with the values that its
//! backward formula needs.

use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::strategy::CheckpointStrategy;
use burn_autodiff::ops::{Backward, OpsKind, OpsPrep};
use burn_backend::Backend;
use burn_backend::tensor::FloatTensor;

/// Declares a step of an op family with a number of parents, its state, and the function that
/// returns the gradients of all parents from the gradient of the output and the state.
///
/// All gradients are computed together, because they need the same pass over the elements.
/// Gradients of parents that are not tracked are dropped. A step whose gradients are registered one
/// by one has a block instead, which gets the recorded op and the gradients.
macro_rules! backward_step {
    ($(#[$meta:meta])* $step:ident<$parents:literal>: $family:ident,
     |$grad:ident, $state:tt: $type:ty| $gradients:expr) => {
        backward_step! {
            $(#[$meta])*
            $step<$parents>: $family, $type, |ops, grads| {
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
     |$ops:ident, $grads:ident| $backward:block) => {
        $(#[$meta])*
        #[derive(Debug)]
        struct $step;

        impl<B: $family> burn_autodiff::ops::Backward<B, $parents> for $step {
            type State = $type;

            fn backward(
                self,
                $ops: burn_autodiff::ops::Ops<Self::State, $parents>,
                $grads: &mut burn_autodiff::grads::Gradients,
                _checkpointer: &mut burn_autodiff::checkpoint::base::Checkpointer,
            ) $backward
        }
    };
}
pub(crate) use backward_step;

/// Runs an op and records `step`, if one of its parents is tracked. `tracked` returns the state of
/// the step and the output; `untracked` only returns the output.
///
/// Recorded as compute-bound: Burn's own activation checkpointing keeps the output instead of
/// computing it again.
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
