//! The moments that each optimizer keeps, by name.

use deepburn_config::OptimizerPlan;

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
