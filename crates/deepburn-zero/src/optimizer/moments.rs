//! The moments that each optimizer keeps, by name.

use deepburn_config::OptimizerPlan;

use super::rule::compressed;

/// The name of the moving average of gradients.
pub(super) const FIRST_MOMENT: &str = "exp_avg";

/// The name of the moving average of squared gradients.
pub(super) const SECOND_MOMENT: &str = "exp_avg_sq";

/// The name of the second moment that 1-bit LAMB still updates after the freeze. It is 0 before the
/// freeze.
pub(super) const FRESH_SECOND_MOMENT: &str = "exp_avg_sq_fresh";

/// Returns the names of the moments that an optimizer keeps for each parameter, as PyTorch and
/// DeepSpeed name them in optimizer state dicts.
///
/// Each moment has one f32 element per element of the parameter. SGD without momentum has none.
/// 1-bit LAMB's third name is DeepSpeed's.
pub fn moments(plan: &OptimizerPlan) -> &'static [&'static str] {
    match plan {
        OptimizerPlan::AdamW(_) | OptimizerPlan::Adam(_) | OptimizerPlan::Lamb(_) => {
            &[FIRST_MOMENT, SECOND_MOMENT]
        }
        OptimizerPlan::Sgd { momentum: 0.0, .. } => &[],
        OptimizerPlan::Sgd { .. } | OptimizerPlan::Muon(_) => &["momentum_buffer"],
        OptimizerPlan::Lion { .. } => &[FIRST_MOMENT],
        OptimizerPlan::Adagrad { .. } => &["sum"],
        OptimizerPlan::OneBitAdam(_)
        | OptimizerPlan::OneBitLamb(_)
        | OptimizerPlan::ZeroOneAdam(_) => compressed(plan).map_or(&[], |plan| plan.moments()),
    }
}

/// Returns the number of all arrays that an optimizer keeps for each parameter: the moments, which
/// checkpoints store, and the derived states of an optimizer with local steps.
pub(crate) fn state_count(plan: &OptimizerPlan) -> usize {
    let local = compressed(plan).and_then(|plan| plan.local_states());
    moments(plan).len() + local.map_or(0, |local| local.derived.len())
}
