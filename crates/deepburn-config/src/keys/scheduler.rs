//! `scheduler`: DeepSpeed's schedules and four of PyTorch's.
//!
//! DeepSpeed takes the parameters as keyword arguments of a Python class. The sections here have
//! the names and defaults of those arguments. Numbers of steps are applied optimizer steps: a
//! skipped step does not count.

use crate::plan::WarmupShape;
use crate::spec::*;

/// Start of the warm-up.
const MIN_LR: Spec<f64> =
    per_group(NotNegative, 0.0).auto().doc("Learning rate before the warm-up.");
/// Of all of DeepSpeed's schedules with a warm-up.
const WARMUP_STEPS: Spec<usize> =
    count(1000).unit("steps").auto().doc("Length of the warm-up; at least 2 are used.");
/// The logarithm is DeepSpeed's default and rises fast at first.
const SHAPE: Spec<WarmupShape> =
    choice("log").doc("Shape of the rise: ln(i + 1) / ln(N) or i / N.");
/// The one parameter that schedules with a decay require; `"auto"` is the length of the job.
const TOTAL_STEPS: Spec<Option<usize>> =
    opt_positive().required().unit("steps").auto().doc("Length of the whole schedule.");
/// Of DeepSpeed's schedules.
const LAST_ITERATION: Spec<i64> =
    integer_in(-1, i64::MAX, -1).doc("Index of the last step before training; -1 for a new run.");
/// Of PyTorch's schedules.
const LAST_EPOCH: Spec<i64> = integer(-1)
    .unavailable("a PyTorch schedule that starts in the middle", Differs, "set it to -1")
    .doc("Index of the last step before training; -1 for a new run.");
/// Of PyTorch's schedules.
const VERBOSE: Spec<()> =
    free().inert("metrics.jsonl holds every step's lr").doc("Print every change.");

/// A schedule that does not exist here.
const fn missing(name: &'static str, feature: &'static str) -> Variant {
    let remedy = "use one of the available schedules, WarmupLR for example";
    Variant::missing(name, feature, remedy)
}

/// The schedules.
pub(crate) const VARIANTS: &[Variant] = &[
    Variant::of("WarmupLR", WarmupLr::DOC, WarmupLr::KEYS),
    Variant::of("WarmupDecayLR", WarmupDecayLr::DOC, WarmupDecayLr::KEYS),
    Variant::of("WarmupCosineLR", WarmupCosineLr::DOC, WarmupCosineLr::KEYS),
    Variant::of("LRRangeTest", LrRangeTest::DOC, LrRangeTest::KEYS),
    Variant::of("OneCycle", OneCycle::DOC, OneCycle::KEYS),
    Variant::of("StepLR", StepLr::DOC, StepLr::KEYS),
    Variant::of("CosineAnnealingLR", CosineAnnealingLr::DOC, CosineAnnealingLr::KEYS),
    Variant::of("LinearLR", LinearLr::DOC, LinearLr::KEYS),
    Variant::of("ExponentialLR", ExponentialLr::DOC, ExponentialLr::KEYS),
    missing("ReduceLROnPlateau", "reduction on a plateau"),
    missing("MultiStepLR", "decay at given steps"),
    missing("ConstantLR", "a constant factor"),
    missing("PolynomialLR", "polynomial decay"),
    missing("CosineAnnealingWarmRestarts", "cosines with restarts"),
    missing("CyclicLR", "PyTorch's cyclic schedule"),
    missing("OneCycleLR", "PyTorch's one-cycle schedule; DeepSpeed's is called OneCycle"),
    missing("LambdaLR", "a schedule written in Python"),
];

