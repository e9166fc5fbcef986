//! 1-bit Adam (Tang et al. 2021, arXiv 2102.02888), as DeepSpeed's `onebit/adam.py`.
//!
//! - Steps `1..=freeze_step`, the warm-up: Adam on the mean gradient, without bias correction. The
//!   mean gradient updates both moments.
//! - From step `freeze_step + 1` on, the second moment does not change. Each rank adds its own
//!   gradient to the common momentum. The results are averaged with one bit per element, tensor by
//!   tensor, and the average is the new momentum of all ranks. Compression errors are errors of the
//!   momentum and start at 0.
//! - Weight decay is added to the direction: `p -= lr * (m / (sqrt(v) + eps) + weight_decay * p)`.
//!
//! DeepSpeed accepts `bias_correction`, `eps_inside_sqrt` and `max_grad_norm` but does not use
//! them. Its warm-up has one update less than `freeze_step`, because the call that drops its
//! gradient counts as a step.

use super::{CompressedMean, live_elements, mean_gradient, moving_average, squared, zeros_like};

#[derive(Debug, Clone, Copy)]
pub(crate) struct OneBitAdamRule {
    pub(crate) betas: [f64; 2],
    pub(crate) eps: f64,
    pub(crate) weight_decay: f64,
    /// The number of warm-up steps, at least 1.
    pub(crate) freeze_step: u64,
}

/// The parameters and states as `[tensor][element]`, which are the same on every rank.
#[derive(Debug, Clone)]
pub(crate) struct OneBitAdam {
    rule: OneBitAdamRule,
    /// The number of steps so far.
    pub(crate) time: u64,
    pub(crate) params: Vec<Vec<f64>>,
    pub(crate) m: Vec<Vec<f64>>,
    pub(crate) v: Vec<Vec<f64>>,
    pub(crate) exchanges: Vec<CompressedMean>,
}

impl OneBitAdam {
    pub(crate) fn new(rule: OneBitAdamRule, ranks: usize, params: Vec<Vec<f64>>) -> Self {
        let (m, v) = (zeros_like(&params), zeros_like(&params));
        let exchanges =
            params.iter().map(|tensor| CompressedMean::new(ranks, tensor.len())).collect();
        Self { rule, time: 0, params, m, v, exchanges }
    }

    /// Takes a step with `gradients[rank][tensor][element]`.
    pub(crate) fn step(&mut self, lr: f64, gradients: &[Vec<Vec<f64>>]) {
        self.time += 1;
        let OneBitAdamRule { betas: [beta1, beta2], eps, weight_decay, freeze_step } = self.rule;
        for tensor in 0..self.params.len() {
            let (m, v) = (&mut self.m[tensor], &mut self.v[tensor]);
            if self.time <= freeze_step {
                let gradient = mean_gradient(gradients, tensor);
                *m = moving_average(beta1, m, &gradient);
                *v = moving_average(beta2, v, &squared(&gradient));
            } else {
                let own = |rank: &Vec<Vec<f64>>| moving_average(beta1, m, &rank[tensor]);
                let momenta: Vec<_> = gradients.iter().map(own).collect();
                *m = self.exchanges[tensor].mean(&momenta, &live_elements(v));
            }
            for (i, p) in self.params[tensor].iter_mut().enumerate() {
                *p -= lr * (m[i] / (v[i].sqrt() + eps) + weight_decay * *p);
            }
        }
    }
}
