//! The definition of each optimizer: its states, the scope of its updates and the scalars of its
//! steps.
//!
//! Only this module and `moments.rs` distinguish optimizers. Checkpoints, offload and ledger use
//! `moments`, the order of a step uses `scope`, and `step` computes the scalars of the kernels in
//! f64, with the learning rate of the parameter's group. An optimizer with compressed exchanges
//! defines all of this in a file of its own, as a [`CompressedOptimizer`].
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

use deepburn_config::{AdamPlan, LambPlan, MuonPlan, OneBitLambPlan, OptimizerPlan};
use deepburn_kernels as kernels;
use deepburn_kernels::ElementwiseStep;

use super::Rates;
use super::rounds::UpdateScope;
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
    /// Muon: a pass that computes a direction, whose matrices are then orthogonalized, and a pass
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

/// The definition of an optimizer whose ranks exchange compressed values in some steps: 1-bit Adam,
/// 1-bit LAMB and 0/1 Adam.
///
/// By default, the ranks average gradients until the freeze, and exchange compressed values after
/// it.
pub(super) trait CompressedOptimizer {
    /// Returns the names of the moments, in the order of the states.
    fn moments(&self) -> &'static [&'static str];

    /// Returns the states with which ranks leave each other between two averages; `None` if all
    /// ranks have the same parameters after every step.
    fn local_states(&self) -> Option<&'static LocalStates> {
        None
    }

    /// Returns the last step that changes the second moment.
    fn freeze_step(&self) -> u64;

    /// Returns true if each rank uses its own gradient in step `time`, so that the reducer must not
    /// average gradients. Averaging them would cost the communication that the compression saves.
    fn takes_own_gradients(&self, time: u64) -> bool {
        time > self.freeze_step()
    }

    /// Returns true if the step before step `time` has changed a second moment. Only elements with
    /// a nonzero second moment take part in exchanges, so this set must then be computed again.
    fn second_moment_has_changed(&self, _time: u64) -> bool {
        false
    }

    /// Returns true if step `time` uses the compression errors of earlier steps (error feedback).
    /// By default, this holds only after the freeze: earlier steps are uncompressed, and the set of
    /// elements to compress still grows, because an element joins it with its first gradient.
    fn keeps_errors(&self, time: u64) -> bool {
        time > self.freeze_step()
    }

    /// Returns true if compression errors must be reset after step `time`, because later steps
    /// compress another quantity.
    fn forgets_errors(&self, _time: u64) -> bool {
        false
    }

    /// Returns true if step `time` is local: each rank updates its parameters with its own
    /// gradient.
    fn is_local(&self, _time: u64) -> bool {
        false
    }

    /// Returns true if ranks have different parameters after step `time`. `local_rates` is the sum
    /// of learning rates since all ranks last had the same parameters, including this step.
    fn leaves_ranks_apart(&self, _time: u64, _local_rates: f64) -> bool {
        false
    }

    /// Returns the name of the quantity that step `time` compresses, or would compress. The
    /// compression errors of one quantity cannot be used for another, so checkpoints store the name
    /// together with the errors.
    fn compressed_quantity(&self, time: u64) -> &'static str;

    /// Returns the scope of an update in step `time`. `local_rates` is the sum of the parameter's
    /// learning rates since all ranks last had the same parameters, including this step.
    fn scope(&self, time: u64, local_rates: f64) -> UpdateScope;

    /// Returns the scalars of step `time`, with the same arguments as [`scope`](Self::scope).
    fn step(&self, rates: Rates, time: u64, local_rates: f64) -> UpdateStep;
}

/// The states of an optimizer with local steps, which all ranks have after the moments.
#[derive(Debug)]
pub(super) struct LocalStates {
    /// The arrays that differ between ranks after a local step. Checkpoints store each of them once
    /// per rank.
    pub(super) of_rank: [&'static str; 2],
    /// The sum of this rank's updates since the last average, one of the arrays above.
    pub(super) moved: &'static str,
    /// The values that all ranks had after the last average, which checkpoints store as the
    /// weights. The current values of a rank are these values plus its updates.
    pub(super) common: &'static str,
    /// The arrays that follow the moments in the list of states. Loading a checkpoint derives them
    /// from the stored arrays.
    pub(super) derived: [&'static str; 2],
}

/// Returns the definition of an optimizer with compressed exchanges; `None` for others. This is the
/// only place that names them.
pub(super) fn compressed(plan: &OptimizerPlan) -> Option<&dyn CompressedOptimizer> {
    match plan {
        OptimizerPlan::OneBitAdam(plan) => Some(plan),
        OptimizerPlan::OneBitLamb(plan) => Some(plan),
        OptimizerPlan::ZeroOneAdam(plan) => Some(plan),
        _ => None,
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
        (plan, _) => compressed(plan).map_or(UpdateScope::Elements, |plan| {
            plan.scope(time, settings.lr_factor * local_rates)
        }),
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
        (plan, _) => match compressed(plan) {
            Some(plan) => plan.step(rates, time, settings.lr_factor * local_rates),
            None => UpdateStep::Elements(elementwise(plan, rates, time)),
        },
    }
}

/// Returns the scalars of LAMB (You et al. 2020). `coeff_beta` is set for 1-bit LAMB, which
/// averages trust ratios until its freeze.
pub(super) fn lamb(
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

/// Returns the scalars of an optimizer with element-wise updates. The `betas` of the schedule
/// replace the betas of the plan; SGD uses the first beta as its momentum.
///
/// # Panics
/// Panics for LAMB and Muon, whose steps are not element-wise, and for optimizers with compressed
/// exchanges, which have several kinds of steps.
pub(super) fn elementwise(
    plan: &OptimizerPlan,
    Rates { lr, betas }: Rates,
    time: u64,
) -> ElementwiseStep {
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
        OptimizerPlan::Sgd { momentum, dampening, weight_decay, nesterov, .. } => {
            // A schedule that cycles momentum must not add momentum to SGD without a momentum
            // buffer.
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
        OptimizerPlan::OneBitAdam(_)
        | OptimizerPlan::OneBitLamb(_)
        | OptimizerPlan::ZeroOneAdam(_) => unreachable!("their steps are of several kinds"),
    }
}
