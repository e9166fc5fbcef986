//! `scheduler`: DeepSpeed's schedules and four of PyTorch's.
//!
//! DeepSpeed takes the parameters as keyword arguments of a Python class. The sections here have
//! the names and defaults of those arguments. Numbers of steps are applied optimizer steps: a
//! skipped step does not count.

use crate::plan::WarmupShape;
use crate::spec::*;

shared! {
    // Start of the warm-up.
    /// Learning rate at the start of the warm-up, used for the first two steps.
    MIN_LR: f64 = per_group(NotNegative, 0.0).auto();

    // For all of DeepSpeed's schedules with a warm-up.
    /// Length of the warm-up; 0 and 1 mean 2. "auto": training.warmup_steps of the job file, or 2.
    WARMUP_STEPS: usize = count(1000).unit("steps").auto();

    // The logarithm is DeepSpeed's default and rises fast at first.
    /// Shape of the warm-up over N steps: "log", ln(i + 1) / ln(N), or "linear", i / N. "log" rises
    /// faster at the start.
    SHAPE: WarmupShape = choice("log");

    // The only required parameter of schedules with a decay; `"auto"` is the length of the job.
    /// Length of the schedule, including the warm-up. "auto": the number of steps of the job.
    TOTAL_STEPS: Option<usize> = opt_positive().required().unit("steps").auto();

    // For DeepSpeed's schedules.
    /// Index of the last completed step of the schedule; -1 starts at the beginning.
    LAST_ITERATION: i64 = integer_in(-1, i64::MAX, -1);

    // For PyTorch's schedules.
    /// Index of the last completed step of the schedule; -1 starts at the beginning.
    LAST_EPOCH: i64 = integer(-1).unavailable("a PyTorch schedule with a start position", Differs, "set it to -1");

    // For PyTorch's schedules.
    /// Print every change of the learning rate.
    VERBOSE: () = free().inert("metrics.jsonl contains the learning rate of every step");
}

/// Declares an unsupported schedule.
const fn missing(name: &'static str, feature: &'static str) -> SectionVariant {
    let remedy = "use a supported schedule, such as WarmupLR";
    SectionVariant::missing(name, feature, remedy)
}

/// The schedules.
pub(crate) const SCHEDULES: &[SectionVariant] = &[
    SectionVariant::of("WarmupLR", WarmupLr::DOC, WarmupLr::KEYS),
    SectionVariant::of("WarmupDecayLR", WarmupDecayLr::DOC, WarmupDecayLr::KEYS),
    SectionVariant::of("WarmupCosineLR", WarmupCosineLr::DOC, WarmupCosineLr::KEYS),
    SectionVariant::of("LRRangeTest", LrRangeTest::DOC, LrRangeTest::KEYS),
    SectionVariant::of("OneCycle", OneCycle::DOC, OneCycle::KEYS),
    SectionVariant::of("StepLR", StepLr::DOC, StepLr::KEYS),
    SectionVariant::of("CosineAnnealingLR", CosineAnnealingLr::DOC, CosineAnnealingLr::KEYS),
    SectionVariant::of("LinearLR", LinearLr::DOC, LinearLr::KEYS),
    SectionVariant::of("ExponentialLR", ExponentialLr::DOC, ExponentialLr::KEYS),
    missing("ReduceLROnPlateau", "learning-rate reduction on a plateau"),
    missing("MultiStepLR", "decay at given steps"),
    missing("ConstantLR", "a constant factor"),
    missing("PolynomialLR", "polynomial decay"),
    missing("CosineAnnealingWarmRestarts", "cosine annealing with restarts"),
    missing("CyclicLR", "PyTorch's cyclic schedule"),
    missing("OneCycleLR", "PyTorch's one-cycle schedule; DeepSpeed's is called OneCycle"),
    missing("LambdaLR", "a schedule written in Python"),
];

