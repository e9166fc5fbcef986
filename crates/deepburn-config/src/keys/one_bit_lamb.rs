//! `optimizer.params` of 1-bit LAMB, with DeepSpeed's names and defaults.

use super::one_bit::{
    COMM_BACKEND_NAME, CUDA_AWARE, EPS_INSIDE_SQRT, FREEZE_STEP, FREEZE_STEP_KEY, freeze_step,
    positive_eps,
};
use super::optimizer::{
    AMSGRAD, BETAS, LR, MAX_COEFF, MAX_GRAD_NORM, MIN_COEFF, POSITIVE_EPS, WEIGHT_DECAY, bounds,
    learning_rate,
};
use crate::key::Key;
use crate::kind::Reals;
use crate::plan::{LambPlan, OneBitLambPlan, OptimizerPlan};
use crate::resolve::Context;
use crate::section::Section;

pub(super) const KEYS: &[Key] = &[
    LR,
    BETAS,
    POSITIVE_EPS,
    WEIGHT_DECAY,
    MAX_COEFF,
    MIN_COEFF,
    FREEZE_STEP_KEY,
    Key::real(
        "coeff_beta",
        Reals::Decay,
        0.9,
        "Decay of the moving average of each tensor's trust ratio, which is frozen after freeze_step.",
    ),
    Key::real("factor_max", Reals::Positive, 4.0, "Largest factor of the frozen trust ratio."),
    Key::real("factor_min", Reals::NotNegative, 0.5, "Smallest factor of the frozen trust ratio."),
    Key::real(
        "factor_threshold",
        Reals::NotNegative,
        0.1,
        "Largest relative change of the factor from one step to the next.",
    ),
    Key::flag("bias_correction", true, "Divide the moments by 1 - beta^t.")
        .inert("1-bit LAMB never corrects its moments; DeepSpeed ignores the key too"),
    EPS_INSIDE_SQRT,
    AMSGRAD,
    CUDA_AWARE,
    COMM_BACKEND_NAME,
    MAX_GRAD_NORM,
];

/// Resolves 1-bit LAMB's part of the plan.
pub(super) fn resolve(params: &Section<'_>, context: &mut Context<'_>) -> OptimizerPlan {
    let (coeff_beta, freeze_step) = (params.real("coeff_beta"), freeze_step(params, context));
    // The average starts at 0, and its missing part is a factor of all later updates.
    let missing = coeff_beta.powf(freeze_step as f64);
    if (freeze_step as f64) * (1.0 - coeff_beta) < 1.0 - 1e-9 {
        let message = format!(
            "{freeze_step} is below 1 / (1 - coeff_beta): the average of trust ratios, which starts at 0, is {:.0} % too \
             small when it is frozen",
            100.0 * missing
        );
        let remedy = "give more steps or a smaller coeff_beta";
        context.findings.push(params.warning(FREEZE_STEP, message, remedy));
    }
    OptimizerPlan::OneBitLamb(OneBitLambPlan {
        lamb: LambPlan {
            lr: learning_rate(params, context),
            betas: params.pair("betas"),
            eps: positive_eps(params, context),
            eps_inside_sqrt: false,
            weight_decay: params.real("weight_decay"),
            bias_correction: false,
            trust_ratio: bounds(params, ["min_coeff", "max_coeff"], context),
        },
        freeze_step,
        coeff_beta,
        factor: bounds(params, ["factor_min", "factor_max"], context),
        factor_threshold: params.real("factor_threshold"),
    })
}
