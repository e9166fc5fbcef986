//! PyTorch's schedules that DeepSpeed files name, counted in applied optimizer steps.

use crate::key::{Asks, Key, Literal};

use crate::keys::scheduler::available;
use crate::kind::{Integers, Kind, Reals, Variant};
use crate::plan::SchedulePlan;
use crate::section::Section;

const LAST_EPOCH: Key = Key::new(
    "last_epoch",
    Kind::Integer(Integers::ANY),
    Literal::Integer(-1),
    "Index of the last step before training; -1 for a new run.",
)
.unavailable("a PyTorch schedule that starts in the middle", Asks::Differs, "set it to -1");

const VERBOSE: Key = Key::optional("verbose", Kind::Free, "Print every change.")
    .inert("metrics.jsonl holds every step's lr");

pub(crate) const STEP: Variant = available(
    "StepLR",
    "Decay by gamma every step_size steps.",
    &[
        Key::required("step_size", Kind::Integer(Integers::POSITIVE), "Length between two decays.")
            .unit("steps"),
        Key::real("gamma", Reals::NotNegative, 0.1, "Factor of each decay."),
        LAST_EPOCH,
        VERBOSE,
    ],
);

pub(crate) const COSINE_ANNEALING: Variant = available(
    "CosineAnnealingLR",
    "A cosine between lr and eta_min.",
    &[
        Key::required("T_max", Kind::Integer(Integers::POSITIVE), "Length of half a period.")
            .unit("steps"),
        Key::real("eta_min", Reals::NotNegative, 0.0, "Learning rate at the end of half a period."),
        LAST_EPOCH,
        VERBOSE,
    ],
);

pub(crate) const LINEAR: Variant = available(
    "LinearLR",
    "Linear between two factors of lr.",
    &[
        Key::real("start_factor", Reals::Share, 1.0 / 3.0, "Factor at the first step."),
        Key::real("end_factor", Reals::Share, 1.0, "Factor at the end."),
        Key::positive("total_iters", 5, "Length from one factor to the other.").unit("steps"),
        LAST_EPOCH,
        VERBOSE,
    ],
);

pub(crate) const EXPONENTIAL: Variant = available(
    "ExponentialLR",
    "Decay by gamma every step.",
    &[
        Key::required("gamma", Kind::Real(Reals::NotNegative), "Factor of each step."),
        LAST_EPOCH,
        VERBOSE,
    ],
);

/// The plan of one of these. What is required and missing has been reported; it reads as 1.
pub(crate) fn resolve(name: &str, params: &Section<'_>, lr: f64) -> SchedulePlan {
    match name {
        "StepLR" => SchedulePlan::Step {
            lr,
            step_size: params.optional_count("step_size").unwrap_or(1),
            gamma: params.real("gamma"),
        },
        "CosineAnnealingLR" => SchedulePlan::CosineAnnealing {
            lr,
            t_max: params.optional_count("T_max").unwrap_or(1),
            eta_min: params.real("eta_min"),
        },
        "LinearLR" => SchedulePlan::Linear {
            lr,
            start_factor: params.real("start_factor"),
            end_factor: params.real("end_factor"),
            total_iters: params.count("total_iters"),
        },
        _ => SchedulePlan::Exponential { lr, gamma: params.optional_real("gamma").unwrap_or(1.0) },
    }
}
