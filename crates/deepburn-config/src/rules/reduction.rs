//! How the gradients of all ranks become one.

use crate::context::Context;
use crate::key::Trigger;
use crate::keys::DeepSpeed;
use crate::plan::{GradientReduction, OptimizerPlan, ReductionPlan, Stage};

/// The part of the plan about the reduction of gradients.
pub(crate) fn resolve(
    top: &DeepSpeed<'_>,
    optimizer: &OptimizerPlan,
    stage: Stage,
    context: &mut Context<'_>,
) -> ReductionPlan {
    let op = &top.gradient_allreduce_op;
    if op.value == GradientReduction::Sum && stage == Stage::Parameters {
        let message = "\"sum\" is not supported with ZeRO stage 3";
        context.error(op, message, "write \"mean\", or use stage 0, 1 or 2");
    }
    if optimizer.exchanges_momentum() {
        check_exchange(top, optimizer, context);
    }
    ReductionPlan {
        op: op.value,
        prescale: top.prescale_gradients.value,
        predivide_factor: top.gradient_predivide_factor.value,
    }
}

/// Notes settings of the gradient reduction with an optimizer that stops reducing gradients.
fn check_exchange(top: &DeepSpeed<'_>, optimizer: &OptimizerPlan, context: &mut Context<'_>) {
    let steps = match optimizer {
        OptimizerPlan::ZeroOneAdam(_) => "that update ZeroOneAdam's second moment: other",
        _ => &format!("before {}'s freeze_step: later", optimizer.name()),
    };
    for entry in
        [&*top.communication_data_type, &top.prescale_gradients, &top.gradient_predivide_factor]
    {
        let chosen = entry.given().filter(|node| entry.key.asks(Trigger::Differs, node));
        let Some(node) = chosen else { continue };
        let message = format!(
            "{node} only affects steps {steps} steps exchange momenta in place of gradients, one bit for each element"
        );
        context.note(entry, message);
    }
}
