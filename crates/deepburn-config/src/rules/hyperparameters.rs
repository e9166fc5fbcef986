//! Hyper-parameters that several optimizers have: learning rate, bounds and eps.

use crate::context::Context;
use crate::section::Setting;

/// Learning rate of transformers' trainer, which `"auto"` stands for.
const TRANSFORMERS_LR: f64 = 5e-5;

/// Returns the section's learning rate, or the job's where the section leaves it open.
pub(super) fn learning_rate(key: &Setting<'_, f64>, context: &mut Context<'_>) -> f64 {
    let lr = key.value;
    let Some(wanted) = context.run.learning_rate else {
        if !key.is_auto() {
            return lr;
        }
        context.answer(&key.path, TRANSFORMERS_LR, "transformers' default");
        return TRANSFORMERS_LR;
    };
    if !key.is_given() {
        if key.is_auto() {
            context.answer(&key.path, wanted, "training.learning_rate");
        }
        return wanted;
    }
    if wanted != lr {
        let message = format!("{lr:?} is used, not training.learning_rate {wanted:?}");
        let remedy = "give one of them, or write \"auto\" here";
        context.warning(key, message, remedy);
    }
    lr
}

/// Returns a smallest and a largest value. Refuses a smallest that is above the largest.
pub(super) fn bounds(
    smallest: &Setting<'_, f64>,
    largest: &Setting<'_, f64>,
    context: &mut Context<'_>,
) -> [f64; 2] {
    let bounds = [smallest.value, largest.value];
    if bounds[0] > bounds[1] {
        let names = [smallest.key.name, largest.key.name];
        let message = format!("{:?} is above {} {:?}", bounds[0], names[1], bounds[1]);
        let remedy = format!("give a {} of at most {}", names[0], names[1]);
        context.error(smallest, message, remedy);
    }
    bounds
}

/// Returns eps, which divides elements whose second moment is 0. Refuses one that is 0 in f32.
pub(super) fn positive_eps(key: &Setting<'_, f64>, context: &mut Context<'_>) -> f64 {
    let eps = key.value;
    if eps > 0.0 && eps as f32 == 0.0 {
        let message = format!("{eps:e} is 0 in f32, in which updates are computed");
        context.error(key, message, "give at least 1e-38, 1e-8 for example");
    }
    eps
}
