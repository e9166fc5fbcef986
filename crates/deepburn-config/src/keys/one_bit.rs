//! `optimizer.params` of 1-bit Adam, with DeepSpeed's names and defaults.

use super::optimizer::{
    AMSGRAD, BETAS, LR, MAX_GRAD_NORM, POSITIVE_EPS, WEIGHT_DECAY, learning_rate,
};
use crate::key::{Asks, Key, Literal};
use crate::kind::{Integers, Kind};
use crate::plan::{AdamPlan, OneBitAdamPlan, OptimizerPlan};
use crate::resolve::Context;
use crate::section::Section;

const FREEZE_STEP: &str = "freeze_step";

pub(super) const KEYS: &[Key] = &[
    LR,
    BETAS,
    POSITIVE_EPS,
    WEIGHT_DECAY,
    Key::new(
        FREEZE_STEP,
        Kind::Integer(Integers::ANY),
        Literal::Integer(100_000),
        "Steps with exact gradients, at least 1; 15 to 25 % of the run is a good choice. Afterwards the second \
            moment is frozen and momenta are compressed.",
    )
    .unit("steps"),
    Key::flag("bias_correction", true, "Divide the moments by 1 - beta^t.")
        .inert("1-bit Adam never corrects its moments; DeepSpeed ignores the key too"),
    Key::flag("eps_inside_sqrt", false, "Add eps to the second moment, not to its square root.")
        .unavailable(
            "an eps inside the square root, which DeepSpeed accepts and ignores",
            Asks::Differs,
            "set it to false",
        ),
    AMSGRAD,
    Key::flag("cuda_aware", false, "Whether MPI can send from GPU memory.").inert(TRANSPORT),
    Key::new(
        "comm_backend_name",
        Kind::Choice(&["nccl", "mpi", "hccl", "compressed"]),
        Literal::Text("nccl"),
        "Library that exchanges compressed momenta.",
    )
    .inert(TRANSPORT),
    MAX_GRAD_NORM,
];

const TRANSPORT: &str = "collectives run between threads or over MPI, from host memory";

/// Resolves 1-bit Adam's part of the plan.
pub(super) fn resolve(params: &Section<'_>, context: &mut Context<'_>) -> OptimizerPlan {
    OptimizerPlan::OneBitAdam(OneBitAdamPlan {
        adam: AdamPlan {
            lr: learning_rate(params, context),
            betas: params.pair("betas"),
            eps: params.real("eps"),
            weight_decay: params.real("weight_decay"),
            bias_correction: false,
        },
        freeze_step: freeze_step(params, context),
    })
}

/// Returns the number of exact steps. Refuses 0 and warns when the run ends before the freeze.
fn freeze_step(params: &Section<'_>, context: &mut Context<'_>) -> u64 {
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
