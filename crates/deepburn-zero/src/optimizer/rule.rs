//! What each optimizer keeps, what its updates depend on, and the scalars of its steps.

use deepburn_config::{
    AdamPlan, LambPlan, Matrices, MuonPlan, OneBitAdamPlan, OneBitLambPlan, OptimizerPlan,
    UpdateSettings, ZeroOneAdamPlan,
};
use deepburn_kernels as kernels;
use deepburn_kernels::ElementwiseStep;

use super::Rates;
use super::rounds::UpdateScope;
use super::zero_one::{self, StepKind};
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
        /// Decay of the moving average of trust ratios, where the optimizer keeps one.
        coeff_beta: Option<f64>,
    },
    /// A pass that makes a direction, whose matrices are orthogonalised, and one along it.
    Matrix { direction: ElementwiseStep, lr: f64, plan: MuonPlan, matrices: Matrices },
    /// A pass that makes the momentum of this rank, and one with the momentum that all ranks agreed on. 0/1 Adam's is
    /// a gradient or a movement.
    Momentum { local: ElementwiseStep, agreed: ElementwiseStep },
    /// A pass that makes the momentum of this rank, one that makes a direction of the momentum that all ranks agreed on,
    /// and one along it at a rate that follows from the tensor's frozen trust ratio.
    FrozenLamb { local: ElementwiseStep, direction: ElementwiseStep, lr: f64, plan: OneBitLambPlan },
}

/// Name of the mean of squared gradients.
pub(super) const SECOND_MOMENT: &str = "exp_avg_sq";

/// Name of 1-bit LAMB's second moment that is still updated after the freeze, and 0 before it.
pub(super) const FRESH_SECOND_MOMENT: &str = "exp_avg_sq_fresh";

/// Names of all arrays that an optimizer keeps of each parameter: moments, and after them the arrays of 0/1 Adam that follow
/// from what checkpoints have.
pub(crate) fn state_arrays(plan: &OptimizerPlan) -> &'static [&'static str] {
    match plan {
        OptimizerPlan::ZeroOneAdam(_) => &zero_one::ARRAYS,
        _ => moments(plan),
    }
}

/// Returns the PyTorch names of the moments that an optimizer keeps for each parameter.
pub fn moments(plan: &OptimizerPlan) -> &'static [&'static str] {
    match plan {
        OptimizerPlan::AdamW(_)
        | OptimizerPlan::Adam(_)
        | OptimizerPlan::Lamb(_)
        | OptimizerPlan::OneBitAdam(_)
        | OptimizerPlan::ZeroOneAdam(_) => &["exp_avg", SECOND_MOMENT],
        OptimizerPlan::OneBitLamb(_) => &["exp_avg", SECOND_MOMENT, FRESH_SECOND_MOMENT],
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
        OptimizerPlan::Lamb(_) | OptimizerPlan::OneBitAdam(_) | OptimizerPlan::ZeroOneAdam(_) => {
            DirectionMemory::Owned
        }
        // All momenta are exchanged together.
        OptimizerPlan::OneBitLamb(_) => DirectionMemory::AllOwned,
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
    match plan {
        OptimizerPlan::OneBitAdam(plan) => time > plan.freeze_step,
        OptimizerPlan::OneBitLamb(plan) => time > plan.freeze_step,
        _ => false,
    }
}

/// Whether each rank takes a gradient of its own in step number `time`, from 1.
pub(super) fn takes_own_gradients(plan: &OptimizerPlan, time: u64) -> bool {
    match plan {
        OptimizerPlan::ZeroOneAdam(plan) => !zero_one::updates_variance(plan, time),
        plan => agrees_on_momentum(plan, time),
    }
}

/// Whether the step before step number `time` has changed a second moment by which elements take part in exchanges.
pub(super) fn second_moment_has_changed(plan: &OptimizerPlan, time: u64) -> bool {
    match plan {
        OptimizerPlan::ZeroOneAdam(plan) => time > 1 && zero_one::updates_variance(plan, time - 1),
        _ => false,
    }
}

/// Whether compression errors from before step number `time` still count in later steps. Until 1-bit Adam and 1-bit LAMB
/// freeze the second moment, elements may still come alive.
pub(super) fn keeps_errors(plan: &OptimizerPlan, time: u64) -> bool {
    matches!(plan, OptimizerPlan::ZeroOneAdam(_)) || agrees_on_momentum(plan, time)
}

/// Whether the second moment is frozen from step number `time` on, after its last change.
pub(super) fn freezes_after(plan: &OptimizerPlan, time: u64) -> bool {
    match plan {
        OptimizerPlan::OneBitAdam(plan) => time == plan.freeze_step,
        OptimizerPlan::OneBitLamb(plan) => time == plan.freeze_step,
        OptimizerPlan::ZeroOneAdam(plan) => time == plan.var_freeze_step,
        _ => false,
    }
}

/// Whether errors are of no use after step number `time`: another quantity is exchanged from then on.
pub(super) fn forgets_errors(plan: &OptimizerPlan, time: u64) -> bool {
    matches!(plan, OptimizerPlan::ZeroOneAdam(plan) if time == plan.var_freeze_step)
}

/// Whether step number `time` is the first that each rank takes alone.
pub(super) fn is_first_local(plan: &OptimizerPlan, time: u64) -> bool {
    matches!(plan, OptimizerPlan::ZeroOneAdam(plan) if time == plan.var_freeze_step + 1)
}

/// Whether each rank takes step number `time` alone.
pub(super) fn is_local(plan: &OptimizerPlan, time: u64) -> bool {
    matches!(plan, OptimizerPlan::ZeroOneAdam(plan) if zero_one::is_local(plan, time))
}

/// The name of the quantity that step number `time` compresses, or would compress. Errors of one are of no use for another.
pub(super) fn compressed_quantity(plan: &OptimizerPlan, time: u64) -> Option<&'static str> {
    match plan {
        OptimizerPlan::OneBitAdam(_) => Some("momentum"),
        OptimizerPlan::OneBitLamb(_) => Some("scaled momentum"),
        OptimizerPlan::ZeroOneAdam(_) if is_local(plan, time) => Some("update"),
        OptimizerPlan::ZeroOneAdam(_) => Some("gradient"),
        _ => None,
    }
}

