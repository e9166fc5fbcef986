//! The schedule of 0/1 Adam: the kind of a step as a function of its number.
//!
//! Until `var_freeze_step`, some steps average exact gradients and update the second moment; the
//! others average compressed gradients. The interval between updates of the second moment doubles
//! after every `var_update_scaler` updates. After `var_freeze_step`, each rank takes steps with its
//! own gradient, and ranks average their updates at intervals. The interval doubles every
//! `local_step_scaler` steps, up to `local_step_clipper`. DeepSpeed keeps counters for this. Here
//! the step number determines the kind, so a resumed run needs no counters.
//!
//! Source: Lu et al. 2022, "Maximizing Communication Efficiency for Large-scale Training via 0/1
//! Adam", and `deepspeed/runtime/fp16/onebit/zoadam.py`. With `var_update_scaler` 2,
//! `var_freeze_step` 8, `local_step_scaler` 2 and `local_step_clipper` 4:
//!
//! ```text
//! step   1 2 3 4 5 6 7 8 | 9 10 11 12 13 14 15 16
//! kind   E E C E C E C E | X X  L  X  L  L  L  X
//! E exact gradient, C compressed gradient, L local step, X local step with exchange
//! ```

use deepburn_config::{AdamPlan, OptimizerPlan, ZeroOneAdamPlan};
use deepburn_kernels as kernels;

use super::Rates;
use super::moments::{FIRST_MOMENT, SECOND_MOMENT};
use super::rounds::UpdateScope;
use super::rule::{CompressedOptimizer, LocalStates, UpdateStep, elementwise};

/// The sum of this rank's updates since the last average. The name is DeepSpeed's.
const MOVED: &str = "momentum_accumulator";

/// The values that all ranks had after the last average.
const COMMON: &str = "common";

/// The states of local steps. `MOVED` and `COMMON` are allocated from the start but unused until
/// `var_freeze_step`.
pub(super) const LOCAL: LocalStates = LocalStates {
    of_rank: [FIRST_MOMENT, MOVED],
    moved: MOVED,
    common: COMMON,
    derived: [MOVED, COMMON],
};