section! {
    /// The learning-rate schedule. Constant when there is none.
    pub(crate) struct Scheduler<'a> {
        /// Name of the schedule.
        name as "type": Option<&'a str> = opt_text().required(),
        /// Its parameters.
        params: () = variants(VARIANTS),
    }

    /// Warm-up, then constant.
    pub(crate) struct WarmupLr<'a> {
        warmup_min_lr: f64 = MIN_LR,
        /// Learning rate after the warm-up; by default the optimizer's.
        warmup_max_lr: Option<f64> = opt_per_group(NotNegative).auto(),
        warmup_num_steps: usize = WARMUP_STEPS,
        warmup_type: WarmupShape = SHAPE,
        last_batch_iteration: i64 = LAST_ITERATION,
        /// Not a parameter of WarmupLR, which never decays.
        total_num_steps = opt_positive()
            .refused("WarmupLR has no such parameter: it never decays", "remove it or use WarmupDecayLR"),
    }

    /// Warm-up, then linear to the minimum.
    pub(crate) struct WarmupDecayLr<'a> {
        total_num_steps: Option<usize> = TOTAL_STEPS,
        warmup_min_lr: f64 = MIN_LR,
        /// Learning rate at the end of the warm-up; not the optimizer's by default.
        warmup_max_lr: f64 = per_group(NotNegative, 0.001).auto(),
        warmup_num_steps: usize = WARMUP_STEPS,
        warmup_type: WarmupShape = SHAPE,
        last_batch_iteration: i64 = LAST_ITERATION,
    }

    /// Warm-up, then a cosine.
    pub(crate) struct WarmupCosineLr<'a> {
        total_num_steps: Option<usize> = TOTAL_STEPS,
        /// Share of the learning rate at the start of the warm-up.
        warmup_min_ratio: f64 = real(NotNegative, 0.0),
        warmup_num_steps: usize = WARMUP_STEPS,
        /// Share of the learning rate at the end.
        cos_min_ratio: f64 = real(NotNegative, 0.0001),
        warmup_type: WarmupShape = SHAPE,
        last_batch_iteration: i64 = LAST_ITERATION,
    }

    /// Ever rising, to find a learning rate (Smith 2017).
    pub(crate) struct LrRangeTest<'a> {
        /// Learning rate at the start.
        lr_range_test_min_lr: f64 = per_group(NotNegative, 0.001),
        /// Length of one unit of the rise.
        lr_range_test_step_size: usize = positive(2000).unit("steps"),
        /// Rise per unit, as a share of the start.
        lr_range_test_step_rate: f64 = real(Any, 1.0),
        /// Rise in steps rather than continuously.
        lr_range_test_staircase: bool = flag(false),
        last_batch_iteration: i64 = LAST_ITERATION,
    }

    /// Up, down, then decay (Smith 2018).
    pub(crate) struct OneCycle<'a> {
        /// Learning rate at both ends of the cycle.
        cycle_min_lr: Option<f64> = opt_per_group(NotNegative).required(),
        /// Learning rate at its top.
        cycle_max_lr: Option<f64> = opt_per_group(NotNegative).required(),
        /// Decay of the learning rate after the cycle, per decay interval.
        decay_lr_rate: f64 = real(NotNegative, 0.0),
        /// Length of the rise.
        cycle_first_step_size: usize = positive(2000).unit("steps"),
        /// Length of the fall; by default the length of the rise.
        cycle_second_step_size: Option<usize> = opt_count().unit("steps"),
        /// Stairs of the rise; 0 for a continuous one.
        cycle_first_stair_count: usize = count(0).unit("stairs"),
        /// Stairs of the fall; by default as many as in the rise.
        cycle_second_stair_count: Option<usize> = opt_count().unit("stairs"),
        /// Length of a decay interval; 0 for no decay.
        decay_step_size: usize = count(0).unit("steps"),
        /// Cycle the momentum against the learning rate.
        cycle_momentum: bool = flag(true),
        /// Momentum at the top of the learning rate.
        cycle_min_mom: f64 = per_group(Decay, 0.8),
        /// Momentum at both ends of the cycle.
        cycle_max_mom: f64 = per_group(Decay, 0.9),
        /// Growth of the momentum after the cycle; it is kept below 1.
        decay_mom_rate: f64 = real(NotNegative, 0.0),
        last_batch_iteration: i64 = LAST_ITERATION,
    }

    /// Decay by gamma every step_size steps.
    pub(crate) struct StepLr<'a> {
        /// Length between two decays.
        step_size: Option<usize> = opt_positive().required().unit("steps"),
        /// Factor of each decay.
        gamma: f64 = real(NotNegative, 0.1),
        last_epoch = LAST_EPOCH,
        verbose = VERBOSE,
    }

    /// A cosine between lr and eta_min.
    pub(crate) struct CosineAnnealingLr<'a> {
        /// Length of half a period.
        t_max as "T_max": Option<usize> = opt_positive().required().unit("steps"),
        /// Learning rate at the end of half a period.
        eta_min: f64 = real(NotNegative, 0.0),
        last_epoch = LAST_EPOCH,
        verbose = VERBOSE,
    }

    /// Linear between two factors of lr.
    pub(crate) struct LinearLr<'a> {
        /// Factor at the first step.
        start_factor: f64 = real(Share, 0.3333333333333333),
        /// Factor at the end.
        end_factor: f64 = real(Share, 1.0),
        /// Length from one factor to the other.
        total_iters: usize = positive(5).unit("steps"),
        last_epoch = LAST_EPOCH,
        verbose = VERBOSE,
    }

    /// Decay by gamma every step.
    pub(crate) struct ExponentialLr<'a> {
        /// Factor of each step.
        gamma: Option<f64> = opt_real(NotNegative).required(),
        last_epoch = LAST_EPOCH,
        verbose = VERBOSE,
    }
}
