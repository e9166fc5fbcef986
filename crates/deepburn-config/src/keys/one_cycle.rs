//! OneCycle: the learning rate up and down once, the momentum against it, then decay.

use crate::key::{Key, Literal};
use crate::keys::scheduler::{LAST_ITERATION, STEPS};
use crate::kind::{Integers, Kind, Reals};
use crate::plan::{MomentumCycle, OneCyclePlan, OptimizerPlan, SchedulePlan};
use crate::resolve::Context;
use crate::section::Section;

const MOMENTUM: Kind = Kind::PerGroup(Reals::Decay);

pub(crate) const KEYS: &[Key] = &[
    Key::required(
        "cycle_min_lr",
        Kind::PerGroup(Reals::NotNegative),
        "Learning rate at both ends of the cycle.",
    ),
    Key::required("cycle_max_lr", Kind::PerGroup(Reals::NotNegative), "Learning rate at its top."),
    Key::real(
        "decay_lr_rate",
        Reals::NotNegative,
        0.0,
        "Decay of the learning rate after the cycle, per decay interval.",
    ),
    Key::positive("cycle_first_step_size", 2000, "Length of the rise.").unit(STEPS),
    Key::optional(
        "cycle_second_step_size",
        Kind::Integer(Integers::COUNT),
        "Length of the fall; by default that of the rise.",
    )
    .unit(STEPS),
    Key::count("cycle_first_stair_count", 0, "Stairs of the rise; 0 for a continuous one.")
        .unit("stairs"),
    Key::optional(
        "cycle_second_stair_count",
        Kind::Integer(Integers::COUNT),
        "Stairs of the fall; by default those of the rise.",
    )
    .unit("stairs"),
    Key::count("decay_step_size", 0, "Length of a decay interval; 0 for no decay.").unit(STEPS),
    Key::flag("cycle_momentum", true, "Cycle the momentum against the learning rate."),
    Key::new(
        "cycle_min_mom",
        MOMENTUM,
        Literal::Real(0.8),
        "Momentum at the top of the learning rate.",
    ),
    Key::new("cycle_max_mom", MOMENTUM, Literal::Real(0.9), "Momentum at both ends of the cycle."),
    Key::real(
        "decay_mom_rate",
        Reals::NotNegative,
        0.0,
        "Growth of the momentum after the cycle; it is kept below 1.",
    ),
    LAST_ITERATION,
];

/// The schedule's plan.
pub(crate) fn resolve(
    params: &Section<'_>,
    optimizer: &OptimizerPlan,
    context: &mut Context<'_>,
) -> SchedulePlan {
    let first_step_size = params.count("cycle_first_step_size");
    let first_stair_count = params.count("cycle_first_stair_count");
    SchedulePlan::OneCycle(OneCyclePlan {
        // Both are required: where they are missing that has been reported.
        min_lr: params.optional_real("cycle_min_lr").unwrap_or(0.0),
        max_lr: params.optional_real("cycle_max_lr").unwrap_or(0.0),
        decay_lr_rate: params.real("decay_lr_rate"),
        first_step_size,
        second_step_size: params
            .optional_count("cycle_second_step_size")
            .unwrap_or(first_step_size),
        first_stair_count,
        second_stair_count: params
            .optional_count("cycle_second_stair_count")
            .unwrap_or(first_stair_count),
        decay_step_size: params.count("decay_step_size"),
        momentum: momentum_cycle(params, optimizer, context),
        last_batch_iteration: params.integer(LAST_ITERATION.name),
    })
}

/// Only optimizers with betas have a momentum to cycle.
fn momentum_cycle(
    params: &Section<'_>,
    optimizer: &OptimizerPlan,
    context: &mut Context<'_>,
) -> Option<MomentumCycle> {
    if !params.flag("cycle_momentum") {
        return None;
    }
    if !optimizer.has_betas() {
        context.findings.push(params.warning(
            "cycle_momentum",
            "true is ignored: the optimizer has no betas to cycle",
            "set it to false or use AdamW",
        ));
        return None;
    }
    Some(MomentumCycle {
        min: params.real("cycle_min_mom"),
        max: params.real("cycle_max_mom"),
        decay_rate: params.real("decay_mom_rate"),
    })
}
