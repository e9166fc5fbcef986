//! `optimizer.params` of 0/1 Adam, with DeepSpeed's names and defaults.

use super::one_bit::{COMM_BACKEND_NAME, CUDA_AWARE, EPS_INSIDE_SQRT, positive_eps};
use super::optimizer::{
    AMSGRAD, BETAS, LR, MAX_GRAD_NORM, POSITIVE_EPS, WEIGHT_DECAY, learning_rate,
};
use crate::key::{Key, Literal};
use crate::kind::{Integers, Kind};
use crate::plan::{AdamPlan, OptimizerPlan, ZeroOneAdamPlan};
use crate::resolve::Context;
use crate::section::Section;

const VAR_FREEZE_STEP: &str = "var_freeze_step";

const fn count(name: &'static str, default: i64, doc: &'static str) -> Key {
    Key::new(name, Kind::Integer(Integers::POSITIVE), Literal::Integer(default), doc).unit("steps")
}

pub(super) const KEYS: &[Key] = &[
    LR,
    BETAS,
    POSITIVE_EPS,
    WEIGHT_DECAY,
    count(
        VAR_FREEZE_STEP,
        100_000,
        "Last step that may update the second moment, usually the end of the warm-up. Ranks take local steps after it.",
    ),
    count(
        "var_update_scaler",
        16,
        "Updates of the second moment after which the interval between them doubles.",
    ),
    // Not a power of two, as in DeepSpeed.
    count(
        "local_step_scaler",
        32_678,
        "Local steps after which the interval between averages doubles.",
    ),
    count("local_step_clipper", 16, "Largest interval between averages."),
    Key::flag("bias_correction", true, "Divide the moments by 1 - beta^t.")
        .inert("0/1 Adam never corrects its moments; DeepSpeed ignores the key too"),
    EPS_INSIDE_SQRT,
    AMSGRAD,
    CUDA_AWARE,
    COMM_BACKEND_NAME,
    MAX_GRAD_NORM,
];

/// Resolves 0/1 Adam's part of the plan.
pub(super) fn resolve(params: &Section<'_>, context: &mut Context<'_>) -> OptimizerPlan {
    let steps = |name| params.integer(name).max(1) as u64;
    let var_freeze_step = steps(VAR_FREEZE_STEP);
    let total = context.facts.total_steps;
    if let Some(total) = total.filter(|total| var_freeze_step >= *total as u64) {
        let message = format!(
            "{var_freeze_step} is not below the {total} steps of the run: the second moment is never frozen, and every \
             step exchanges gradients"
        );
        context.findings.push(params.note(VAR_FREEZE_STEP, message));
    }
    OptimizerPlan::ZeroOneAdam(ZeroOneAdamPlan {
        adam: AdamPlan {
            lr: learning_rate(params, context),
            betas: params.pair("betas"),
            eps: positive_eps(params, context),
            weight_decay: params.real("weight_decay"),
            bias_correction: false,
        },
        var_freeze_step,
        var_update_scaler: steps("var_update_scaler"),
        local_step_scaler: steps("local_step_scaler"),
        local_step_clipper: steps("local_step_clipper"),
    })
}
