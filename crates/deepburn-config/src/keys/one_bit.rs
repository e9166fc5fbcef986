//! `optimizer.params` of 1-bit Adam, with DeepSpeed's names and defaults.

use super::optimizer::{
    AMSGRAD, BETAS, LR, MAX_GRAD_NORM, POSITIVE_EPS, WEIGHT_DECAY, learning_rate,
};
use crate::key::{Asks, Key, Literal};
use crate::kind::{Integers, Kind};
use crate::plan::{AdamPlan, OneBitAdamPlan, OptimizerPlan};
use crate::resolve::Context;
use crate::section::Section;

pub(super) const FREEZE_STEP: &str = "freeze_step";

pub(super) const FREEZE_STEP_KEY: Key = Key::new(
    FREEZE_STEP,
    Kind::Integer(Integers::ANY),
    Literal::Integer(100_000),
    "Steps with exact gradients, at least 1; 15 to 25 % of the run is a good choice. Afterwards the second \
        moment is frozen and momenta are compressed.",
)
.unit("steps");

pub(super) const KEYS: &[Key] = &[
    LR,
    BETAS,
    POSITIVE_EPS,
    WEIGHT_DECAY,
    FREEZE_STEP_KEY,
    Key::flag("bias_correction", true, "Divide the moments by 1 - beta^t.")
        .inert("1-bit Adam never corrects its moments; DeepSpeed ignores the key too"),
    EPS_INSIDE_SQRT,
    AMSGRAD,
    CUDA_AWARE,
    COMM_BACKEND_NAME,
    MAX_GRAD_NORM,
];

pub(super) const EPS_INSIDE_SQRT: Key =
    Key::flag("eps_inside_sqrt", false, "Add eps to the second moment, not to its square root.")
        .unavailable(
            "an eps inside the square root, which DeepSpeed accepts and ignores",
            Asks::Differs,
            "set it to false",
        );

pub(super) const CUDA_AWARE: Key =
    Key::flag("cuda_aware", false, "Whether MPI can send from GPU memory.").inert(TRANSPORT);

pub(super) const COMM_BACKEND_NAME: Key = Key::new(
    "comm_backend_name",
    Kind::Choice(&["nccl", "mpi", "hccl", "compressed"]),
    Literal::Text("nccl"),
    "Library that exchanges compressed momenta.",
)
.inert(TRANSPORT);

const TRANSPORT: &str = "collectives run between threads or over MPI, from host memory";

/// Resolves 1-bit Adam's part of the plan.
pub(super) fn resolve(params: &Section<'_>, context: &mut Context<'_>) -> OptimizerPlan {
    OptimizerPlan::OneBitAdam(OneBitAdamPlan {
        adam: AdamPlan {
            lr: learning_rate(params, context),
            betas: params.pair("betas"),
            eps: positive_eps(params, context),
            weight_decay: params.real("weight_decay"),
            bias_correction: false,
        },
        freeze_step: freeze_step(params, context),
    })
}

/// Returns eps, which divides elements whose second moment is 0. Refuses one that is 0 in f32.
pub(super) fn positive_eps(params: &Section<'_>, context: &mut Context<'_>) -> f64 {
    let eps = params.real("eps");
    if eps > 0.0 && eps as f32 == 0.0 {
        let message = format!("{eps:e} is 0 in f32, in which updates are computed");
        context.findings.push(params.error(
            "eps",
            message,
            "give at least 1e-38, 1e-8 for example",
        ));
    }
    eps
}

/// Returns the number of exact steps. Refuses 0 and warns when the run ends before the freeze.
pub(super) fn freeze_step(params: &Section<'_>, context: &mut Context<'_>) -> u64 {
    let step = params.integer(FREEZE_STEP);
    if step < 1 {
        let message = format!(
            "{step} is out of range, must be at least 1: before the first step the second moment is 0, and updates \
             are divided by its square root"
        );
        let remedy = "give 15 to 25 % of the steps";
        context.findings.push(params.error(FREEZE_STEP, message, remedy));
    }
    let step = step.max(1) as u64;
    if let Some(total) = context.facts.total_steps.filter(|total| step >= *total as u64) {
        let message = format!(
            "{step} is not below the {total} steps of the run: momenta are never compressed"
        );
        let remedy = format!("give 15 to 25 % of the steps, {} for example", (total / 5).max(1));
        context.findings.push(params.warning(FREEZE_STEP, message, remedy));
    }
    step
}

/// Warns when the second moment is frozen while the learning rate still rises: it then follows gradients of weights that
/// have hardly moved.
pub(crate) fn check_warmup(optimizer: &OptimizerPlan, warmup: usize, context: &mut Context<'_>) {
    let (key, freeze_step) = match optimizer {
        OptimizerPlan::OneBitAdam(plan) => (FREEZE_STEP, plan.freeze_step),
        OptimizerPlan::OneBitLamb(plan) => (FREEZE_STEP, plan.freeze_step),
        OptimizerPlan::ZeroOneAdam(plan) => ("var_freeze_step", plan.var_freeze_step),
        _ => return,
    };
    if freeze_step < warmup as u64 {
        let message =
            format!("{freeze_step} is below the {warmup} steps of the learning rate's warm-up");
        let remedy = format!("freeze the second moment after it: give {warmup} or more");
        context.findings.warning(format!("optimizer.params.{key}"), message, remedy);
    }
}
