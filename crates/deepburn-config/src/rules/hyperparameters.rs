//! Hyper-parameters that several optimizers have: learning rate, moments and bounds.

use super::*;

/// Default learning rate of transformers' `Trainer`, which is the value of `"auto"`.
const TRANSFORMERS_LR: f64 = 5e-5;

/// Returns the section's learning rate, or the job's if the section does not set it.
pub(super) fn learning_rate(key: &Setting<'_, f64>, context: &mut Context<'_>) -> f64 {
    let wanted = context.run.learning_rate;
    if key.is_auto() {
        let answer = wanted.map(|wanted| (wanted, "training.learning_rate"));
        let (lr, from) = answer.unwrap_or((TRANSFORMERS_LR, "transformers' default"));
        context.answer(key, lr, from);
        return lr;
    }
    let lr = key.value;
    let wanted = wanted.unwrap_or(lr);
    // A section without a rate takes the job's, and DeepSpeed's default only without both.
    if !key.is_given() {
        return wanted;
    }
    warning!(if wanted != lr; context, key => "{lr:?} is used, not training.learning_rate {wanted:?}";
        "give one of them, or write \"auto\" here");
    lr
}

/// Returns the settings of Adam from the keys that the Adam family shares, without bias correction.
/// If `divides` is true, elements whose second moment is 0 are divided by eps, so an eps that is 0
/// in f32 is an error.
pub(super) fn moments(
    params: &ConfigEntry<'_>,
    divides: bool,
    context: &mut Context<'_>,
) -> AdamPlan {
    let keys = Moments::read(params);
    let lr = learning_rate(&keys.lr, context);
    let eps = keys.eps.value;
    refuse!(if divides && eps > 0.0 && eps as f32 == 0.0; context, &keys.eps =>
        "{eps:e} is 0 in f32, in which updates are computed"; "give at least 1e-38, 1e-8 for example");
    if !divides {
        warn_of_zero_eps(&keys.eps, context);
    }
    filled!(AdamPlan, keys { betas, weight_decay } lr, eps, bias_correction: false)
}

/// Warns of an eps that is 0 in f32. Elements without gradients are then updated by 0 / 0.
pub(super) fn warn_of_zero_eps(eps: &Setting<'_, f64>, context: &mut Context<'_>) {
    warning!(if eps.value as f32 == 0.0; context, eps =>
        "{:?} makes every element NaN whose gradients have all been 0, as in PyTorch", eps.value;
        "give 1e-8 for example");
}

/// Returns a minimum and a maximum. A minimum above the maximum is an error.
pub(super) fn bounds(
    smallest: &Setting<'_, f64>,
    largest: &Setting<'_, f64>,
    context: &mut Context<'_>,
) -> [f64; 2] {
    let (min, max) = (smallest.value, largest.value);
    let (small, large) = (smallest.key.name, largest.key.name);
    refuse!(if min > max; context, smallest =>
        "{min:?} is above {large} {max:?}"; "give a {small} of at most {large}");
    [min, max]
}