/// Whether ranks have different parameters after step number `time`. `local_rates` is the sum of the learning rates
/// since they last had the same.
pub(super) fn leaves_ranks_apart(plan: &OptimizerPlan, time: u64, local_rates: f64) -> bool {
    match plan {
        OptimizerPlan::ZeroOneAdam(plan) => {
            StepKind::at(plan, time, local_rates) == StepKind::Local
        }
        _ => false,
    }
}

/// What the update of a parameter of this shape depends on in step number `time`, from 1. `local_rates` is the sum of
/// the schedule's learning rates since ranks last had the same parameters, this step's too.
pub(super) fn scope(
    settings: &UpdateSettings,
    shape: &[usize],
    time: u64,
    local_rates: f64,
) -> UpdateScope {
    match (&settings.optimizer, settings.matrices) {
        (OptimizerPlan::Muon(_), Some(matrices)) => {
            let (outputs, inputs) = matrices.dimensions(shape);
            let (short, long) = (outputs.min(inputs) as u64, outputs.max(inputs) as u64);
            // Two products of the shorter side squared with the longer one, and the square of the smaller product.
            let cost = short.saturating_mul(short).saturating_mul(2 * long + short);
            UpdateScope::Matrix { cost: cost.saturating_mul(matrices.count as u64) }
        }
        (OptimizerPlan::Lamb(_), _) => UpdateScope::Norms,
        (plan @ OptimizerPlan::OneBitLamb(_), _) => match agrees_on_momentum(plan, time) {
            true => UpdateScope::FusedMomentum,
            false => UpdateScope::Norms,
        },
        (OptimizerPlan::ZeroOneAdam(plan), _) => {
            match StepKind::at(plan, time, settings.lr_factor * local_rates) {
                StepKind::ExactGradient | StepKind::Local => UpdateScope::Elements,
                StepKind::CompressedGradient | StepKind::Exchange => UpdateScope::Momentum,
            }
        }
        (plan, _) if agrees_on_momentum(plan, time) => UpdateScope::Momentum,
        _ => UpdateScope::Elements,
    }
}

