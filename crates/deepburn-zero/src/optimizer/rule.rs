//! What each optimizer keeps, what its updates depend on, and the scalars of its steps.

use deepburn_config::{
    AdamPlan, LambPlan, Matrices, MuonPlan, OneBitAdamPlan, OptimizerPlan, UpdateSettings,
};
use deepburn_kernels as kernels;
use deepburn_kernels::ElementwiseStep;

use super::Rates;
use super::rounds::UpdateScope;
use crate::estimate::DirectionMemory;

/// The scalars of one step of a parameter.
#[derive(Debug)]
pub(super) enum UpdateStep {
    /// One pass over the elements.
    Elements(ElementwiseStep),
    /// A pass that makes a direction, and one along it at a rate that follows from two norms.
    Norms {
        direction: ElementwiseStep,
        step_size: f64,
        /// Bounds of the trust ratio.
        trust_ratio: [f64; 2],
    },
    /// A pass that makes a direction, whose matrices are orthogonalised, and one along it.
    Matrix { direction: ElementwiseStep, lr: f64, plan: MuonPlan, matrices: Matrices },
    /// A pass that makes the momentum of this rank, and one with the momentum that all ranks agreed on.
    Momentum { local: ElementwiseStep, agreed: ElementwiseStep },
}

/// Name of the mean of squared gradients.
pub(super) const SECOND_MOMENT: &str = "exp_avg_sq";

/// Names of the arrays that an optimizer keeps of each parameter, those of PyTorch's optimizers.
pub fn moments(plan: &OptimizerPlan) -> &'static [&'static str] {
    match plan {
        OptimizerPlan::AdamW(_)
        | OptimizerPlan::Adam(_)
        | OptimizerPlan::Lamb(_)
        | OptimizerPlan::OneBitAdam(_) => &["exp_avg", SECOND_MOMENT],
        OptimizerPlan::Sgd { momentum: 0.0, .. } => &[],
        OptimizerPlan::Sgd { .. } | OptimizerPlan::Muon(_) => &["momentum_buffer"],
        OptimizerPlan::Lion { .. } => &["exp_avg"],
        OptimizerPlan::Adagrad { .. } => &["sum"],
    }
}

/// What the update of a parameter holds until its direction is final.
pub(crate) fn direction_memory(plan: &OptimizerPlan) -> DirectionMemory {
    match plan {
        // Of 1-bit Adam it is the momentum of this rank.
        OptimizerPlan::Lamb(_) | OptimizerPlan::OneBitAdam(_) => DirectionMemory::Owned,
        OptimizerPlan::Muon(_) => DirectionMemory::Whole,
        OptimizerPlan::AdamW(_)
        | OptimizerPlan::Adam(_)
        | OptimizerPlan::Sgd { .. }
        | OptimizerPlan::Lion { .. }
        | OptimizerPlan::Adagrad { .. } => DirectionMemory::None,
    }
}

/// Whether ranks agree on momenta in step number `time`, from 1, each with a gradient of its own.
pub(super) fn agrees_on_momentum(plan: &OptimizerPlan, time: u64) -> bool {
    matches!(plan, OptimizerPlan::OneBitAdam(plan) if time > plan.freeze_step)
}

/// What the update of a parameter of this shape depends on in step number `time`, from 1.
pub(super) fn scope(settings: &UpdateSettings, shape: &[usize], time: u64) -> UpdateScope {
    match (&settings.optimizer, settings.matrices) {
        (OptimizerPlan::Muon(_), Some(matrices)) => {
            let (outputs, inputs) = matrices.dimensions(shape);
            let (short, long) = (outputs.min(inputs) as u64, outputs.max(inputs) as u64);
            // Two products of the shorter side squared with the longer one, and the square of the smaller product.
            let cost = short.saturating_mul(short).saturating_mul(2 * long + short);
            UpdateScope::Matrix { cost: cost.saturating_mul(matrices.count as u64) }
        }
        (OptimizerPlan::Lamb(_), _) => UpdateScope::Norms,
        (plan, _) if agrees_on_momentum(plan, time) => UpdateScope::Momentum,
        _ => UpdateScope::Elements,
    }
}

