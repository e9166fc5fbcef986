//! 0/1 Adam (Lu et al. 2022, arXiv 2202.06009), as DeepSpeed's `onebit/zoadam.py`.
//!
//! - Steps `1..=var_freeze_step`: if `t % var_interval == 0`, the uncompressed mean gradient
//!   updates both moments. Otherwise the gradients are averaged with one bit per element and only
//!   update the first moment. After a step of the first kind, `var_counter` grows by 1; at
//!   `var_update_scaler` it becomes 0 and `var_interval` doubles.
//! - Later steps: the second moment does not change, and the errors are reset to 0 once. Each rank
//!   takes local steps with its own momentum, and accumulates its movement `u` and the learning
//!   rates. If `t % local_step_interval == 0`, the ranks return to their last common parameters,
//!   average `u * (sqrt(v) + eps)` with one bit per element, and apply the result `c`:
//!   `m = -c / (sum of learning rates)` and `p += c / (sqrt(v) + eps)`. After every later step,
//!   `local_step_counter` grows by 1; at `local_step_scaler` it becomes 0 and `local_step_interval`
//!   doubles, up to `local_step_clipper`.
//! - There is no bias correction. Intervals start at 1 and counters at 0.
//!
//! These faults of DeepSpeed are corrected:
//! - One rank omits the momentum of every step without a variance update.
//! - If the sum of learning rates is 0, the momentum becomes NaN. Here nothing is exchanged.
//! - `p - u` equals the last common parameter only up to rounding, so ranks drift apart.
//! - A dead element that gets a gradient later moves by `lr * m / eps` until the next exchange.
//!   Here its local gradient is 0.
//! - Weight decay is part of `u`, so it is added to the momentum and multiplied by up to
//!   `1 / (1 - beta1)`. Here it is decoupled: every local step multiplies the common parameters and
//!   `u` by `1 - lr * weight_decay`.

use super::{
    CompressedMean, live_elements, masked, mean_gradient, moving_average, squared, zeros_like,
};

#[derive(Debug, Clone, Copy)]
pub(crate) struct ZeroOneAdamRule {
    pub(crate) betas: [f64; 2],
    pub(crate) eps: f64,
    pub(crate) weight_decay: f64,
    /// The last step that may update the second moment, at least 1.
    pub(crate) var_freeze_step: u64,
    /// The number of updates of the second moment between two doublings of their interval.
    pub(crate) var_update_scaler: u64,
    /// The number of local steps between two doublings of the interval of exchanges.
    pub(crate) local_step_scaler: u64,
    /// The longest interval of exchanges.
    pub(crate) local_step_clipper: u64,
}

/// The states of one rank as `[tensor][element]`, which are the same on all ranks after an
/// exchange.
#[derive(Debug, Clone)]
pub(crate) struct RankStates {
    pub(crate) params: Vec<Vec<f64>>,
    pub(crate) m: Vec<Vec<f64>>,
    /// The movement since the last exchange.
    pub(crate) moved: Vec<Vec<f64>>,
}

#[derive(Debug, Clone)]
pub(crate) struct ZeroOneAdam {
    rule: ZeroOneAdamRule,
    /// The number of steps so far.
    pub(crate) time: u64,
    pub(crate) var_interval: u64,
    pub(crate) var_counter: u64,
    pub(crate) local_step_interval: u64,
    pub(crate) local_step_counter: u64,
    /// The sum of the learning rates since the last exchange.
    pub(crate) lrs: f64,
    pub(crate) ranks: Vec<RankStates>,
    pub(crate) v: Vec<Vec<f64>>,
    /// The parameters after the last exchange.
    pub(crate) common: Vec<Vec<f64>>,
    pub(crate) exchanges: Vec<CompressedMean>,
}

impl ZeroOneAdam {
    pub(crate) fn new(rule: ZeroOneAdamRule, ranks: usize, params: Vec<Vec<f64>>) -> Self {
        let zeros = zeros_like(&params);
        let rank = RankStates { params: params.clone(), m: zeros.clone(), moved: zeros.clone() };
        Self {
            rule,
            time: 0,
            var_interval: 1,
            var_counter: 0,
            local_step_interval: 1,
            local_step_counter: 0,
            lrs: 0.0,
            ranks: vec![rank; ranks],
            v: zeros,
            exchanges: params.iter().map(|it| CompressedMean::new(ranks, it.len())).collect(),
            common: params,
        }
    }