section! {
    /// Learning-rate schedule. Unset: a constant learning rate.
    pub(crate) struct Scheduler<'a> {
        /// Schedule type, such as "WarmupLR"; case is ignored.
        name as "type": Option<&'a str> = opt_text().required(),
        /// Parameters of the schedule; they depend on type.
        params: () = variants(SCHEDULES),
    }

    //= deepspeed 0.19.8 runtime/lr_schedules.py __init__
    /// Warm-up, then a constant learning rate.
    pub(crate) struct WarmupLr<'a> {
        warmup_min_lr: f64 = MIN_LR,
        /// Learning rate after the warm-up. Unset or "auto": the optimizer's lr.
        warmup_max_lr: Option<f64> = opt_per_group(NotNegative).auto(),
        warmup_num_steps: usize = WARMUP_STEPS,
        shape as "warmup_type": WarmupShape = SHAPE,
        last_batch_iteration: i64 = LAST_ITERATION,
        /// Length of the schedule. WarmupLR does not decay and has no such parameter.
        total_num_steps = opt_positive()
            .refused("WarmupLR has no such parameter: it never decays", "remove it or use WarmupDecayLR"),
    }

    //= deepspeed 0.19.8 runtime/lr_schedules.py __init__
    /// Warm-up, then linear decay to warmup_min_lr.
    pub(crate) struct WarmupDecayLr<'a> {
        total_num_steps: Option<usize> = TOTAL_STEPS,
        warmup_min_lr: f64 = MIN_LR,
        /// Learning rate at the end of the warm-up; unlike in WarmupLR, the default is not the
        /// optimizer's lr. "auto": the optimizer's lr.
        warmup_max_lr: f64 = per_group(NotNegative, 0.001).auto(),
        warmup_num_steps: usize = WARMUP_STEPS,
        shape as "warmup_type": WarmupShape = SHAPE,
        last_batch_iteration: i64 = LAST_ITERATION,
    }

    //= deepspeed 0.19.8 runtime/lr_schedules.py __init__
    /// Warm-up to the optimizer's lr, then cosine decay.
    pub(crate) struct WarmupCosineLr<'a> {
        total_num_steps: Option<usize> = TOTAL_STEPS,
        /// Learning rate at the start of the warm-up, as a fraction of the optimizer's lr. The
        /// first step always has a learning rate of 0.
        warmup_min_ratio: f64 = real(NotNegative, 0.0),
        warmup_num_steps: usize = WARMUP_STEPS,
        /// Learning rate at the end of the schedule, as a fraction of the optimizer's lr.
        cos_min_ratio: f64 = real(NotNegative, 0.0001),
        shape as "warmup_type": WarmupShape = SHAPE,
        last_batch_iteration: i64 = LAST_ITERATION,
    }

    //= deepspeed 0.19.8 runtime/lr_schedules.py __init__
    /// Learning-rate range test: an increasing learning rate, to find its largest stable value
    /// (Smith 2017).
    pub(crate) struct LrRangeTest<'a> {
        /// Learning rate at the start.
        min_lr as "lr_range_test_min_lr": f64 = per_group(NotNegative, 0.001),
        /// Length of an interval, in which the learning rate increases by lr_range_test_step_rate.
        step_size as "lr_range_test_step_size": usize = positive(2000).unit("steps"),
        /// Increase per interval, as a fraction of lr_range_test_min_lr.
        step_rate as "lr_range_test_step_rate": f64 = real(Any, 1.0),
        /// Increase the learning rate once per interval instead of continuously.
        staircase as "lr_range_test_staircase": bool = flag(false),
        last_batch_iteration: i64 = LAST_ITERATION,
    }

    //= deepspeed 0.19.8 runtime/lr_schedules.py __init__
    /// 1-cycle policy: the learning rate rises and falls once, then decays (Smith 2018).
    pub(crate) struct OneCycle<'a> {
        /// Learning rate at the start and end of the cycle.
        cycle_min_lr: Option<f64> = opt_per_group(NotNegative).required(),
        /// Learning rate at the peak of the cycle.
        cycle_max_lr: Option<f64> = opt_per_group(NotNegative).required(),
        /// Decay of the learning rate after the cycle: after n intervals of decay_step_size it is
        /// cycle_min_lr / (1 + n times the rate).
        decay_lr_rate: f64 = real(NotNegative, 0.0),
        /// Length of the first half of the cycle, in which the learning rate rises.
        first_step_size as "cycle_first_step_size": usize = positive(2000).unit("steps"),
        /// Length of the second half of the cycle, in which the learning rate falls. Unset:
        /// cycle_first_step_size.
        cycle_second_step_size: Option<usize> = opt_count().unit("steps"),
        /// Number of stairs in the first half of the cycle; 0 changes the learning rate
        /// continuously.
        first_stair_count as "cycle_first_stair_count": usize = count(0).unit("stairs"),
        /// Number of stairs in the second half of the cycle; 0 changes the learning rate
        /// continuously. Unset: cycle_first_stair_count.
        cycle_second_stair_count: Option<usize> = opt_count().unit("stairs"),
        /// Length of a decay interval after the cycle; 0 disables decay.
        decay_step_size: usize = count(0).unit("steps"),
        /// Cycle the momentum (beta1) inversely to the learning rate. Sets beta2 to 0.99. Requires
        /// an optimizer with betas.
        cycle_momentum: bool = flag(true),
        /// Momentum at the peak of the learning rate.
        cycle_min_mom: f64 = per_group(Decay, 0.8),
        /// Momentum at the start and end of the cycle.
        cycle_max_mom: f64 = per_group(Decay, 0.9),
        /// Increase of the momentum after the cycle, per interval of decay_step_size, as a fraction
        /// of cycle_max_mom. The momentum stops at 0.999, or at cycle_max_mom if it is higher.
        decay_mom_rate: f64 = real(NotNegative, 0.0),
        last_batch_iteration: i64 = LAST_ITERATION,
    }

    /// Step decay: multiply the learning rate by gamma every step_size steps.
    pub(crate) struct StepLr<'a> {
        /// Number of steps between two decays.
        step_size: Option<usize> = opt_positive().required().unit("steps"),
        /// Factor of each decay.
        gamma: f64 = real(NotNegative, 0.1),
        last_epoch = LAST_EPOCH,
        verbose = VERBOSE,
    }

    /// Cosine annealing between lr and eta_min; periodic, without restarts.
    pub(crate) struct CosineAnnealingLr<'a> {
        /// Steps from lr to eta_min, half a period. Afterwards the learning rate rises again.
        t_max as "T_max": Option<usize> = opt_positive().required().unit("steps"),
        /// Minimum learning rate.
        eta_min: f64 = real(NotNegative, 0.0),
        last_epoch = LAST_EPOCH,
        verbose = VERBOSE,
    }

    /// Linear change from start_factor to end_factor times lr, then constant.
    pub(crate) struct LinearLr<'a> {
        // PyTorch's default is 1/3.
        /// Factor of lr in the first step.
        start_factor: f64 = real(Fraction, 0.3333333333333333),
        /// Factor of lr after total_iters steps.
        end_factor: f64 = real(Fraction, 1.0),
        /// Number of steps from start_factor to end_factor.
        total_iters: usize = positive(5).unit("steps"),
        last_epoch = LAST_EPOCH,
        verbose = VERBOSE,
    }

    /// Exponential decay: multiply the learning rate by gamma after every step.
    pub(crate) struct ExponentialLr<'a> {
        /// Factor per step.
        gamma: Option<f64> = opt_real(NotNegative).required(),
        last_epoch = LAST_EPOCH,
        verbose = VERBOSE,
    }
}
