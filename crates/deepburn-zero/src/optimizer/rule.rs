//! The definition of each optimizer: its states, the scope of its updates and the scalars of its
//! steps.
//!
//! Only this module distinguishes optimizers. Checkpoints, offload and ledger use
//! `state_arrays`, the order of a step uses `scope`, and `step` computes the scalars of the kernels
//! in f64.
//!
//! ```text
//! optimizer        arrays                                    update depends on
//! AdamW, Adam      exp_avg, exp_avg_sq                       single elements
//! SGD              momentum_buffer (if momentum is not 0)    single elements
//! Lion             exp_avg                                   single elements
//! Adagrad          sum                                       single elements
//! LAMB             exp_avg, exp_avg_sq                       norms of the tensor
//! Muon             momentum_buffer                           the whole matrix
//! 1-bit Adam       exp_avg, exp_avg_sq                       momenta, after the freeze
//! 1-bit LAMB       exp_avg, exp_avg_sq, exp_avg_sq_fresh     norms, then all momenta
//! 0/1 Adam         exp_avg, exp_avg_sq, and two others       see `StepKind`
//! ```
//!
//! `time` is the number of a step, counted from 1: the number of applied steps before it, plus one.
//! All functions about a step depend only on `time` and the plan, so a resumed run needs no further
//! state.

use deepburn_config::{
    AdamPlan, LambPlan, MuonPlan, OneBitAdamPlan, OneBitLambPlan, OptimizerPlan, ZeroOneAdamPlan,
};
use deepburn_kernels as kernels;
use deepburn_kernels::ElementwiseStep;

use super::Rates;
use super::moments::moments;
use super::rounds::UpdateScope;
use super::zero_one::{self, StepKind};
use crate::assignment::{Matrices, UpdateSettings};

/// The scalars of one step, which are the same for all parameters with the same settings. The
/// variant determines the number of passes and the exchange between them.
#[derive(Debug)]
pub(super) enum UpdateStep {
    /// One pass over the elements, which changes the moments and the values.
    Elements(ElementwiseStep),
    /// LAMB: a pass that computes a direction, and a pass that applies it with a rate that depends
    /// on two norms.
    Norms {
        /// The first pass.
        direction: ElementwiseStep,
        /// The learning rate, with bias correction if the plan has it. It is multiplied by the
        /// trust ratio.
        step_size: f64,
        /// The bounds of the trust ratio (DeepSpeed's `min_coeff` and `max_coeff`).
        trust_ratio: [f64; 2],
        /// The decay of the moving average of trust ratios, which 1-bit LAMB keeps until the
        /// freeze; `None` for LAMB.
        coeff_beta: Option<f64>,
    },
    /// Muon: a pass that computes a direction, whose matrices are then orthogonalised, and a pass
    /// that applies the result.
    Matrix { direction: ElementwiseStep, lr: f64, plan: MuonPlan, matrices: Matrices },
    /// A pass that computes the momentum of this rank, and a pass with the mean momentum of all
    /// ranks. 0/1 Adam averages gradients or accumulated updates instead of momenta.
    Momentum { local: ElementwiseStep, agreed: ElementwiseStep },
    /// 1-bit LAMB after the freeze: a pass that computes the momentum of this rank, a pass that
    /// computes a direction from the mean momentum, and a pass that applies it with a rate that
    /// depends on the tensor's frozen trust ratio.
    FrozenLamb { local: ElementwiseStep, direction: ElementwiseStep, lr: f64, plan: OneBitLambPlan },
}

/// Returns the names of all arrays that an optimizer keeps for each parameter. The moments come
/// first; checkpoints store them. The additional arrays of 0/1 Adam follow. Loading a checkpoint
/// derives them from the stored arrays.
pub(crate) fn state_arrays(plan: &OptimizerPlan) -> &'static [&'static str] {
    match plan {
        OptimizerPlan::ZeroOneAdam(_) => &zero_one::ARRAYS,
        _ => moments(plan),
    }
}

/// Returns true if ranks average momenta in step `time`. Each rank then uses its own gradient,
/// because averaging gradients would cost the communication that the compression saves.
pub(super) fn agrees_on_momentum(plan: &OptimizerPlan, time: u64) -> bool {
    match plan {
        OptimizerPlan::OneBitAdam(plan) => time > plan.freeze_step,
        OptimizerPlan::OneBitLamb(plan) => time > plan.freeze_step,
        _ => false,
    }
}

/// Returns true if each rank uses its own gradient in step `time`, so that the reducer must not
/// average gradients.
pub(super) fn takes_own_gradients(plan: &OptimizerPlan, time: u64) -> bool {
    match plan {
        OptimizerPlan::ZeroOneAdam(plan) => !zero_one::updates_variance(plan, time),
        plan => agrees_on_momentum(plan, time),
    }
}

/// Returns true if the step before step `time` has changed a second moment. Only elements with a
/// nonzero second moment take part in exchanges, so this set must then be computed again.
pub(super) fn second_moment_has_changed(plan: &OptimizerPlan, time: u64) -> bool {
    match plan {
        OptimizerPlan::ZeroOneAdam(plan) => time > 1 && zero_one::updates_variance(plan, time - 1),
        _ => false,
    }
}

/// Returns true if step `time` uses the compression errors of earlier steps (error feedback). For
/// 1-bit Adam and 1-bit LAMB, this holds only after `freeze_step`: earlier steps are uncompressed,
/// and the set of elements to compress still grows, because an element joins it with its first
/// gradient.
pub(super) fn keeps_errors(plan: &OptimizerPlan, time: u64) -> bool {
    matches!(plan, OptimizerPlan::ZeroOneAdam(_)) || agrees_on_momentum(plan, time)
}

