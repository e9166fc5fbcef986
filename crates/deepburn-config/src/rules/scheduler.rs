//! `scheduler`: DeepSpeed's schedules and four of PyTorch's, with all defaults filled in. A job may
//! ask for a schedule of transformers instead.
//!
//! Steps are applied optimizer steps; a skipped step does not advance a schedule.

use super::*;
use crate::step_count::StepCount;

/// Resolves the section, and warns of settings of the optimizer and the job that it does not use.
pub(crate) fn resolve(optimizer: &OptimizerPlan, context: &mut Context<'_>) -> SchedulePlan {
    let schedule = resolve_section(optimizer, context);
    check_lr(&schedule, optimizer, context);
    check_zero(&schedule, optimizer, context);
    schedule
}

/// Returns the learning rate that the schedule sets at its peak, or at its start; `None` for the
/// optimizer's.
fn own_lr(schedule: &SchedulePlan) -> Option<f64> {
    match schedule {
        SchedulePlan::Warmup { max_lr, .. } | SchedulePlan::WarmupDecay { max_lr, .. } => {
            Some(*max_lr)
        }
        SchedulePlan::OneCycle(plan) => Some(plan.max_lr),
        SchedulePlan::LrRangeTest { min_lr, .. } => Some(*min_lr),
        _ => None,
    }
}

/// Returns whether parameters have a rate of their own: Muon's for Adam, or the rate of a group.
fn has_own_rates(optimizer: &OptimizerPlan, context: &Context<'_>) -> bool {
    let is_own = |group: &ParamGroup| {
        matches!(group.update, GroupUpdate::Trained { rate: GroupRate::Own(_), .. })
    };
    context.run.param_groups.groups.iter().any(is_own)
        || matches!(optimizer, OptimizerPlan::Muon(_))
}

/// Warns of a learning rate of 0.
fn check_zero(schedule: &SchedulePlan, optimizer: &OptimizerPlan, context: &mut Context<'_>) {
    let own = own_lr(schedule);
    if own.unwrap_or(optimizer.lr()) != 0.0 || has_own_rates(optimizer, context) {
        return;
    }
    let top = context.top;
    let written = top.optimizer.value.params.given().and_then(|params| params.get("lr"));
    let key = match (own, written) {
        (Some(_), _) => "scheduler.params",
        (None, Some(node)) if !node.is_auto() => "optimizer.params.lr",
        (None, _) => "training.learning_rate",
    };
    warning!(context, key => "the learning rate is 0: the model learns nothing"; "give a rate above 0, 1e-5 for example");
}

/// Warns if a learning rate is given and the schedule does not use it, but sets its own.
fn check_lr(schedule: &SchedulePlan, optimizer: &OptimizerPlan, context: &mut Context<'_>) {
    let Some(own) = own_lr(schedule) else { return };
    // Rates of groups, and Muon's for Adam, are in proportion to the optimizer's.
    let lr = optimizer.lr();
    if lr == own || has_own_rates(optimizer, context) {
        return;
    }
    let top = context.top;
    let remedy = match schedule {
        SchedulePlan::Warmup { .. } | SchedulePlan::WarmupDecay { .. } => {
            "set scheduler.params.warmup_max_lr to \"auto\", or remove it"
        }
        _ => "remove it, or use another schedule",
    };
    let peak = &top.scheduler.value.params;
    let has_peak = peak.given().is_some_and(|params| params.get("warmup_max_lr").is_some());
    let written = top.optimizer.value.params.given().and_then(|params| params.get("lr"));
    let from_job = context.run.learning_rate.is_some();
    if let Some(node) = written.filter(|node| !(node.is_auto() && from_job)) {
        warning!(context, KeyLocation::at("optimizer.params.lr", node) =>
            "{lr:?} has no effect: the schedule sets the learning rate, {own:?} at its peak"; "{remedy}");
    } else if from_job && !has_peak {
        warning!(context, "training.learning_rate" =>
            "{lr:?} has no effect: the schedule sets the learning rate, {own:?} at its peak"; "{remedy}");
    }
}

