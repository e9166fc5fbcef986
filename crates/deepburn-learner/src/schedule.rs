//! Learning-rate schedules, and the momentum schedule of OneCycle, as functions of the applied
//! optimizer steps.
//!
//! Main type: [`Schedule`], a plan and a position. The position is DeepSpeed's
//! `last_batch_iteration`: -1 before the first step, and one more after every applied step. A step
//! skipped for an overflow does not move it.
//!
//! Every learning rate is computed from the position by a closed formula, not from the previous
//! rate. A resumed run therefore only calls [`Schedule::seek`] with the saved position and gets
//! bit-identical learning rates, without replaying any steps.
//!
//! Two of DeepSpeed's conventions look like errors, but are kept so that runs
//! can be compared with DeepSpeed. Warm-ups keep the minimum for the first two
//! steps, because positions -1 and 0 give the same rate. The cosine warm-up
//! starts with a learning rate of exactly 0, even if its minimal ratio is
//! positive. PyTorch's and transformers' schedules count the same steps, starting
//! at time 0.
//!
//! There is also a schedule of the sequence length ([`sequence_length`]). Dynamic batching scales
//! learning rates by the number of samples ([`lr_factor`]).

mod curriculum;
mod lr_scaling;
mod one_cycle;
mod trainer;
mod warmup;

use deepburn_config::SchedulePlan;
use std::f64::consts::PI;
use warmup::Warmup;

pub use curriculum::sequence_length;
pub use lr_scaling::lr_factor;

/// A learning-rate schedule and its position.
#[derive(Debug, Clone, PartialEq)]
pub struct Schedule {
    /// The kind of schedule, with every default filled in.
    plan: SchedulePlan,
    /// The index of the last applied step; -1 before the first.
    position: i64,
}

impl Schedule {
    /// Returns the schedule of `plan` at its initial position.
    pub fn new(plan: &SchedulePlan) -> Self {
        let position = match plan {
            SchedulePlan::Warmup { last_batch_iteration, .. }
            | SchedulePlan::WarmupDecay { last_batch_iteration, .. }
            | SchedulePlan::WarmupCosine { last_batch_iteration, .. }
            | SchedulePlan::LrRangeTest { last_batch_iteration, .. } => *last_batch_iteration,
            SchedulePlan::OneCycle(cycle) => cycle.last_batch_iteration,
            SchedulePlan::Constant { .. }
            | SchedulePlan::Step { .. }
            | SchedulePlan::CosineAnnealing { .. }
            | SchedulePlan::Linear { .. }
            | SchedulePlan::Exponential { .. }
            | SchedulePlan::Trainer(_) => -1,
        };
        let mut schedule = Self { plan: plan.clone(), position: -1 };
        schedule.seek(position);
        schedule
    }

