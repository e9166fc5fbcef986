//! `optimizer`: which one, and its hyper-parameters.
//!
//! `Adam` decouples weight decay unless `adam_w_mode` is false, as in DeepSpeed; `torch_adam` picks
//! PyTorch's class, whose AdamW decays by 0.01 when nothing is said. Optimizers that do not exist
//! here are refused by name.

use super::hyperparameters::{bounds, learning_rate, positive_eps};
use super::variant::choose;
use super::{muon, one_bit};
use crate::context::Context;
use crate::keys::DeepSpeed;
use crate::keys::optimizer::{
    Adagrad, Adam, DEFAULT_LR, Lamb, Lion, Muon, OneBitAdam, OneBitLamb, Sgd, VARIANTS, ZeroOneAdam,
};
use crate::plan::{AdamPlan, LambPlan, OptimizerPlan};
use crate::section::Read;

/// Weight decay of PyTorch's AdamW when none is given.
const TORCH_ADAMW_DECAY: f64 = 0.01;

/// The section's part of the plan. Without the section it is AdamW, and a warning says so:
/// DeepSpeed expects the program to bring an optimizer of its own then.
pub(crate) fn resolve(top: &DeepSpeed<'_>, context: &mut Context<'_>) -> OptimizerPlan {
    let section = &top.optimizer.value;
    let params = &section.params;
    if !top.optimizer.is_given() {
        let lr = context.run.learning_rate.unwrap_or(DEFAULT_LR);
        let message = format!(
            "there is no optimizer: AdamW with lr {lr:?}, betas [0.9, 0.999], eps 1e-8, weight_decay 0 is used"
        );
        context.warning("optimizer", message, "add an optimizer section");
        if top.optimizer.is_auto() {
            context.answer("optimizer", "AdamW", "no optimizer is given");
        }
        return OptimizerPlan::AdamW(adam(&Adam::read(params), lr, 0.0));
    }
    let Some(variant) = choose(&section.name, VARIANTS, "optimizer", context) else {
        return OptimizerPlan::AdamW(adam(&Adam::read(params), DEFAULT_LR, 0.0));
    };
    match variant.name {
        "SGD" => sgd(&Sgd::read(params), context),
        "Lion" => {
            let params = Lion::read(params);
            OptimizerPlan::Lion {
                lr: learning_rate(&params.lr, context),
                betas: params.betas.value,
                weight_decay: params.weight_decay.value,
            }
        }
        "Adagrad" => {
            let params = Adagrad::read(params);
            OptimizerPlan::Adagrad {
                lr: learning_rate(&params.lr, context),
                eps: params.eps.value,
                weight_decay: params.weight_decay.value,
            }
        }
        "Lamb" => lamb(&Lamb::read(params), context),
        "Muon" => muon::resolve(&Muon::read(params), context),
        "OneBitAdam" => one_bit::adam(&OneBitAdam::read(params), context),
        "OneBitLamb" => one_bit::lamb(&OneBitLamb::read(params), context),
        "ZeroOneAdam" => one_bit::zero_one_adam(&ZeroOneAdam::read(params), context),
        name => adam_family(name, &Adam::read(params), context),
    }
}

/// The plan of Adam's parameters, with the learning rate and weight decay that the caller has
/// resolved.
fn adam(params: &Adam<'_>, lr: f64, weight_decay: f64) -> AdamPlan {
    AdamPlan {
        lr,
        betas: params.betas.value,
        eps: params.eps.value,
        weight_decay,
        bias_correction: params.bias_correction.value,
    }
}

/// Adam and AdamW, which differ in where the weight decay goes.
fn adam_family(name: &str, params: &Adam<'_>, context: &mut Context<'_>) -> OptimizerPlan {
    let decoupled = name == "AdamW" || params.adam_w_mode.value;
    let lr = learning_rate(&params.lr, context);
    let decay = &params.weight_decay;
    let mut weight_decay = decay.value;
    if decoupled && params.torch_adam.value && !decay.is_given() {
        weight_decay = TORCH_ADAMW_DECAY;
        if decay.is_auto() {
            context.answer(&decay.path, weight_decay, "PyTorch's default for AdamW");
        }
        let message = "is 0.01, PyTorch's default for AdamW, because of torch_adam";
        context.note(decay, message);
    }
    if name == "Adam" && decoupled {
        let message = "Adam decouples weight decay, as in DeepSpeed; adam_w_mode false gives L2 regularisation";
        context.note("optimizer.type", message);
    }
    let plan = adam(params, lr, weight_decay);
    if decoupled { OptimizerPlan::AdamW(plan) } else { OptimizerPlan::Adam(plan) }
}

/// LAMB, with the bounds of its trust ratio.
fn lamb(params: &Lamb<'_>, context: &mut Context<'_>) -> OptimizerPlan {
    let trust_ratio = bounds(&params.min_coeff, &params.max_coeff, context);
    OptimizerPlan::Lamb(LambPlan {
        lr: learning_rate(&params.lr, context),
        betas: params.betas.value,
        eps: positive_eps(&params.eps, context),
        eps_inside_sqrt: params.eps_inside_sqrt.value,
        weight_decay: params.weight_decay.value,
        bias_correction: params.bias_correction.value,
        trust_ratio,
    })
}

/// SGD. Nesterov's variant needs a momentum, as in PyTorch.
fn sgd(params: &Sgd<'_>, context: &mut Context<'_>) -> OptimizerPlan {
    let (momentum, dampening) = (params.momentum.value, params.dampening.value);
    let nesterov = params.nesterov.value;
    if nesterov && (momentum == 0.0 || dampening != 0.0) {
        let message = format!(
            "true needs a momentum above 0 and no dampening, but they are {momentum:?} and {dampening:?}"
        );
        let remedy = "set momentum to 0.9 for example and dampening to 0, or nesterov to false";
        context.error(&params.nesterov, message, remedy);
    }
    OptimizerPlan::Sgd {
        lr: learning_rate(&params.lr, context),
        momentum,
        dampening,
        weight_decay: params.weight_decay.value,
        nesterov,
    }
}