/// Returns true if step `time` is the last one that changes the second moment.
pub(super) fn freezes_after(plan: &OptimizerPlan, time: u64) -> bool {
    match plan {
        OptimizerPlan::OneBitAdam(plan) => time == plan.freeze_step,
        OptimizerPlan::OneBitLamb(plan) => time == plan.freeze_step,
        OptimizerPlan::ZeroOneAdam(plan) => time == plan.var_freeze_step,
        _ => false,
    }
}

/// Returns true if compression errors must be reset after step `time`, because 0/1 Adam exchanges
/// updates instead of gradients in later steps.
pub(super) fn forgets_errors(plan: &OptimizerPlan, time: u64) -> bool {
    matches!(plan, OptimizerPlan::ZeroOneAdam(plan) if time == plan.var_freeze_step)
}

/// Returns true if step `time` is the first local step. The common parameters must be stored before
/// this step.
pub(super) fn is_first_local(plan: &OptimizerPlan, time: u64) -> bool {
    matches!(plan, OptimizerPlan::ZeroOneAdam(plan) if time == plan.var_freeze_step + 1)
}

/// Returns true if step `time` is local: each rank updates its parameters with its own gradient.
pub(super) fn is_local(plan: &OptimizerPlan, time: u64) -> bool {
    matches!(plan, OptimizerPlan::ZeroOneAdam(plan) if zero_one::is_local(plan, time))
}

/// Returns the name of the quantity that step `time` compresses, or would compress; `None` for an
/// optimizer without compression. The compression errors of one quantity cannot be used for
/// another, so checkpoints store the name together with the errors.
pub(super) fn compressed_quantity(plan: &OptimizerPlan, time: u64) -> Option<&'static str> {
    match plan {
        OptimizerPlan::OneBitAdam(_) => Some("momentum"),
        OptimizerPlan::OneBitLamb(_) => Some("scaled momentum"),
        OptimizerPlan::ZeroOneAdam(_) if is_local(plan, time) => Some("update"),
        OptimizerPlan::ZeroOneAdam(_) => Some("gradient"),
        _ => None,
    }
}

/// Returns true if ranks have different parameters after step `time`. `local_rates` is the sum of
/// learning rates since all ranks last had the same parameters, including this step.
pub(super) fn leaves_ranks_apart(plan: &OptimizerPlan, time: u64, local_rates: f64) -> bool {
    match plan {
        OptimizerPlan::ZeroOneAdam(plan) => {
            StepKind::at(plan, time, local_rates) == StepKind::Local
        }
        _ => false,
    }
}

/// Returns the scope of the update of a parameter of this shape in step `time`.
///
/// `local_rates` is the sum of the schedule's learning rates since all ranks last had the same
/// parameters, including this step. This function multiplies it by the parameter's `lr_factor`.
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
            // With X of shape [short, long]: X X^T and the product with the polynomial take
            // `short^2 long` each, and the square of the Gram matrix takes `short^3`.
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

/// Returns the scalars of step `time` for these settings. `rates` are the learning rate and betas
/// of the schedule. `local_rates` is the same sum as in `scope`.
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

/// Returns the scalars of LAMB (You et al. 2020). `coeff_beta` is set for 1-bit LAMB, which
/// averages trust ratios until its freeze.
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

/// Returns the scalars of 1-bit LAMB after the freeze (Li et al. 2021, and
/// `deepspeed/runtime/fp16/onebit/lamb.py`). As in DeepSpeed, there is no bias correction.
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

/// Returns the scalars of 1-bit Adam after the freeze (Tang et al. 2021). They are not
/// bias-corrected, because the second moment no longer changes.
fn momentum(plan: &OneBitAdamPlan, Rates { lr, betas }: Rates) -> UpdateStep {
    let AdamPlan { betas: own, eps, weight_decay, .. } = plan.adam;
    let [beta1, _] = betas.unwrap_or(own);
    // `beta1` is 0 in the second pass: the mean momentum already contains the gradient and replaces
    // the momentum of this rank.
    let agreed = kernels::FrozenAdam { lr, beta1: 0.0, eps, weight_decay };
    UpdateStep::Momentum {
        local: kernels::LocalMomentumStep::new(beta1).into(),
        agreed: kernels::FrozenAdamStep::new(&agreed).into(),
    }
}

/// Returns the scalars of 0/1 Adam (Lu et al. 2022) for the kind of this step. `local_rates`
/// already contains the factor of the parameter group.
fn zero_one_step(plan: &ZeroOneAdamPlan, rates: Rates, time: u64, local_rates: f64) -> UpdateStep {
    let AdamPlan { betas: own, eps, weight_decay, .. } = plan.adam;
    let [beta1, _] = rates.betas.unwrap_or(own);
    let frozen = kernels::FrozenAdam { lr: rates.lr, beta1, eps, weight_decay };
    match StepKind::at(plan, time, local_rates) {
        StepKind::ExactGradient => {
            UpdateStep::Elements(elementwise(&OptimizerPlan::AdamW(plan.adam), rates, time))
        }
        // A momentum with `beta1 = 0` is the gradient itself, so the exchange compresses the
        // gradient.
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

/// Returns the scalars of an optimizer with element-wise updates. The `betas` of the schedule
/// replace the betas of the plan; SGD uses the first beta as its momentum.
///
/// # Panics
///
/// Panics for LAMB, Muon, 1-bit LAMB and 0/1 Adam, whose steps are not element-wise or have several
/// kinds.
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
        // 1-bit Adam before the freeze is AdamW.
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
