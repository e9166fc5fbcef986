//! The one-cycle policy (Smith 2018). The learning rate rises and falls once while the momentum
//! falls and rises. After the cycle both decay.
//!
//! The momentum differs from DeepSpeed's in two points. The first step uses the cycle's maximal
//! momentum, where DeepSpeed's optimizer still has the minimal one. The growth after the cycle is
//! limited to [`HIGHEST_GROWN_BETA1`]; in DeepSpeed the momentum exceeds 1, and Adam diverges.

use deepburn_config::OneCyclePlan;

/// Adam's second beta while the schedule changes the momentum.
pub(super) const BETA2: f64 = 0.99;

/// The limit of the momentum after the cycle, unless the cycle's own maximum is higher.
pub(super) const HIGHEST_GROWN_BETA1: f64 = 0.999;

//= deepspeed 0.19.8 runtime/lr_schedules.py OneCycle get_lr
/// Returns the learning rate of the step after position `i`.
pub(super) fn learning_rate(plan: &OneCyclePlan, i: i64) -> f64 {
    match phase(plan, i) {
        CyclePhase::Cycle { height } => plan.min_lr + (plan.max_lr - plan.min_lr) * height,
        CyclePhase::Decay { intervals } => plan.min_lr / (1.0 + plan.decay_lr_rate * intervals),
    }
}

//= deepspeed 0.19.8 runtime/lr_schedules.py OneCycle get_mom
/// Returns the momentum of the step after position `i`; `None` if the plan does not change it.
pub(super) fn beta1(plan: &OneCyclePlan, i: i64) -> Option<f64> {
    let cycle = plan.momentum.as_ref()?;
    Some(match phase(plan, i) {
        CyclePhase::Cycle { height } => cycle.max - (cycle.max - cycle.min) * height,
        CyclePhase::Decay { intervals } => {
            let grown = cycle.max * (1.0 + cycle.decay_rate * intervals);
            grown.min(HIGHEST_GROWN_BETA1.max(cycle.max))
        }
    })
}

/// The part of the schedule that a step belongs to.
enum CyclePhase {
    /// In the cycle, at a height from 0 (its ends) to 1 (its top).
    Cycle { height: f64 },
    /// After the cycle. `intervals` counts decay intervals; it is 0 without decay.
    Decay { intervals: f64 },
}

/// Returns the phase of the step after position `i`.
fn phase(plan: &OneCyclePlan, i: i64) -> CyclePhase {
    // Positions are at least -1 (`Schedule::seek`), so the number of applied steps is not negative.
    let step = usize::try_from(i.saturating_add(1)).unwrap_or(0);
    let (first, second) = (plan.first_step_size, plan.second_step_size);
    let total = first.saturating_add(second);
    if step >= total {
        let intervals = match plan.decay_step_size {
            0 => 0.0,
            size => (step - total) as f64 / size as f64,
        };
        return CyclePhase::Decay { intervals };
    }
    let height = if step <= first {
        stair(step, first, plan.first_stair_count)
    } else {
        // The way down mirrors the way up: it is counted from the end of the cycle.
        stair(total - step, second, plan.second_stair_count)
    };
    CyclePhase::Cycle { height }
}

//= deepspeed 0.19.8 runtime/lr_schedules.py OneCycle stairs
/// Returns `step / size`, rounded down to a multiple of `1 / stairs` if there are stairs. The
/// integer arithmetic ensures that the result at the top is exactly 1 for all sizes.
fn stair(step: usize, size: usize, stairs: usize) -> f64 {
    match (size, stairs) {
        (0, _) => 0.0,
        (_, 0) => step as f64 / size as f64,
        _ => (step as u128 * stairs as u128 / size as u128) as f64 / stairs as f64,
    }
}
