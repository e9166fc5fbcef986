//! 1-bit Adam: AdamW until the freeze, and averaged momenta with a frozen second moment after it.
//!
//! Source: Tang et al. 2021, "1-bit Adam", as in `deepspeed/runtime/fp16/onebit/adam.py`.

use deepburn_config::{AdamPlan, OneBitAdamPlan, OptimizerPlan};
use deepburn_kernels as kernels;

use super::Rates;
use super::moments::{FIRST_MOMENT, SECOND_MOMENT};
use super::rounds::UpdateScope;
use super::rule::{CompressedOptimizer, UpdateStep, elementwise};

impl CompressedOptimizer for OneBitAdamPlan {
    fn moments(&self) -> &'static [&'static str] {
        &[FIRST_MOMENT, SECOND_MOMENT]
    }

    fn freeze_step(&self) -> u64 {
        self.freeze_step
    }

    fn compressed_quantity(&self, _time: u64) -> &'static str {
        "momentum"
    }

    fn scope(&self, time: u64, _local_rates: f64) -> UpdateScope {
        match time > self.freeze_step {
            true => UpdateScope::Momentum,
            false => UpdateScope::Elements,
        }
    }

    fn step(&self, rates: Rates, time: u64, _local_rates: f64) -> UpdateStep {
        match time > self.freeze_step {
            true => momentum(self, rates),
            false => {
                UpdateStep::Elements(elementwise(&OptimizerPlan::AdamW(self.adam), rates, time))
            }
        }
    }
}

/// Returns the scalars of 1-bit Adam after the freeze (Tang et al. 2021). They are not
/// bias-corrected, because the second moment no longer changes.
fn momentum(plan: &OneBitAdamPlan, Rates { lr, betas }: Rates) -> UpdateStep {
    let AdamPlan { betas: own, eps, weight_decay, .. } = plan.adam;
    let [beta1, _] = betas.unwrap_or(own);
    // `beta1` is 0 in the second pass: the mean momentum already contains the gradient and replaces
    // the momentum of this rank.
    let agreed = kernels::FrozenAdam { lr, beta1: 0.0, eps, weight_decay };
    UpdateStep::Momentum {
        local: kernels::LocalMomentumStep::new(beta1).into(),
        agreed: kernels::FrozenAdamStep::new(&agreed).into(),
    }
}
