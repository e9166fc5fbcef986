//! The schedules of transformers' Trainer (`lr_scheduler_type`).

use serde::Serialize;

use crate::choice::choices;

/// A schedule of transformers' Trainer.
///
/// The learning rate is `lr` times a factor that depends on `i`, the number of applied steps. In
/// the warm-up, the factor is `i / warmup_steps`, unless the curve has another one. In the formulae
/// of the curves, `p` is `(i - warmup_steps) / (total_steps - warmup_steps)`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TrainerSchedule {
    /// Learning rate that the factor multiplies.
    pub lr: f64,
    /// Applied steps of the warm-up; 0 for none.
    pub warmup_steps: usize,
    /// Applied steps of the run.
    pub total_steps: usize,
    /// The factor after the warm-up.
    pub curve: TrainerCurve,
}

/// The factor of the learning rate after the warm-up.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "name", rename_all = "snake_case")]
pub enum TrainerCurve {
    /// 1.
    ConstantWithWarmup,
    /// `1 - p`.
    Linear,
    /// `(1 + cos(2 pi num_cycles p)) / 2`.
    Cosine {
        /// Periods of the cosine; 0.5 falls to 0 once.
        num_cycles: f64,
    },
    /// `(1 + cos(pi frac(num_cycles p))) / 2`, and 0 from `p = 1` on.
    CosineWithRestarts {
        /// Number of falls to 0.
        num_cycles: f64,
    },
    /// From 1 to `lr_end / lr` in proportion to `(1 - p)^power`.
    Polynomial {
        /// Learning rate at the end.
        lr_end: f64,
        /// The exponent.
        power: f64,
    },
    /// `1 / sqrt((i - warmup_steps + timescale) / timescale)`.
    InverseSqrt {
        /// Steps until the factor is `1 / sqrt(2)`, apart from 1.
        timescale: usize,
    },
    /// `Cosine`, from 1 to `min_lr_rate`.
    CosineWithMinLr {
        /// Periods of the cosine; 0.5 falls once.
        num_cycles: f64,
        /// Lowest factor.
        min_lr_rate: f64,
    },
    /// `CosineWithMinLr` one step ahead. The warm-up starts at `1 / warmup_steps`, or at
    /// `warmup_lr_rate`.
    CosineWarmupWithMinLr {
        /// Periods of the cosine; 0.5 falls once.
        num_cycles: f64,
        /// Lowest factor.
        min_lr_rate: f64,
        /// Factor of the first step; `None` for `1 / warmup_steps`.
        warmup_lr_rate: Option<f64>,
    },
    /// Warm-up, a constant rate and a decay, each of its own length.
    WarmupStableDecay(WarmupStableDecay),
}

/// Parameters of the warm-up-stable-decay schedule.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct WarmupStableDecay {
    /// Applied steps between the warm-up and the decay. A negative number, as in transformers,
    /// starts within the decay, because the warm-up and the decay are longer than the run.
    pub num_stable_steps: i64,
    /// Applied steps of the decay.
    pub num_decay_steps: usize,
    /// Shape of the warm-up.
    pub warmup_type: RampShape,
    /// Shape of the decay.
    pub decay_type: RampShape,
    /// Factor at the start and the end.
    pub min_lr_ratio: f64,
    /// Periods of a decay along a cosine.
    pub num_cycles: f64,
}

/// The shape of the warm-up or the decay of a warm-up-stable-decay schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RampShape {
    /// A line.
    Linear,
    /// A cosine.
    Cosine,
    /// One minus a square root.
    OneMinusSqrt,
}

choices!(RampShape { "linear" => Linear, "cosine" => Cosine, "1-sqrt" => OneMinusSqrt });

/// A schedule's name in transformers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LrSchedulerType {
    /// Warm-up, then linear to 0.
    Linear,
    /// Warm-up, then along a cosine.
    Cosine,
    /// Warm-up, then several times along half a cosine.
    CosineWithRestarts,
    /// Warm-up, then along a power.
    Polynomial,
    /// The optimizer's learning rate, without a warm-up.
    Constant,
    /// Warm-up, then the optimizer's learning rate.
    ConstantWithWarmup,
    /// Warm-up, then in proportion to an inverse square root.
    InverseSqrt,
    /// Warm-up, then along a cosine to a minimum.
    CosineWithMinLr,
    /// Warm-up from a minimum, then along a cosine to a minimum.
    CosineWarmupWithMinLr,
    /// Warm-up, a constant rate and a decay.
    WarmupStableDecay,
}

choices!(LrSchedulerType {
    "linear" => Linear, "cosine" => Cosine, "cosine_with_restarts" => CosineWithRestarts,
    "polynomial" => Polynomial, "constant" => Constant, "constant_with_warmup" => ConstantWithWarmup,
    "inverse_sqrt" => InverseSqrt, "cosine_with_min_lr" => CosineWithMinLr,
    "cosine_warmup_with_min_lr" => CosineWarmupWithMinLr, "warmup_stable_decay" => WarmupStableDecay,
});

impl LrSchedulerType {
    /// Returns the names of the parameters that `lr_scheduler_kwargs` may have.
    pub(crate) fn parameters(self) -> &'static [&'static str] {
        match self {
            Self::Linear | Self::Constant | Self::ConstantWithWarmup => &[],
            Self::Cosine | Self::CosineWithRestarts => &["num_cycles"],
            Self::Polynomial => &["lr_end", "power"],
            Self::InverseSqrt => &["timescale"],
            Self::CosineWithMinLr => &["num_cycles", "min_lr", "min_lr_rate"],
            Self::CosineWarmupWithMinLr => {
                &["num_cycles", "min_lr", "min_lr_rate", "warmup_lr_rate"]
            }
            Self::WarmupStableDecay => &[
                "num_decay_steps",
                "num_stable_steps",
                "warmup_type",
                "decay_type",
                "min_lr_ratio",
                "num_cycles",
            ],
        }
    }
}

/// A schedule of transformers as a job file asks for it; `None` for parameters that it does not
/// set.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LrScheduler {
    /// The schedule.
    pub kind: LrSchedulerType,
    /// Its parameters.
    pub parameters: LrSchedulerParameters,
}

/// `lr_scheduler_kwargs`: the parameters of transformers' schedules.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct LrSchedulerParameters {
    /// Periods of a cosine, or number of restarts.
    pub num_cycles: Option<f64>,
    /// Exponent of a polynomial.
    pub power: Option<f64>,
    /// Learning rate at the end of a polynomial.
    pub lr_end: Option<f64>,
    /// Steps until an inverse square root has fallen by `sqrt(2)`.
    pub timescale: Option<usize>,
    /// Lowest learning rate.
    pub min_lr: Option<f64>,
    /// Lowest learning rate, as a fraction of the optimizer's.
    pub min_lr_rate: Option<f64>,
    /// Learning rate of the first step, as a fraction of the optimizer's.
    pub warmup_lr_rate: Option<f64>,
    /// Steps of the decay.
    pub num_decay_steps: Option<usize>,
    /// Steps between the warm-up and the decay.
    pub num_stable_steps: Option<usize>,
    /// Shape of the warm-up.
    pub warmup_type: Option<RampShape>,
    /// Shape of the decay.
    pub decay_type: Option<RampShape>,
    /// Learning rate at the start and the end, as a fraction of the optimizer's.
    pub min_lr_ratio: Option<f64>,
}