/// The scalars of step number `time`, from 1.
pub(super) fn step(settings: &UpdateSettings, rates: Rates, time: u64) -> UpdateStep {
    let rates = Rates { lr: settings.lr_factor * rates.lr, ..rates };
    match (&settings.optimizer, settings.matrices) {
        (OptimizerPlan::Muon(plan), Some(matrices)) => {
            let MuonPlan { momentum, nesterov, .. } = *plan;
            let rule = kernels::MuonMomentum { momentum, nesterov };
            let direction = kernels::MuonMomentumStep::new(&rule).into();
            UpdateStep::Matrix { direction, lr: rates.lr, plan: *plan, matrices }
        }
        (OptimizerPlan::Lamb(plan), _) => lamb(plan, rates, time),
        (OptimizerPlan::OneBitAdam(one_bit), _)
            if agrees_on_momentum(&settings.optimizer, time) =>
        {
            momentum(one_bit, rates)
        }
        (plan, _) => UpdateStep::Elements(elementwise(plan, rates, time)),
    }
}

fn lamb(plan: &LambPlan, Rates { lr, betas }: Rates, time: u64) -> UpdateStep {
    let betas = betas.unwrap_or(plan.betas);
    let LambPlan { eps, eps_inside_sqrt, weight_decay, bias_correction, trust_ratio, .. } = *plan;
    let [beta1, beta2] = betas;
    let rule = kernels::Lamb { beta1, beta2, eps, eps_inside_sqrt, weight_decay };
    UpdateStep::Norms {
        direction: kernels::LambStep::new(&rule).into(),
        step_size: kernels::lamb_step_size(lr, betas, time, bias_correction),
        trust_ratio,
    }
}

/// The step of 1-bit Adam after the freeze: of the second moment nothing is left to correct.
fn momentum(plan: &OneBitAdamPlan, Rates { lr, betas }: Rates) -> UpdateStep {
    let AdamPlan { betas: own, eps, weight_decay, .. } = plan.adam;
    let [beta1, _] = betas.unwrap_or(own);
    let agreed = kernels::FrozenAdam { lr, eps, weight_decay };
    UpdateStep::Momentum {
        local: kernels::LocalMomentumStep::new(beta1).into(),
        agreed: kernels::FrozenAdamStep::new(&agreed).into(),
    }
}

fn elementwise(plan: &OptimizerPlan, Rates { lr, betas }: Rates, time: u64) -> ElementwiseStep {
    let adam = |plan: &AdamPlan, weight_decay| {
        let [beta1, beta2] = betas.unwrap_or(plan.betas);
        let AdamPlan { eps, bias_correction, .. } = *plan;
        let rule = kernels::Adam { lr, beta1, beta2, eps, weight_decay, bias_correction };
        kernels::AdamStep::new(&rule, time).into()
    };
    match *plan {
        OptimizerPlan::AdamW(ref plan) => {
            adam(plan, kernels::WeightDecay::Decoupled(plan.weight_decay))
        }
        OptimizerPlan::Adam(ref plan) => adam(plan, kernels::WeightDecay::L2(plan.weight_decay)),
        // Before the freeze.
        OptimizerPlan::OneBitAdam(OneBitAdamPlan { adam: ref plan, .. }) => {
            adam(plan, kernels::WeightDecay::Decoupled(plan.weight_decay))
        }
        OptimizerPlan::Sgd { momentum, dampening, weight_decay, nesterov, .. } => {
            let cycled = betas.map(|[beta1, _]| beta1).filter(|_| momentum != 0.0);
            let momentum = cycled.unwrap_or(momentum);
            let rule = kernels::Sgd { lr, momentum, dampening, weight_decay, nesterov };
            rule.step(time)
        }
        OptimizerPlan::Lion { betas: own, weight_decay, .. } => {
            let [beta1, beta2] = betas.unwrap_or(own);
            kernels::LionStep::new(&kernels::Lion { lr, beta1, beta2, weight_decay }).into()
        }
        OptimizerPlan::Adagrad { eps, weight_decay, .. } => {
            kernels::AdagradStep::new(&kernels::Adagrad { lr, eps, weight_decay }).into()
        }
        OptimizerPlan::Lamb(_) | OptimizerPlan::Muon(_) => {
            unreachable!("they look at more than one element")
        }
    }
}