    /// Returns the learning rate of the next optimizer step.
    ///
    /// With `i` the position and `t = i + 1` the number of applied steps:
    ///
    /// - warm-ups and one-cycle: DeepSpeed's formulae of `i` (`lr_schedules.py`)
    /// - range test: `min_lr * (1 + step_rate * t / step_size)`
    /// - step: `lr * gamma ^ floor(t / step_size)`
    /// - cosine annealing: `eta_min + (lr - eta_min) * (1 + cos(pi * t / t_max)) / 2`
    /// - linear: from `lr * start_factor` to `lr * end_factor` within `total_iters`
    /// - exponential: `lr * gamma ^ t`
    /// - transformers' schedules: `lr` times a factor of `t` (`optimization.py`)
    pub fn learning_rate(&self) -> f64 {
        let i = self.position;
        match &self.plan {
            SchedulePlan::Constant { lr } => *lr,
            //= deepspeed 0.19.8 runtime/lr_schedules.py WarmupLR
            SchedulePlan::Warmup { min_lr, max_lr, warmup_steps, shape, .. } => {
                let warmup = Warmup::new(*warmup_steps, *shape);
                min_lr + (max_lr - min_lr) * warmup.progress(i).unwrap_or(1.0)
            }
            //= deepspeed 0.19.8 runtime/lr_schedules.py WarmupDecayLR
            SchedulePlan::WarmupDecay {
                min_lr, max_lr, warmup_steps, total_steps, shape, ..
            } => {
                let warmup = Warmup::new(*warmup_steps, *shape);
                let gamma = warmup.progress(i).unwrap_or_else(|| warmup.remaining(i, *total_steps));
                min_lr + (max_lr - min_lr) * gamma
            }
            SchedulePlan::WarmupCosine { lr, .. } => lr * self.cosine_ratio(),
            //= deepspeed 0.19.8 runtime/lr_schedules.py LRRangeTest
            SchedulePlan::LrRangeTest { min_lr, step_size, step_rate, staircase, .. } => {
                // Sizes are at least 1 here and below, because 0 / 0 would be a rate of NaN.
                let intervals = self.steps_applied() / (*step_size).max(1) as f64;
                let intervals = if *staircase { intervals.floor() } else { intervals };
                min_lr * (1.0 + step_rate * intervals)
            }
            SchedulePlan::OneCycle(cycle) => one_cycle::learning_rate(cycle, i),
            //= torch 2.9.0 optim/lr_scheduler.py StepLR
            SchedulePlan::Step { lr, step_size, gamma } => {
                lr * gamma.powf((self.steps_applied() / (*step_size).max(1) as f64).floor())
            }
            //= torch 2.9.0 optim/lr_scheduler.py CosineAnnealingLR
            SchedulePlan::CosineAnnealing { lr, t_max, eta_min } => {
                let phase = PI * self.steps_applied() / (*t_max).max(1) as f64;
                eta_min + (lr - eta_min) * (1.0 + phase.cos()) / 2.0
            }
            //= torch 2.9.0 optim/lr_scheduler.py LinearLR
            SchedulePlan::Linear { lr, start_factor, end_factor, total_iters } => {
                let total = (*total_iters).max(1) as f64;
                let done = self.steps_applied().min(total) / total;
                lr * (start_factor + (end_factor - start_factor) * done)
            }
            //= torch 2.9.0 optim/lr_scheduler.py ExponentialLR
            SchedulePlan::Exponential { lr, gamma } => lr * gamma.powf(self.steps_applied()),
            SchedulePlan::Trainer(schedule) => {
                schedule.lr * trainer::factor(schedule, self.steps_applied())
            }
        }
    }

    /// Returns the momentum (Adam's beta1) of the next step; `None` if the schedule does not change
    /// it.
    pub fn beta1(&self) -> Option<f64> {
        match &self.plan {
            SchedulePlan::OneCycle(cycle) => one_cycle::beta1(cycle, self.position),
            _ => None,
        }
    }

    /// Returns Adam's betas of the next step; `None` if the schedule does not change momentum. The
    /// second one is 0.99, as in DeepSpeed's OneCycle.
    pub fn betas(&self) -> Option<[f64; 2]> {
        self.beta1().map(|beta1| [beta1, one_cycle::BETA2])
    }

    /// Moves to the next step. Call it after each applied step, and not after a skipped one.
    pub fn advance(&mut self) {
        self.position = self.position.saturating_add(1);
    }

    /// Returns the index of the last applied step; -1 before the first. Checkpoints store this
    /// number.
    pub fn position(&self) -> i64 {
        self.position
    }

    /// Sets the position, for example from a checkpoint. Values below -1 count as -1.
    pub fn seek(&mut self, position: i64) {
        self.position = position.max(-1);
    }

    /// Returns the number of applied steps, which is `last_epoch` in PyTorch's schedules.
    fn steps_applied(&self) -> f64 {
        self.position as f64 + 1.0
    }

    //= deepspeed 0.19.8 runtime/lr_schedules.py WarmupCosineLR
    /// Returns the factor of the learning rate for the cosine warm-up; 0 for the other plans.
    fn cosine_ratio(&self) -> f64 {
        let SchedulePlan::WarmupCosine {
            warmup_min_ratio,
            cos_min_ratio,
            warmup_steps,
            total_steps,
            shape,
            ..
        } = &self.plan
        else {
            return 0.0;
        };
        // DeepSpeed returns 0 before its first step, whatever the minimal ratio.
        if self.position < 0 {
            return 0.0;
        }
        let warmup = Warmup::new(*warmup_steps, *shape);
        match warmup.progress(self.position) {
            Some(gamma) => warmup_min_ratio + (1.0 - warmup_min_ratio) * gamma,
            None => {
                let phase = PI * warmup.decayed(self.position, *total_steps);
                cos_min_ratio + (1.0 - cos_min_ratio) * (1.0 + phase.cos()) / 2.0
            }
        }
    }
}

#[cfg(test)]
mod tests;
