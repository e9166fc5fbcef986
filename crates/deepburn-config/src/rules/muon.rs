//! Muon: keys of DeepSpeed and of `torch.optim.Muon`, with DeepSpeed's defaults.

use super::hyperparameters::learning_rate;
use crate::context::Context;
use crate::keys::optimizer::Muon;
use crate::plan::{AdamPlan, MuonPlan, NewtonSchulzPlan, OptimizerPlan};

/// Learning rate of the Adam beside DeepSpeed's Muon when none is given.
const MUON_ADAM_LR: f64 = 3e-4;

/// Smallest norm by which `torch.optim.Muon` divides a matrix.
const NEWTON_SCHULZ_EPS: f64 = 1e-7;

/// Resolves Muon's part of the plan.
pub(super) fn resolve(params: &Muon<'_>, context: &mut Context<'_>) -> OptimizerPlan {
    let (lr, adam_lr) = rates(params, context);
    let weight_decay = params.weight_decay.value;
    OptimizerPlan::Muon(MuonPlan {
        lr,
        momentum: params.momentum.value,
        nesterov: params.nesterov.value,
        weight_decay,
        newton_schulz: NewtonSchulzPlan {
            steps: params.ns_steps.value,
            coefficients: params.ns_coefficients.value,
            eps: NEWTON_SCHULZ_EPS,
        },
        scale: params.adjust_lr_fn.value,
        adam: AdamPlan {
            lr: adam_lr,
            betas: params.betas.value,
            eps: params.eps.value,
            weight_decay,
            bias_correction: true,
        },
        decouples_decay: params.adam_w_mode.value,
    })
}

/// The learning rates of matrices and of all other parameters.
fn rates(params: &Muon<'_>, context: &mut Context<'_>) -> (f64, f64) {
    let shared = learning_rate(&params.lr, context);
    let asks = params.lr.is_given() || context.run.learning_rate.is_some();
    let is_given = asks || params.lr.is_auto();
    let adam_default = if is_given { shared } else { MUON_ADAM_LR };
    let lr = params.muon_lr.value.unwrap_or(shared);
    let adam_lr = params.adam_lr.value.unwrap_or(adam_default);
    if asks && params.muon_lr.is_given() && params.adam_lr.is_given() {
        let message = format!("{shared:?} is not used: muon_lr is {lr:?} and adam_lr {adam_lr:?}");
        context.warning(&params.lr, message, "remove it, or one of the two");
    }
    if adam_lr > f64::from(f32::MAX) {
        let message = format!("{adam_lr:e} is larger than an f32 can hold ({:e})", f32::MAX);
        let remedy = "give a learning rate, 1e-3 for example";
        context.error(&params.adam_lr, message, remedy);
    }
    if adam_lr != lr && lr != 0.0 {
        let message = format!(
            "in every step of a schedule, Adam's learning rate is {:?} times the matrices' learning rate; a DeepSpeed \
             schedule with a rate of its own gives both the same rate",
            adam_lr / lr
        );
        context.note(&params.adam_lr, message);
    }
    (lr, adam_lr)
}
