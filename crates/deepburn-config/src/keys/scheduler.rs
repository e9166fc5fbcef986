//! `scheduler`: DeepSpeed's schedules and four of PyTorch's, every default filled in.
//!
//! Steps are applied optimizer steps; a skipped step does not advance a schedule.

use crate::key::{Asks, Key, Literal, Status};

use crate::keys::{one_cycle, torch_schedules};
use crate::kind::{Integers, Kind, Reals, Variant};
use crate::plan::{OptimizerPlan, SchedulePlan, WarmupShape};
use crate::resolve::Context;
use crate::section::Section;
use crate::variant::choose;

pub(super) const STEPS: &str = "steps";
pub(super) const LAST_ITERATION: Key = Key::new(
    "last_batch_iteration",
    Kind::Integer(Integers { min: -1, max: i64::MAX }),
    Literal::Integer(-1),
    "Index of the last step before training; -1 for a new run.",
);
const MIN_LR: Key = Key::new(
    "warmup_min_lr",
    Kind::PerGroup(Reals::NotNegative),
    Literal::Real(0.0),
    "Learning rate before the warm-up.",
)
.auto();
const WARMUP_STEPS: Key =
    Key::count("warmup_num_steps", 1000, "Length of the warm-up; at least 2 are used.")
        .unit(STEPS)
        .auto();
const SHAPE: Key = Key::new(
    "warmup_type",
    Kind::Choice(&["log", "linear"]),
    Literal::Text("log"),
    "Shape of the rise: ln(i + 1) / ln(N) or i / N.",
);
const TOTAL_STEPS: Key = Key::required(
    "total_num_steps",
    Kind::Integer(Integers::POSITIVE),
    "Length of the whole schedule.",
)
.unit(STEPS)
.auto();

const WARMUP: &[Key] = &[
    MIN_LR,
    Key::optional(
        "warmup_max_lr",
        Kind::PerGroup(Reals::NotNegative),
        "Learning rate after the warm-up; by default the optimizer's.",
    )
    .auto(),
    WARMUP_STEPS,
    SHAPE,
    LAST_ITERATION,
    Key::optional(
        "total_num_steps",
        Kind::Integer(Integers::POSITIVE),
        "Not a parameter of WarmupLR, which never decays.",
    )
    .refused("WarmupLR has no such parameter: it never decays", "remove it or use WarmupDecayLR"),
];

const WARMUP_DECAY: &[Key] = &[
    TOTAL_STEPS,
    MIN_LR,
    Key::new(
        "warmup_max_lr",
        Kind::PerGroup(Reals::NotNegative),
        Literal::Real(0.001),
        "Learning rate at the end of the warm-up; not the optimizer's by default.",
    )
    .auto(),
    WARMUP_STEPS,
    SHAPE,
    LAST_ITERATION,
];

const WARMUP_COSINE: &[Key] = &[
    TOTAL_STEPS,
    Key::real(
        "warmup_min_ratio",
        Reals::NotNegative,
        0.0,
        "Share of the learning rate at the start of the warm-up.",
    ),
    WARMUP_STEPS,
    Key::real("cos_min_ratio", Reals::NotNegative, 1e-4, "Share of the learning rate at the end."),
    SHAPE,
    LAST_ITERATION,
];

const RANGE_TEST: &[Key] = &[
    Key::new(
        "lr_range_test_min_lr",
        Kind::PerGroup(Reals::NotNegative),
        Literal::Real(1e-3),
        "Learning rate at the start.",
    ),
    Key::positive("lr_range_test_step_size", 2000, "Length of one unit of the rise.").unit(STEPS),
    Key::real(
        "lr_range_test_step_rate",
        Reals::Any,
        1.0,
        "Rise per unit, as a share of the start.",
    ),
    Key::flag("lr_range_test_staircase", false, "Rise in steps rather than continuously."),
    LAST_ITERATION,
];

pub(crate) const fn available(
    name: &'static str,
    doc: &'static str,
    keys: &'static [Key],
) -> Variant {
    Variant { name, doc, status: Status::Honoured, keys }
}

const fn missing(name: &'static str, feature: &'static str) -> Variant {
    let remedy = "use one of the available schedules, WarmupLR for example";
    Variant {
        name,
        doc: feature,
        status: Status::Unavailable { feature, asks: Asks::Present, remedy },
        keys: &[],
    }
}

