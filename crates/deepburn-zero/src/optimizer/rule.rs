//! The rules of optimizers: the arrays that they keep, and the scalars of their steps.

use deepburn_config::{AdamPlan, OptimizerPlan};
use deepburn_kernels::{self as kernels, ElementwiseStep};

use super::Rates;

/// Names of the arrays that a rule keeps of each parameter, those of PyTorch's optimizers.
pub fn moments(plan: &OptimizerPlan) -> &'static [&'static str] {
    match plan {
        OptimizerPlan::AdamW(_) | OptimizerPlan::Adam(_) => &["exp_avg", "exp_avg_sq"],
        OptimizerPlan::Sgd { momentum: 0.0, .. } => &[],
        OptimizerPlan::Sgd { .. } => &["momentum_buffer"],
        OptimizerPlan::Lion { .. } => &["exp_avg"],
        OptimizerPlan::Adagrad { .. } => &["sum"],
    }
}

/// The scalars of step number `time`, from 1.
pub(super) fn scalars(
    plan: &OptimizerPlan,
    Rates { lr, betas }: Rates,
    time: u64,
) -> ElementwiseStep {
    let adam = |plan: &AdamPlan, weight_decay| {
        let [beta1, beta2] = betas.unwrap_or(plan.betas);
        let rule = kernels::Adam {
            lr,
            beta1,
            beta2,
            eps: plan.eps,
            weight_decay,
            bias_correction: plan.bias_correction,
        };
        kernels::AdamStep::new(&rule, time).into()
    };
    match *plan {
        OptimizerPlan::AdamW(ref plan) => {
            adam(plan, kernels::WeightDecay::Decoupled(plan.weight_decay))
        }
        OptimizerPlan::Adam(ref plan) => adam(plan, kernels::WeightDecay::L2(plan.weight_decay)),
        OptimizerPlan::Sgd { momentum, dampening, weight_decay, nesterov, .. } => {
            let cycled = betas.map(|[beta1, _]| beta1).filter(|_| momentum != 0.0);
            let momentum = cycled.unwrap_or(momentum);
            let rule = kernels::Sgd { lr, momentum, dampening, weight_decay, nesterov };
            rule.step(time)
        }
        OptimizerPlan::Lion { betas: own, weight_decay, .. } => {
            let [beta1, beta2] = betas.unwrap_or(own);
            let rule = kernels::Lion { lr, beta1, beta2, weight_decay };
            kernels::LionStep::new(&rule).into()
        }
        OptimizerPlan::Adagrad { eps, weight_decay, .. } => {
            let rule = kernels::Adagrad { lr, eps, weight_decay };
            kernels::AdagradStep::new(&rule).into()
        }
    }
}