    /// Takes a step with `gradients[rank][tensor][element]`.
    pub(crate) fn step(&mut self, lr: f64, gradients: &[Vec<Vec<f64>>]) {
        self.time += 1;
        if self.time <= self.rule.var_freeze_step {
            self.common_step(lr, gradients);
        } else {
            self.local_step(lr, gradients);
        }
    }

    /// Takes a step of the first phase, after which every rank has the same states.
    fn common_step(&mut self, lr: f64, gradients: &[Vec<Vec<f64>>]) {
        let [beta1, beta2] = self.rule.betas;
        let updates_variance = self.time.is_multiple_of(self.var_interval);
        for tensor in 0..self.v.len() {
            let gradient = if updates_variance {
                let gradient = mean_gradient(gradients, tensor);
                self.v[tensor] = moving_average(beta2, &self.v[tensor], &squared(&gradient));
                gradient
            } else {
                let own: Vec<_> = gradients.iter().map(|rank| rank[tensor].clone()).collect();
                self.exchanges[tensor].mean(&own, &live_elements(&self.v[tensor]))
            };
            for rank in &mut self.ranks {
                rank.m[tensor] = moving_average(beta1, &rank.m[tensor], &gradient);
                rank.descend(&self.rule, lr, tensor, &self.v[tensor]);
            }
            self.common[tensor] = self.ranks[0].params[tensor].clone();
        }
        if updates_variance {
            self.var_counter += 1;
            if self.var_counter == self.rule.var_update_scaler {
                self.var_counter = 0;
                self.var_interval *= 2;
            }
        }
        if self.time == self.rule.var_freeze_step {
            self.exchanges.iter_mut().for_each(CompressedMean::reset);
            self.ranks.iter_mut().for_each(|rank| rank.moved = zeros_like(&rank.params));
        }
    }

    /// Takes a step of the second phase. Some of these steps include an exchange.
    fn local_step(&mut self, lr: f64, gradients: &[Vec<Vec<f64>>]) {
        self.lrs += lr;
        for tensor in 0..self.v.len() {
            let (v, common) = (&self.v[tensor], &mut self.common[tensor]);
            let keep = 1.0 - lr * self.rule.weight_decay;
            common.iter_mut().for_each(|common| *common *= keep);
            for (rank, gradients) in self.ranks.iter_mut().zip(gradients) {
                let gradient = masked(&gradients[tensor], &live_elements(v));
                rank.m[tensor] = moving_average(self.rule.betas[0], &rank.m[tensor], &gradient);
                for i in 0..v.len() {
                    let along = rank.m[tensor][i] / (v[i].sqrt() + self.rule.eps);
                    rank.moved[tensor][i] = keep * rank.moved[tensor][i] - lr * along;
                    rank.params[tensor][i] = common[i] + rank.moved[tensor][i];
                }
            }
        }
        if self.time.is_multiple_of(self.local_step_interval) && self.lrs != 0.0 {
            (0..self.v.len()).for_each(|tensor| self.exchange(tensor));
            self.lrs = 0.0;
        }
        self.local_step_counter += 1;
        if self.local_step_counter == self.rule.local_step_scaler {
            self.local_step_counter = 0;
            self.local_step_interval =
                (self.local_step_interval * 2).min(self.rule.local_step_clipper);
        }
    }

    /// Replaces the movements of the ranks with their mean.
    fn exchange(&mut self, tensor: usize) {
        let v = &self.v[tensor];
        let root = |i: usize| v[i].sqrt() + self.rule.eps;
        let scaled = |rank: &RankStates| {
            rank.moved[tensor].iter().enumerate().map(|(i, moved)| moved * root(i)).collect()
        };
        let own: Vec<Vec<f64>> = self.ranks.iter().map(scaled).collect();
        let mean = self.exchanges[tensor].mean(&own, &live_elements(v));
        for (i, param) in self.common[tensor].iter_mut().enumerate() {
            *param += mean[i] / root(i);
        }
        for rank in &mut self.ranks {
            rank.params[tensor] = self.common[tensor].clone();
            rank.m[tensor] = mean.iter().map(|mean| -mean / self.lrs).collect();
            rank.moved[tensor].fill(0.0);
        }
    }
}

impl RankStates {
    fn descend(&mut self, rule: &ZeroOneAdamRule, lr: f64, tensor: usize, v: &[f64]) {
        for (i, p) in self.params[tensor].iter_mut().enumerate() {
            let direction = self.m[tensor][i] / (v[i].sqrt() + rule.eps) + rule.weight_decay * *p;
            *p -= lr * direction;
            self.moved[tensor][i] -= lr * direction;
        }
    }
}
