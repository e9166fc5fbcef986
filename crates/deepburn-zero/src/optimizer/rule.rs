//! The rules of optimizers, on slices of host memory.

use deepburn_config::{AdamPlan, OptimizerPlan};
use deepburn_kernels as kernels;

use super::Rates;

/// The scalars of one step.
#[derive(Debug)]
pub(super) enum Step {
    Adam(kernels::AdamStep),
    /// And whether it uses its momentum, which a schedule may bring down to 0.
    Sgd(kernels::SgdStep, bool),
    Lion(kernels::LionStep),
    Adagrad(kernels::AdagradStep),
}

impl Step {
    /// Updates `values` and `moments`, in the order of [`moments`], with a gradient that is multiplied by
    /// `scale` on the way in. All slices have one length.
    pub(super) fn update(
        &self,
        scale: f32,
        values: &mut [f32],
        gradient: &[f32],
        moments: &mut [&mut [f32]],
    ) {
        match (self, moments) {
            (Self::Adam(step), [first, second]) => {
                let share =
                    kernels::AdamShare { param: values, m: first, v: second, working: None };
                kernels::adam(step, scale, kernels::Gradient::F32(gradient), share);
            }
            (Self::Sgd(step, uses_momentum), moments) => {
                let momentum = moments.first_mut().filter(|_| *uses_momentum);
                let momentum = momentum.map(|momentum| &mut **momentum);
                kernels::sgd(step, scale, values, gradient, momentum);
            }
            (Self::Lion(step), [moment]) => kernels::lion(step, scale, values, gradient, moment),
            (Self::Adagrad(step), [sum]) => kernels::adagrad(step, scale, values, gradient, sum),
            _ => unreachable!("states are made for the rule that uses them"),
        }
    }
}

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
pub(super) fn scalars(plan: &OptimizerPlan, Rates { lr, betas }: Rates, time: u64) -> Step {
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
        Step::Adam(kernels::AdamStep::new(&rule, time))
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
            Step::Sgd(kernels::SgdStep::new(&rule, time), rule.keeps_momentum())
        }
        OptimizerPlan::Lion { betas: own, weight_decay, .. } => {
            let [beta1, beta2] = betas.unwrap_or(own);
            let rule = kernels::Lion { lr, beta1, beta2, weight_decay };
            Step::Lion(kernels::LionStep::new(&rule))
        }
        OptimizerPlan::Adagrad { eps, weight_decay, .. } => {
            let rule = kernels::Adagrad { lr, eps, weight_decay };
            Step::Adagrad(kernels::AdagradStep::new(&rule))
        }
    }
}
