//! Muon: keys of DeepSpeed and of `torch.optim.Muon`, with DeepSpeed's defaults.

use super::*;

/// Default learning rate of Adam, which updates the other parameters in DeepSpeed's Muon.
const MUON_ADAM_LR: f64 = 3e-4;

/// Smallest norm by which `torch.optim.Muon` divides a matrix.
const NEWTON_SCHULZ_EPS: f64 = 1e-7;

/// Resolves Muon's part of the plan.
pub(super) fn resolve(params: &Muon<'_>, context: &mut Context<'_>) -> OptimizerPlan {
    let (lr, adam_lr) = rates(params, context);
    OptimizerPlan::Muon(
        filled!(MuonPlan, params { momentum, nesterov, weight_decay, scale, decouples_decay }
            lr,
            newton_schulz: NewtonSchulzPlan {
                steps: params.ns_steps.value,
                coefficients: params.ns_coefficients.value,
                eps: NEWTON_SCHULZ_EPS,
            },
            adam: filled!(AdamPlan, params { betas, eps, weight_decay } lr: adam_lr, bias_correction: true),
        ),
    )
}

//= deepspeed 0.19.8 runtime/engine.py _muon_half_defaults
/// Returns the learning rates of matrices and of all other parameters.
fn rates(params: &Muon<'_>, context: &mut Context<'_>) -> (f64, f64) {
    let shared = learning_rate(&params.lr, context);
    let asks = params.lr.is_given() || context.run.learning_rate.is_some();
    let is_given = asks || params.lr.is_auto();
    // As in DeepSpeed, a given rate is for both halves, and each has a default of its own
    // otherwise.
    let adam_default = if is_given { shared } else { MUON_ADAM_LR };
    let lr = params.muon_lr.value.unwrap_or(shared);
    let adam_lr = params.adam_lr.value.unwrap_or(adam_default);
    warning!(if asks && params.muon_lr.is_given() && params.adam_lr.is_given();
        context, &params.lr => "{shared:?} is not used: muon_lr is {lr:?} and adam_lr {adam_lr:?}";
        "remove it, or one of the two");
    refuse!(if adam_lr > f64::from(f32::MAX);
        context, &params.adam_lr => "{adam_lr:e} is larger than an f32 can hold ({:e})", f32::MAX;
        "give a learning rate, 1e-3 for example");
    note!(if adam_lr != lr && lr != 0.0; context, &params.adam_lr =>
        "in every step of a schedule, Adam's learning rate is {:?} times the matrices' learning rate; a DeepSpeed \
         schedule with a rate of its own gives both the same rate", adam_lr / lr);
    (lr, adam_lr)
}