/// Resolves the section.
fn resolve_section(optimizer: &OptimizerPlan, context: &mut Context<'_>) -> SchedulePlan {
    let lr = optimizer.lr();
    let top = context.top;
    let section = &top.scheduler.value;
    if let Some(scheduler) = &context.run.lr_scheduler {
        let name = scheduler.kind.name();
        context.answer(&top.scheduler, name, "training.lr_scheduler_type");
        refuse!(if top.scheduler.is_given(); context, "training.lr_scheduler_type" =>
            "\"{name}\" is given together with the scheduler of the deepspeed section, and only one can set the \
             learning rate"; "remove training.lr_scheduler_type or deepspeed.scheduler");
        return trainer_schedule::resolve(scheduler, lr, context);
    }
    // `"auto"` in place of the section leaves the schedule to the job, which has none here.
    context.answer(&top.scheduler, "constant", "no schedule is given");
    check_warmup(context);
    if !top.scheduler.is_given() {
        return SchedulePlan::Constant { lr };
    }
    let params = &section.params;
    let Some(variant) = choose(&section.name, SCHEDULES, "schedule", context) else {
        return SchedulePlan::Constant { lr };
    };
    require_params(params, variant, context);
    match variant.name {
        "WarmupLR" => warmup(&WarmupLr::read(params), lr, context),
        "WarmupDecayLR" => warmup_decay(&WarmupDecayLr::read(params), lr, context),
        "WarmupCosineLR" => warmup_cosine(&WarmupCosineLr::read(params), lr, context),
        "LRRangeTest" => {
            let params = LrRangeTest::read(params);
            filled!(
                SchedulePlan::LrRangeTest,
                params { min_lr, step_size, step_rate, staircase, last_batch_iteration }
            )
        }
        "OneCycle" => one_cycle(&OneCycle::read(params), optimizer.has_betas(), context),
        name => torch_schedule(name, params, lr),
    }
}

/// The keys of a job that set the length of the warm-up. Only one of them has an effect, and it may
/// have been converted to a number of steps.
pub(super) const WARMUP: &str = "training.warmup_steps or training.warmup_ratio";

/// Reports a warm-up of the job that the scheduler of the file does not use.
fn check_warmup(context: &mut Context<'_>) {
    // A warm-up of 0 steps is the absence of one.
    let Some(wanted) = context.run.warmup_steps.filter(|wanted| !wanted.is_zero()) else { return };
    let scheduler = &context.top.scheduler;
    let name = scheduler.value.name.value.unwrap_or_default();
    let variant = SectionVariant::find(SCHEDULES, name);
    let has_warmup =
        variant.is_some_and(|it| it.keys.iter().any(|key| key.name == "warmup_num_steps"));
    // An unknown schedule is reported by the rule of its name.
    if scheduler.is_given() && variant.is_none() {
        return;
    }
    let reason = match scheduler.is_given() {
        true => format!("the schedule \"{name}\" has no warm-up"),
        false => "the learning rate is constant".to_owned(),
    };
    warning!(if !has_warmup; context, WARMUP => "has no effect: {reason}";
        "add training.lr_scheduler_type (\"linear\" is transformers' default), or remove it");
    // All schedules with a warm-up have the same key for its length.
    let length = WarmupLr::read(&scheduler.value.params).warmup_num_steps;
    let is_other = wanted != StepCount::Steps(length.value);
    warning!(if has_warmup && !length.is_auto() && is_other; context, WARMUP =>
        "has no effect: scheduler.params.warmup_num_steps is {}", length.value; "write \"auto\" there");
}

/// Reports the required keys of a schedule whose section `params` is missing.
fn require_params(params: &ConfigEntry<'_>, variant: &SectionVariant, context: &mut Context<'_>) {
    let required = variant.keys.iter().filter(|key| key.is_required() && !params.is_given());
    for key in required {
        refuse!(context, &params.child(key) =>
            "is missing, and {} needs it", variant.name; "add it: {}", key.kind);
    }
}