const VARIANTS: &[Variant] = &[
    available("WarmupLR", "Warm-up, then constant.", WARMUP),
    available("WarmupDecayLR", "Warm-up, then linear to the minimum.", WARMUP_DECAY),
    available("WarmupCosineLR", "Warm-up, then a cosine.", WARMUP_COSINE),
    available("LRRangeTest", "Ever rising, to find a learning rate (Smith 2017).", RANGE_TEST),
    available("OneCycle", "Up, down, then decay (Smith 2018).", one_cycle::KEYS),
    torch_schedules::STEP,
    torch_schedules::COSINE_ANNEALING,
    torch_schedules::LINEAR,
    torch_schedules::EXPONENTIAL,
    missing("ReduceLROnPlateau", "reduction on a plateau"),
    missing("MultiStepLR", "decay at given steps"),
    missing("ConstantLR", "a constant factor"),
    missing("PolynomialLR", "polynomial decay"),
    missing("CosineAnnealingWarmRestarts", "cosines with restarts"),
    missing("CyclicLR", "PyTorch's cyclic schedule"),
    missing("OneCycleLR", "PyTorch's one-cycle schedule; DeepSpeed's is called OneCycle"),
    missing("LambdaLR", "a schedule written in Python"),
];

pub(crate) const KEYS: &[Key] = &[
    Key::required("type", Kind::Text, "Name of the schedule."),
    Key::optional("params", Kind::Variants(VARIANTS), "Its parameters."),
];

/// The section's part of the plan.
pub(crate) fn resolve(
    top: &Section<'_>,
    optimizer: &OptimizerPlan,
    context: &mut Context<'_>,
) -> SchedulePlan {
    let constant = SchedulePlan::Constant { lr: optimizer.lr() };
    let section = top.section("scheduler");
    if top.is_auto("scheduler") {
        context.autos.answer("scheduler", "constant", "no schedule is given");
    }
    if top.given("scheduler").is_none() {
        return constant;
    }
    let Some(variant) = choose(&section, VARIANTS, "schedule", context) else { return constant };
    require_params(&section, variant, context);
    let params = section.variant("params", variant.keys);
    let lr = optimizer.lr();
    match variant.name {
        "WarmupLR" => warmup(&params, lr, context),
        "WarmupDecayLR" => warmup_decay(&params, lr, context),
        "WarmupCosineLR" => warmup_cosine(&params, lr, context),
        "LRRangeTest" => SchedulePlan::LrRangeTest {
            min_lr: params.real("lr_range_test_min_lr"),
            step_size: params.count("lr_range_test_step_size"),
            step_rate: params.real("lr_range_test_step_rate"),
            staircase: params.flag("lr_range_test_staircase"),
            last_batch_iteration: params.integer(LAST_ITERATION.name),
        },
        "OneCycle" => one_cycle::resolve(&params, optimizer, context),
        name => torch_schedules::resolve(name, &params, lr),
    }
}

/// A schedule whose `params` are missing altogether still lacks what it requires.
fn require_params(section: &Section<'_>, variant: &Variant, context: &mut Context<'_>) {
    if section.given("params").is_some() {
        return;
    }
    for key in variant.keys.iter().filter(|key| key.required) {
        let path = section.variant("params", variant.keys).path_of(key.name);
        context.findings.error(
            path,
            format!("is missing, and {} needs it", variant.name),
            format!("add it: {}", key.kind),
        );
    }
}

fn shape(params: &Section<'_>) -> WarmupShape {
    if params.choice("warmup_type") == "linear" { WarmupShape::Linear } else { WarmupShape::Log }
}

/// Length of the warm-up: DeepSpeed never uses fewer than 2 steps, since log(1) is 0.
fn warmup_steps(params: &Section<'_>, context: &mut Context<'_>) -> usize {
    let path = params.path_of("warmup_num_steps");
    let mut steps = params.count("warmup_num_steps");
    if params.is_auto("warmup_num_steps") {
        let Some(wanted) = context.facts.warmup_steps else {
            let rule = "transformers' default of 0, taken as 2 as in DeepSpeed";
            context.autos.answer(&path, 2, rule);
            return 2;
        };
        steps = wanted;
        context.autos.answer(&path, steps.max(2), "training.warmup_steps");
    }
    if steps < 2 {
        context.findings.push(
            params.note("warmup_num_steps", format!("{steps} is taken as 2, as in DeepSpeed")),
        );
    }
    steps.max(2)
}

