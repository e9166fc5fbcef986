//! `training.lr_scheduler_type`: the schedules of transformers' Trainer, with all defaults filled
//! in.

use super::*;

/// The section of the parameters in a job file.
const KWARGS: &str = "training.lr_scheduler_kwargs";

/// Resolves the schedule of a job, with the optimizer's learning rate `lr`.
pub(super) fn resolve(scheduler: &LrScheduler, lr: f64, context: &mut Context<'_>) -> SchedulePlan {
    let name = scheduler.kind.name();
    let warmup = context.run.warmup().unwrap_or(0);
    if scheduler.kind == LrSchedulerType::Constant {
        refuse!(if warmup > 0; context, scheduler::WARMUP =>
            "has no effect: training.lr_scheduler_type is \"constant\", which has no warm-up";
            "write \"constant_with_warmup\", or remove it");
        return SchedulePlan::Constant { lr };
    }
    let needs_total = !matches!(
        scheduler.kind,
        LrSchedulerType::ConstantWithWarmup | LrSchedulerType::InverseSqrt
    );
    let total = context.run.total_steps;
    refuse!(if total.is_none() && needs_total; context, "training.lr_scheduler_type" =>
        "\"{name}\" needs the number of optimizer steps, which is not known"; "give training.max_steps");
    // Unknown totals are errors for all curves that depend on them, so any number does.
    let total_steps = total.unwrap_or(warmup);
    warning!(if warmup > total_steps; context, scheduler::WARMUP =>
        "{warmup} is more than the {} of the run: the warm-up is never finished", counted(total_steps, "step");
        "give a shorter warm-up or more steps");
    let curve = curve(scheduler, lr, (warmup, total_steps), context);
    SchedulePlan::Trainer(TrainerSchedule { lr, warmup_steps: warmup, total_steps, curve })
}

//= transformers 5.23.0 optimization.py get_scheduler
/// Returns the curve after the warm-up, with transformers' defaults.
fn curve(
    scheduler: &LrScheduler,
    lr: f64,
    (warmup, total): (usize, usize),
    context: &mut Context<'_>,
) -> TrainerCurve {
    let parameters = &scheduler.parameters;
    let num_cycles = parameters.num_cycles.unwrap_or(0.5);
    match scheduler.kind {
        LrSchedulerType::Linear => TrainerCurve::Linear,
        // `Constant` has no curve.
        LrSchedulerType::Constant | LrSchedulerType::ConstantWithWarmup => {
            TrainerCurve::ConstantWithWarmup
        }
        LrSchedulerType::Cosine => TrainerCurve::Cosine { num_cycles },
        LrSchedulerType::CosineWithRestarts => {
            TrainerCurve::CosineWithRestarts { num_cycles: parameters.num_cycles.unwrap_or(1.0) }
        }
        LrSchedulerType::Polynomial => {
            let lr_end = parameters.lr_end.unwrap_or(1e-7);
            refuse!(if lr_end >= lr; context, format!("{KWARGS}.lr_end") =>
                "{lr_end:?} is not below the learning rate {lr:?}, from which the schedule falls";
                "give a smaller lr_end");
            TrainerCurve::Polynomial { lr_end, power: parameters.power.unwrap_or(1.0) }
        }
        LrSchedulerType::InverseSqrt => {
            // transformers takes the warm-up for the timescale, and 10,000 steps without one.
            let default = if warmup == 0 { 10_000 } else { warmup };
            TrainerCurve::InverseSqrt { timescale: parameters.timescale.unwrap_or(default) }
        }
        LrSchedulerType::CosineWithMinLr => TrainerCurve::CosineWithMinLr {
            num_cycles,
            min_lr_rate: min_lr_rate(parameters, lr, context),
        },
        LrSchedulerType::CosineWarmupWithMinLr => TrainerCurve::CosineWarmupWithMinLr {
            num_cycles,
            min_lr_rate: min_lr_rate(parameters, lr, context),
            warmup_lr_rate: parameters.warmup_lr_rate,
        },
        LrSchedulerType::WarmupStableDecay => {
            TrainerCurve::WarmupStableDecay(stable_decay(parameters, (warmup, total), context))
        }
    }
}

/// Returns the lowest learning rate as a fraction of `lr`. A missing parameter has been reported.
fn min_lr_rate(parameters: &LrSchedulerParameters, lr: f64, context: &mut Context<'_>) -> f64 {
    let Some(min_lr) = parameters.min_lr else { return parameters.min_lr_rate.unwrap_or(0.0) };
    // The ratio to a learning rate of 0 is not defined.
    refuse!(if min_lr > lr || lr == 0.0; context, format!("{KWARGS}.min_lr") =>
        "{min_lr:?} is not below the learning rate {lr:?}, from which the schedule falls";
        "give a smaller min_lr");
    min_lr / lr
}

/// Returns the three parts of the warm-up-stable-decay schedule. A missing length of the decay has
/// been reported.
fn stable_decay(
    parameters: &LrSchedulerParameters,
    (warmup, total): (usize, usize),
    context: &mut Context<'_>,
) -> WarmupStableDecay {
    let num_decay_steps = parameters.num_decay_steps.unwrap_or(0);
    // What is left for the constant part may be negative, as in transformers.
    let signed = |steps: usize| i64::try_from(steps).unwrap_or(i64::MAX);
    let moving = signed(warmup).saturating_add(signed(num_decay_steps));
    let given = parameters.num_stable_steps.map(signed);
    let num_stable_steps = given.unwrap_or_else(|| signed(total).saturating_sub(moving));
    let whole = moving.saturating_add(num_stable_steps.max(0));
    warning!(if whole > signed(total); context, format!("{KWARGS}.num_decay_steps") =>
        "the parts of the schedule, {} of warm-up, {} constant ones and {num_decay_steps} of decay, are \
         longer than the {} of the run", counted(warmup, "step"), num_stable_steps.max(0), counted(total, "step");
        "give shorter parts or more steps");
    WarmupStableDecay {
        num_stable_steps,
        num_decay_steps,
        warmup_type: parameters.warmup_type.unwrap_or(RampShape::Linear),
        decay_type: parameters.decay_type.unwrap_or(RampShape::Cosine),
        min_lr_ratio: parameters.min_lr_ratio.unwrap_or(0.0),
        num_cycles: parameters.num_cycles.unwrap_or(0.5),
    }
}