//= deepspeed 0.19.8 runtime/lr_schedules.py WarmupLR warmup_num_steps
/// Returns the length of the warm-up. As in DeepSpeed, it is at least 2 steps, because log(1) is 0.
fn warmup_steps(key: &Setting<'_, usize>, context: &mut Context<'_>) -> usize {
    let mut steps = key.value;
    if key.is_auto() {
        let Some(wanted) = context.run.warmup() else {
            context.answer(key, 2, "transformers' default of 0, taken as 2 as in DeepSpeed");
            return 2;
        };
        steps = wanted;
        context.answer(key, steps.max(2), "training.warmup_steps");
    }
    note!(if steps < 2; context, key => "{steps} is taken as 2, as in DeepSpeed");
    warn_of_long(key, steps, "the warm-up is never finished", context);
    steps.max(2)
}

/// Warns of more `steps` than the run has. `what` follows from it.
fn warn_of_long(key: &ConfigEntry<'_>, steps: usize, what: &str, context: &mut Context<'_>) {
    let run = context.run.total_steps.filter(|run| *run < steps);
    if let Some(run) = run {
        warning!(context, key => "{steps} is more than the {} of the run: {what}", counted(run, "step");
            "give fewer steps here, or train for more");
    }
}

/// Returns the length of the schedule: the given length, or the length of the job for `"auto"`.
///
/// A missing length has been reported with the required keys. The length of the warm-up is then
/// used instead, so that the following rules report nothing else.
fn length(key: &Setting<'_, Option<usize>>, warmup: usize, context: &mut Context<'_>) -> usize {
    let known = context.run.total_steps.filter(|_| key.is_auto());
    if let Some(known) = known {
        context.answer(key, known, "the job's number of optimizer steps");
    } else if key.is_auto() {
        refuse!(context, key => "\"auto\" needs the number of optimizer steps, which is not known";
            "give a number, or training.max_steps in the job file; check-config and estimate take --max-steps");
    }
    let total = key.value.or(known).unwrap_or(warmup);
    // A warm-up that is longer than the run has been reported.
    let is_reported = context.run.total_steps.is_some_and(|run| run < warmup);
    warning!(if total < warmup && !is_reported;
        context, key => "{total} is less than warmup_num_steps {warmup}: the warm-up is never finished";
        "give more steps in total or a shorter warm-up");
    let run = context.run.total_steps.filter(|run| total < *run && key.value.is_some());
    if let Some(run) = run {
        warning!(context, key =>
            "{total} is less than the {} of the run: from step {total} on, the learning rate stays at the end of the \
             schedule", counted(run, "step");
            "write \"auto\", or train for fewer steps");
    }
    total
}

/// Resolves the peak of a schedule, if the section sets it; `"auto"` is the optimizer's learning
/// rate. Warns if the job sets another learning rate.
fn max_lr(key: &ConfigEntry<'_>, lr: f64, context: &mut Context<'_>) -> Option<f64> {
    if key.is_auto() {
        context.answer(key, lr, "the optimizer's lr");
        return Some(lr);
    }
    let max = Option::<f64>::read(key)?;
    let wanted = context.run.learning_rate.unwrap_or(max);
    warning!(if max != wanted; context, key =>
        "{max:?} is the peak, not training.learning_rate {wanted:?}"; "write \"auto\" here");
    Some(max)
}

/// Returns the learning rate before the warm-up; `"auto"` is 0, as in transformers.
fn min_lr(key: &Setting<'_, f64>, context: &mut Context<'_>) -> f64 {
    context.answer(key, 0.0, "0");
    key.value
}

/// Resolves WarmupLR. The peak is the optimizer's learning rate unless the section sets it.
fn warmup(params: &WarmupLr<'_>, lr: f64, context: &mut Context<'_>) -> SchedulePlan {
    filled!(SchedulePlan::Warmup, params { shape, last_batch_iteration }
        max_lr: max_lr(&params.warmup_max_lr, lr, context).unwrap_or(lr),
        min_lr: min_lr(&params.warmup_min_lr, context),
        warmup_steps: warmup_steps(&params.warmup_num_steps, context),
    )
}