impl CompressedOptimizer for ZeroOneAdamPlan {
    fn moments(&self) -> &'static [&'static str] {
        &[FIRST_MOMENT, SECOND_MOMENT]
    }

    fn local_states(&self) -> Option<&'static LocalStates> {
        Some(&LOCAL)
    }

    fn freeze_step(&self) -> u64 {
        self.var_freeze_step
    }

    fn takes_own_gradients(&self, time: u64) -> bool {
        // This includes the steps that compress gradients: each rank compresses its own gradient.
        !updates_variance(self, time)
    }

    fn second_moment_has_changed(&self, time: u64) -> bool {
        time > 1 && updates_variance(self, time - 1)
    }

    fn keeps_errors(&self, _time: u64) -> bool {
        // Gradients are compressed from the beginning, not only after the freeze.
        true
    }

    fn forgets_errors(&self, time: u64) -> bool {
        // Until the freeze gradients are compressed, and afterwards accumulated updates.
        time == self.var_freeze_step
    }

    fn is_local(&self, time: u64) -> bool {
        is_local(self, time)
    }

    fn leaves_ranks_apart(&self, time: u64, local_rates: f64) -> bool {
        StepKind::at(self, time, local_rates) == StepKind::Local
    }

    fn compressed_quantity(&self, time: u64) -> &'static str {
        if is_local(self, time) { "update" } else { "gradient" }
    }

    fn scope(&self, time: u64, local_rates: f64) -> UpdateScope {
        match StepKind::at(self, time, local_rates) {
            StepKind::ExactGradient | StepKind::Local => UpdateScope::Elements,
            StepKind::CompressedGradient | StepKind::Exchange => UpdateScope::Momentum,
        }
    }

    /// Returns the scalars of 0/1 Adam (Lu et al. 2022) for the kind of this step. `local_rates`
    /// already contains the factor of the parameter group.
    fn step(&self, rates: Rates, time: u64, local_rates: f64) -> UpdateStep {
        let AdamPlan { betas: own, eps, weight_decay, .. } = self.adam;
        let [beta1, _] = rates.betas.unwrap_or(own);
        let frozen = kernels::FrozenAdam { lr: rates.lr, beta1, eps, weight_decay };
        match StepKind::at(self, time, local_rates) {
            StepKind::ExactGradient => {
                UpdateStep::Elements(elementwise(&OptimizerPlan::AdamW(self.adam), rates, time))
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
}

/// The kind of a step, the same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StepKind {
    /// A step of Adam with the mean gradient.
    ExactGradient,
    /// A step with the mean of compressed gradients. The second moment stays unchanged.
    CompressedGradient,
    /// A step with this rank's own gradient.
    Local,
    /// A step with this rank's own gradient, followed by an average of the ranks' updates.
    Exchange,
}

impl StepKind {
    /// Returns the kind of step `time`, counted from 1. `rates` is the sum of learning rates since
    /// the last exchange, including this step. The momentum after an exchange is divided by this
    /// sum, so ranks exchange nothing as long as it is 0.
    fn at(plan: &ZeroOneAdamPlan, time: u64, rates: f64) -> Self {
        match is_local(plan, time) {
            false if updates_variance(plan, time) => Self::ExactGradient,
            false => Self::CompressedGradient,
            true if exchanges(plan, time) && rates != 0.0 => Self::Exchange,
            true => Self::Local,
        }
    }
}

/// Returns true if step `time` is local: each rank updates its parameters with its own gradient.
fn is_local(plan: &ZeroOneAdamPlan, time: u64) -> bool {
    time > plan.var_freeze_step
}

//= deepspeed 0.19.6 runtime/fp16/onebit/zoadam.py ZeroOneAdam var_update_scaler
/// Returns true if step `time`, counted from 1, updates the second moment. Such a step uses the
/// exact mean gradient.
///
/// With each interval there are `var_update_scaler` updates, at consecutive multiples of the
/// interval. The interval then doubles. The loop runs once per interval, at most about `log2(time)`
/// times.
fn updates_variance(plan: &ZeroOneAdamPlan, time: u64) -> bool {
    let (mut last, mut interval) = (0_u64, 1_u64);
    while !is_local(plan, time) {
        // The first multiple of this interval after the last update with the previous one.
        let first = (last / interval + 1).saturating_mul(interval);
        let end = (plan.var_update_scaler - 1).saturating_mul(interval).saturating_add(first);
        if time <= end {
            return time >= first && time.is_multiple_of(interval);
        }
        (last, interval) = (end, interval.saturating_mul(2));
    }
    false
}

/// Returns true if ranks exchange their accumulated updates in step `time`. The interval between
/// exchanges is a power of two that doubles every `local_step_scaler` local steps, up to
/// `local_step_clipper`. Shifts beyond 64 bits saturate.
fn exchanges(plan: &ZeroOneAdamPlan, time: u64) -> bool {
    let doublings = time.saturating_sub(plan.var_freeze_step + 1) / plan.local_step_scaler;
    let interval = match u32::try_from(doublings) {
        Ok(doublings) => 1_u64.checked_shl(doublings).unwrap_or(u64::MAX),
        Err(_) => u64::MAX,
    };
    is_local(plan, time) && time.is_multiple_of(interval.min(plan.local_step_clipper))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn plan([freeze, update, step, clipper]: [u64; 4]) -> ZeroOneAdamPlan {
        let betas = [0.9, 0.999];
        let adam =
            AdamPlan { lr: 1e-3, betas, eps: 1e-8, weight_decay: 0.0, bias_correction: false };
        ZeroOneAdamPlan {
            adam,
            var_freeze_step: freeze,
            var_update_scaler: update,
            local_step_scaler: step,
            local_step_clipper: clipper,
        }
    }

    /// Returns the kinds of steps according to DeepSpeed's counters, as in the simulation of
    /// `tests/states`.
    fn counted(plan: &ZeroOneAdamPlan, steps: u64) -> Vec<StepKind> {
        let [mut var_interval, mut local_interval] = [1, 1];
        let [mut var_counter, mut local_counter] = [0, 0];
        let mut kinds = Vec::new();
        for time in 1..=steps {
            if time > plan.var_freeze_step {
                let exchanges = time.is_multiple_of(local_interval);
                kinds.push(if exchanges { StepKind::Exchange } else { StepKind::Local });
                local_counter += 1;
                if local_counter == plan.local_step_scaler {
                    local_counter = 0;
                    local_interval = (local_interval * 2).min(plan.local_step_clipper);
                }
                continue;
            }
            if !time.is_multiple_of(var_interval) {
                kinds.push(StepKind::CompressedGradient);
                continue;
            }
            kinds.push(StepKind::ExactGradient);
            var_counter += 1;
            if var_counter == plan.var_update_scaler {
                var_counter = 0;
                var_interval *= 2;
            }
        }
        kinds
    }

    proptest! {
        //= deepspeed 0.19.6 runtime/fp16/onebit/zoadam.py ZeroOneAdam var_update_scaler
        #[test]
        fn the_schedule_matches_deepspeeds_counters(
            freeze in 1_u64..200,
            update in 1_u64..20,
            step in 1_u64..30,
            clipper in 1_u64..40,
        ) {
            let plan = plan([freeze, update, step, clipper]);
            let kinds: Vec<_> = (1..=400).map(|time| StepKind::at(&plan, time, 1.0)).collect();
            prop_assert_eq!(kinds, counted(&plan, 400));
        }
    }

    //= deepspeed 0.19.6 runtime/fp16/onebit/zoadam.py ZeroOneAdam var_update_scaler
    #[test]
    fn defaults_of_deepspeed_for_a_long_run() {
        let plan = plan([100_000, 16, 32_678, 16]);
        let kinds: Vec<_> = (1..=300_000).map(|time| StepKind::at(&plan, time, 1.0)).collect();
        assert!(kinds == counted(&plan, 300_000));
        // The second moment is updated 16 times with each interval from 1 to 2048, up to step
        // 65520, and then at 9 multiples of 4096.
        let updates = kinds.iter().filter(|kind| **kind == StepKind::ExactGradient).count();
        assert_eq!(updates, 12 * 16 + 9);
    }

    #[test]
    fn steps_without_a_rate_exchange_nothing() {
        let plan = plan([2, 1, 1, 1]);
        assert_eq!(StepKind::at(&plan, 3, 0.0), StepKind::Local);
        assert_eq!(StepKind::at(&plan, 3, 0.1), StepKind::Exchange);
        assert_eq!(StepKind::at(&plan, 2, 0.0), StepKind::ExactGradient);
    }

    #[test]
    fn intervals_beyond_all_numbers_never_come() {
        let plan = plan([1, 1, 1, u64::MAX]);
        assert_eq!(StepKind::at(&plan, u64::MAX, 1.0), StepKind::Exchange);
        assert_eq!(StepKind::at(&plan, u64::MAX - 1, 1.0), StepKind::Local);
        let plan = ZeroOneAdamPlan { var_freeze_step: u64::MAX - 1, ..plan };
        assert!(updates_variance(&plan, 1 << 40) && !updates_variance(&plan, (1 << 40) + 1));
        assert!(!updates_variance(&plan, u64::MAX - 1));
    }
}
