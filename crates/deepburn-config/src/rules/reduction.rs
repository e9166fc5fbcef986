//! The reduction of gradients over all ranks.

use super::*;

/// Resolves the reduction of gradients.
pub(crate) fn resolve(
    optimizer: &OptimizerPlan,
    stage: Stage,
    context: &mut Context<'_>,
) -> ReductionPlan {
    let top = context.top;
    let (op, prescale) = (&top.gradient_allreduce_op, &top.prescale_gradients);
    let predivide = &top.gradient_predivide_factor;
    refuse!(if op.value == GradientReduction::Sum && stage == Stage::Parameters; context, op =>
        "\"sum\" is not supported with ZeRO stage 3"; "write \"mean\", or use stage 0, 1 or 2");
    // An optimizer that exchanges momenta stops reducing gradients.
    let steps = match optimizer {
        OptimizerPlan::ZeroOneAdam(_) => "that update ZeroOneAdam's second moment: other",
        _ => &format!("before {}'s freeze_step: later", optimizer.name()),
    };
    for entry in [&*top.communication_data_type, prescale, predivide] {
        let given = entry.given().filter(|_| optimizer.exchanges_momentum());
        if let Some(node) = given.filter(|node| entry.key.asks(Trigger::Differs, node)) {
            note!(context, entry =>
                "{node} only affects steps {steps} steps exchange momenta in place of gradients, one bit for each \
                 element");
        }
    }
    let is_sum = op.value == GradientReduction::Sum;
    unused! { context;
        top { prescale_gradients } if is_sum => "gradient_allreduce_op \"sum\" divides nothing";
        top { gradient_predivide_factor } if is_sum || prescale.value =>
            "only gradient_allreduce_op \"mean\" without prescale_gradients divides twice";
    }
    let (op, prescale, predivide_factor) = (op.value, prescale.value, predivide.value);
    ReductionPlan { op, prescale, predivide_factor }
}