/// Resolves WarmupDecayLR. The default of the peak is a constant, not the optimizer's learning
/// rate.
fn warmup_decay(params: &WarmupDecayLr<'_>, lr: f64, context: &mut Context<'_>) -> SchedulePlan {
    let peak = &params.warmup_max_lr;
    let max_lr = max_lr(peak, lr, context).unwrap_or(peak.value);
    let warmup_steps = warmup_steps(&params.warmup_num_steps, context);
    filled!(SchedulePlan::WarmupDecay, params { shape, last_batch_iteration }
        min_lr: min_lr(&params.warmup_min_lr, context),
        max_lr,
        warmup_steps,
        total_steps: length(&params.total_num_steps, warmup_steps, context),
    )
}

/// Resolves WarmupCosineLR, with ratios of the optimizer's learning rate, which is the peak.
fn warmup_cosine(params: &WarmupCosineLr<'_>, lr: f64, context: &mut Context<'_>) -> SchedulePlan {
    let warmup_steps = warmup_steps(&params.warmup_num_steps, context);
    filled!(SchedulePlan::WarmupCosine, params { warmup_min_ratio, cos_min_ratio, shape, last_batch_iteration }
        lr,
        warmup_steps,
        total_steps: length(&params.total_num_steps, warmup_steps, context),
    )
}

/// Resolves OneCycle: the learning rate rises and falls once, the momentum changes inversely, and
/// then both decay.
fn one_cycle(params: &OneCycle<'_>, has_betas: bool, context: &mut Context<'_>) -> SchedulePlan {
    let cycles = params.cycle_momentum.value;
    // Only optimizers with betas have a momentum to cycle.
    warning!(if cycles && !has_betas; context, &params.cycle_momentum =>
        "true is ignored: the optimizer has no betas to cycle"; "set it to false or use AdamW");
    let is_still = !cycles || !has_betas;
    let lasts = params.decay_step_size.value == 0;
    let why = "decay_step_size is 0, and nothing changes after the cycle";
    unused! { context;
        params { cycle_min_mom, cycle_max_mom, decay_mom_rate } if is_still => "the momentum does not change";
        params { decay_lr_rate } if lasts => why;
        params { decay_mom_rate } if lasts && !is_still => why;
    }
    let momentum = MomentumCycle {
        min: params.cycle_min_mom.value,
        max: params.cycle_max_mom.value,
        decay_rate: params.decay_mom_rate.value,
    };
    let (steps, stairs) = (params.first_step_size.value, params.first_stair_count.value);
    warn_of_long(
        &params.first_step_size,
        steps,
        "the learning rate never reaches its peak",
        context,
    );
    SchedulePlan::OneCycle(filled!(OneCyclePlan, params {
        decay_lr_rate, first_step_size, first_stair_count, decay_step_size, last_batch_iteration,
    }
        // Both keys are required. A missing key has already been reported.
        min_lr: params.cycle_min_lr.value.unwrap_or(0.0),
        max_lr: params.cycle_max_lr.value.unwrap_or(0.0),
        second_step_size: params.cycle_second_step_size.value.unwrap_or(steps),
        second_stair_count: params.cycle_second_stair_count.value.unwrap_or(stairs),
        momentum: (cycles && has_betas).then_some(momentum),
    ))
}

/// Resolves a schedule of PyTorch. A missing required key has already been reported, and is read as
/// 1.
fn torch_schedule(name: &str, params: &ConfigEntry<'_>, lr: f64) -> SchedulePlan {
    match name {
        "StepLR" => {
            let params = StepLr::read(params);
            let step_size = params.step_size.value.unwrap_or(1);
            filled!(SchedulePlan::Step, params { gamma } lr, step_size)
        }
        "CosineAnnealingLR" => {
            let params = CosineAnnealingLr::read(params);
            let t_max = params.t_max.value.unwrap_or(1);
            filled!(SchedulePlan::CosineAnnealing, params { eta_min } lr, t_max)
        }
        "LinearLR" => {
            let params = LinearLr::read(params);
            filled!(SchedulePlan::Linear, params { start_factor, end_factor, total_iters } lr)
        }
        _ => {
            let gamma = ExponentialLr::read(params).gamma.value.unwrap_or(1.0);
            SchedulePlan::Exponential { lr, gamma }
        }
    }
}
