//! The optimizers that exchange compressed momenta: 1-bit Adam, 1-bit LAMB and 0/1 Adam.

use super::*;

/// Resolves 1-bit Adam's part of the plan.
pub(super) fn adam(params: &ConfigEntry<'_>, context: &mut Context<'_>) -> OptimizerPlan {
    let adam = moments(params, true, context);
    let freeze_step = freeze_step(&OneBitAdam::read(params).freeze_step, context);
    OptimizerPlan::OneBitAdam(OneBitAdamPlan { adam, freeze_step })
}

//= deepspeed 0.19.6 runtime/fp16/onebit/lamb.py OnebitLamb defaults
/// Resolves 1-bit LAMB's part of the plan.
pub(super) fn lamb(entry: &ConfigEntry<'_>, context: &mut Context<'_>) -> OptimizerPlan {
    let params = OneBitLamb::read(entry);
    let freeze_step = freeze_step(&params.freeze_step, context);
    let coeff_beta = params.coeff_beta.value;
    // The average starts at 0. If it is frozen too early, all later updates are too small by the
    // same factor.
    warning!(if (freeze_step as f64) * (1.0 - coeff_beta) < 1.0 - 1e-9; context, &params.freeze_step =>
        "{freeze_step} is below 1 / (1 - coeff_beta): the average of trust ratios, which starts at 0, is {:.0} % \
         too small when it is frozen", 100.0 * coeff_beta.powf(freeze_step as f64);
        "give more steps or a smaller coeff_beta");
    let adam = moments(entry, true, context);
    let trust_ratio = bounds(&params.min_coeff, &params.max_coeff, context);
    OptimizerPlan::OneBitLamb(OneBitLambPlan {
        lamb: LambPlan::of(adam, trust_ratio),
        freeze_step,
        coeff_beta,
        factor: bounds(&params.factor_min, &params.factor_max, context),
        factor_threshold: params.factor_threshold.value,
    })
}

//= deepspeed 0.19.6 runtime/fp16/onebit/zoadam.py ZeroOneAdam defaults
/// Resolves 0/1 Adam's part of the plan.
pub(super) fn zero_one_adam(entry: &ConfigEntry<'_>, context: &mut Context<'_>) -> OptimizerPlan {
    let params = ZeroOneAdam::read(entry);
    let steps = |key: &Setting<'_, usize>| key.value.max(1) as u64;
    let var_freeze_step = steps(&params.var_freeze_step);
    let total = context.run.total_steps.map_or(u64::MAX, |total| total as u64);
    note!(if var_freeze_step >= total; context, &params.var_freeze_step =>
        "{var_freeze_step} is not below the {} of the run: the second moment is never frozen, and \
         every step exchanges gradients", counted(total as usize, "step"));
    OptimizerPlan::ZeroOneAdam(ZeroOneAdamPlan {
        adam: moments(entry, true, context),
        var_freeze_step,
        var_update_scaler: steps(&params.var_update_scaler),
        local_step_scaler: steps(&params.local_step_scaler),
        local_step_clipper: steps(&params.local_step_clipper),
    })
}

/// Returns the number of exact steps. Reports a number below 1, and warns if the run ends before
/// the freeze.
fn freeze_step(key: &Setting<'_, i64>, context: &mut Context<'_>) -> u64 {
    let step = key.value;
    refuse!(if step < 1; context, key =>
        "{step} is out of range; must be at least 1: before the first step the second moment is 0, and updates \
         are divided by its square root";
        "give 15 to 25 % of the steps");
    let step = step.max(1) as u64;
    let total = context.run.total_steps.map_or(u64::MAX, |total| total as u64);
    warning!(if step >= total;
        context, key => "{step} is not below the {} of the run: momenta are never compressed", counted(total as usize, "step");
        "give 15 to 25 % of the steps, {} for example", (total / 5).max(1));
    step
}

/// Warns if the second moment is frozen while the learning rate still rises. It is then based on
/// gradients of weights that have hardly changed.
pub(crate) fn check_warmup(optimizer: &OptimizerPlan, warmup: usize, context: &mut Context<'_>) {
    let (name, step) = match optimizer {
        OptimizerPlan::OneBitAdam(plan) => ("freeze_step", plan.freeze_step),
        OptimizerPlan::OneBitLamb(plan) => ("freeze_step", plan.freeze_step),
        OptimizerPlan::ZeroOneAdam(plan) => ("var_freeze_step", plan.var_freeze_step),
        _ => return,
    };
    warning!(if step < warmup as u64; context, format!("optimizer.params.{name}") =>
        "{step} is below the {} of the learning rate's warm-up", counted(warmup, "step");
        "freeze the second moment after it: give {warmup} or more");
}