/// The scalars of step number `time`, from 1. `local_rates` is the same as in [`scope`].
pub(super) fn step(
    settings: &UpdateSettings,
    rates: Rates,
    time: u64,
    local_rates: f64,
) -> UpdateStep {
    let rates = Rates { lr: settings.lr_factor * rates.lr, ..rates };
    match (&settings.optimizer, settings.matrices) {
        (OptimizerPlan::Muon(plan), Some(matrices)) => {
            let MuonPlan { momentum, nesterov, .. } = *plan;
            let rule = kernels::MuonMomentum { momentum, nesterov };
            let direction = kernels::MuonMomentumStep::new(&rule).into();
            UpdateStep::Matrix { direction, lr: rates.lr, plan: *plan, matrices }
        }
        (OptimizerPlan::Lamb(plan), _) => lamb(plan, rates, time, None),
        (OptimizerPlan::OneBitLamb(plan), _) => {
            match agrees_on_momentum(&settings.optimizer, time) {
                true => frozen_lamb(plan, rates),
                false => lamb(&plan.lamb, rates, time, Some(plan.coeff_beta)),
            }
        }
        (OptimizerPlan::OneBitAdam(one_bit), _)
            if agrees_on_momentum(&settings.optimizer, time) =>
        {
            momentum(one_bit, rates)
        }
        (OptimizerPlan::ZeroOneAdam(plan), _) => {
            zero_one_step(plan, rates, time, settings.lr_factor * local_rates)
        }
        (plan, _) => UpdateStep::Elements(elementwise(plan, rates, time)),
    }
}

fn lamb(
    plan: &LambPlan,
    Rates { lr, betas }: Rates,
    time: u64,
    coeff_beta: Option<f64>,
) -> UpdateStep {
    let betas = betas.unwrap_or(plan.betas);
    let LambPlan { eps, eps_inside_sqrt, weight_decay, bias_correction, trust_ratio, .. } = *plan;
    let [beta1, beta2] = betas;
    let rule = kernels::Lamb { beta1, beta2, eps, eps_inside_sqrt, weight_decay };
    UpdateStep::Norms {
        direction: kernels::LambStep::new(&rule).into(),
        step_size: kernels::lamb_step_size(lr, betas, time, bias_correction),
        trust_ratio,
        coeff_beta,
    }
}

/// The step of 1-bit LAMB after the freeze.
fn frozen_lamb(plan: &OneBitLambPlan, Rates { lr, betas }: Rates) -> UpdateStep {
    let LambPlan { betas: own, eps, weight_decay, .. } = plan.lamb;
    let [beta1, beta2] = betas.unwrap_or(own);
    let rule = kernels::FrozenLamb { beta1, beta2, eps, weight_decay };
    UpdateStep::FrozenLamb {
        local: kernels::LocalMomentumStep::new(beta1).into(),
        direction: kernels::FrozenLambStep::new(&rule).into(),
        lr,
        plan: *plan,
    }
}

/// The step of 1-bit Adam after the freeze: of the second moment nothing is left to correct.
fn momentum(plan: &OneBitAdamPlan, Rates { lr, betas }: Rates) -> UpdateStep {
    let AdamPlan { betas: own, eps, weight_decay, .. } = plan.adam;
    let [beta1, _] = betas.unwrap_or(own);
    // The momentum that ranks agreed on replaces the present one.
    let agreed = kernels::FrozenAdam { lr, beta1: 0.0, eps, weight_decay };
    UpdateStep::Momentum {
        local: kernels::LocalMomentumStep::new(beta1).into(),
        agreed: kernels::FrozenAdamStep::new(&agreed).into(),
    }
}

/// The step of 0/1 Adam.
fn zero_one_step(plan: &ZeroOneAdamPlan, rates: Rates, time: u64, local_rates: f64) -> UpdateStep {
    let AdamPlan { betas: own, eps, weight_decay, .. } = plan.adam;
    let [beta1, _] = rates.betas.unwrap_or(own);
    let frozen = kernels::FrozenAdam { lr: rates.lr, beta1, eps, weight_decay };
    match StepKind::at(plan, time, local_rates) {
        StepKind::ExactGradient => {
            UpdateStep::Elements(elementwise(&OptimizerPlan::AdamW(plan.adam), rates, time))
        }
        // A momentum without a memory is the gradient.
        StepKind::CompressedGradient => UpdateStep::Momentum {
            local: kernels::LocalMomentumStep::new(0.0).into(),
            agreed: kernels::FrozenAdamStep::new(&frozen).into(),
        },
        StepKind::Local => UpdateStep::Elements(kernels::LocalAdamStep::new(&frozen).into()),
        StepKind::Exchange => UpdateStep::Momentum {
            local: kernels::LocalMovementStep::new(&frozen).into(),
            agreed: kernels::AgreedMovementStep::new(&frozen, local_rates).into(),
        },
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
        OptimizerPlan::Lamb(_) | OptimizerPlan::Muon(_) | OptimizerPlan::OneBitLamb(_) => {
            unreachable!("they look at more than one element")
        }
        OptimizerPlan::ZeroOneAdam(_) => unreachable!("its steps are of several kinds"),
    }
}