/// Length of the schedule: given, or known to the job for `"auto"`.
fn total_steps(params: &Section<'_>, warmup: usize, context: &mut Context<'_>) -> usize {
    let path = params.path_of("total_num_steps");
    let given = params.optional_count("total_num_steps");
    let total = match (given, context.facts.total_steps) {
        (None, Some(known)) if params.is_auto("total_num_steps") => {
            context.autos.answer(&path, known, "the job's number of optimizer steps");
            known
        }
        (Some(given), _) => given,
        _ => {
            if params.is_auto("total_num_steps") {
                let message = "\"auto\" needs the number of optimizer steps, which is not known";
                context.findings.push(params.error(
                    "total_num_steps",
                    message,
                    "give a number, or training.max_steps in the job file; check-config and estimate take \
                     --max-steps",
                ));
            }
            return warmup;
        }
    };
    if total < warmup {
        context.findings.push(params.warning(
            "total_num_steps",
            format!(
                "{total} is less than warmup_num_steps {warmup}: the warm-up is never finished"
            ),
            "give more steps in total or a shorter warm-up",
        ));
    }
    total
}

/// The peak of a schedule, with a warning where the job asks for another learning rate.
fn max_lr(params: &Section<'_>, lr: f64, context: &mut Context<'_>) -> Option<f64> {
    const NAME: &str = "warmup_max_lr";
    let given = lr_or_auto(params, NAME, lr, "the optimizer's lr", context);
    let wanted = context.facts.learning_rate.filter(|_| params.given(NAME).is_some());
    if let (Some(max), Some(wanted)) = (given, wanted)
        && max != wanted
    {
        let message = format!("{max:?} is the peak, not training.learning_rate {wanted:?}");
        context.findings.push(params.warning(NAME, message, "write \"auto\" here"));
    }
    given
}

/// A learning rate that `"auto"` takes from the optimizer.
fn lr_or_auto(
    params: &Section<'_>,
    name: &str,
    auto: f64,
    rule: &str,
    context: &mut Context<'_>,
) -> Option<f64> {
    if params.is_auto(name) {
        context.autos.answer(&params.path_of(name), auto, rule);
        return Some(auto);
    }
    params.optional_real(name)
}

fn min_lr(params: &Section<'_>, context: &mut Context<'_>) -> f64 {
    lr_or_auto(params, "warmup_min_lr", 0.0, "0", context)
        .unwrap_or_else(|| params.real("warmup_min_lr"))
}

fn warmup(params: &Section<'_>, lr: f64, context: &mut Context<'_>) -> SchedulePlan {
    let max_lr = max_lr(params, lr, context);
    SchedulePlan::Warmup {
        min_lr: min_lr(params, context),
        max_lr: max_lr.unwrap_or(lr),
        warmup_steps: warmup_steps(params, context),
        shape: shape(params),
        last_batch_iteration: params.integer(LAST_ITERATION.name),
    }
}

fn warmup_decay(params: &Section<'_>, lr: f64, context: &mut Context<'_>) -> SchedulePlan {
    let max_lr = max_lr(params, lr, context);
    let warmup_steps = warmup_steps(params, context);
    SchedulePlan::WarmupDecay {
        min_lr: min_lr(params, context),
        max_lr: max_lr.unwrap_or_else(|| params.real("warmup_max_lr")),
        warmup_steps,
        total_steps: total_steps(params, warmup_steps, context),
        shape: shape(params),
        last_batch_iteration: params.integer(LAST_ITERATION.name),
    }
}

fn warmup_cosine(params: &Section<'_>, lr: f64, context: &mut Context<'_>) -> SchedulePlan {
    let warmup_steps = warmup_steps(params, context);
    SchedulePlan::WarmupCosine {
        lr,
        warmup_min_ratio: params.real("warmup_min_ratio"),
        cos_min_ratio: params.real("cos_min_ratio"),
        warmup_steps,
        total_steps: total_steps(params, warmup_steps, context),
        shape: shape(params),
        last_batch_iteration: params.integer(LAST_ITERATION.name),
    }
}
