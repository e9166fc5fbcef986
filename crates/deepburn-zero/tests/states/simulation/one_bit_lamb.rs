//! 1-bit LAMB (Li et al. 2021, arXiv 2104.06069), as DeepSpeed's `onebit/lamb.py`.
//!
//! - Steps `1..=freeze_step` are the warm-up: LAMB on the mean gradient without bias correction.
//!   The trust ratio `norm(p) / norm(direction)` is clamped to `min_coeff..=max_coeff`; it is 1 if
//!   a norm is 0. A ratio other than 1 is averaged:
//!   `frozen_coeff = coeff_beta * frozen_coeff + (1 - coeff_beta) * ratio`, which starts at 0.
//! - Before step `freeze_step + 1`, `fresh_v = v` is set once. `scaling_coeff` of a tensor is the
//!   united scale divided by the root mean square of its momentum. The united scale is the mean of
//!   these root mean squares.
//! - Later steps: `scaling_coeff * (beta1 * m + (1 - beta1) * g)` of all tensors of a rank is
//!   concatenated to ONE vector and averaged with one bit per element and one scale per rank.
//!   Servers have a part of each tensor; in DeepSpeed, they have a part of the vector. The new `m`
//!   is the result divided by `scaling_coeff`. `(m - beta1 * last m) / (1 - beta1)` replaces the
//!   gradient in `fresh_v`, and the direction is `m / (sqrt(v) + eps) + weight_decay * p` with the
//!   frozen `v`.
//! - `factor` is the largest `(sqrt(v) + eps) / (sqrt(fresh_v) + eps)`. With weight decay it
//!   becomes `factor * r + 1 - r`,
//!   `r = min(1, norm of the direction without decay / norm with it)`. It is clamped to
//!   `factor_min..=factor_max`, and then to a relative distance of `factor_threshold` from the last
//!   factor, which starts at 1. The update is `p -= lr * frozen_coeff * factor * direction`.
//!
//! These faults of DeepSpeed are corrected:
//! - For a tensor whose momentum is 0, `scaling_coeff` is divided by 0. Here the tensor is excluded
//!   from the united scale.
//! - Dead elements count in root mean squares, and their quotient of 1 prevents a `factor` below 1.
//!   Here both use only live elements.
//! - A tensor whose ratio was 1 in every warm-up step has a `frozen_coeff` of 0 and is no longer
//!   updated. Here it is 1.
//!
//! As in DeepSpeed, the average is too small after a short warm-up.

use super::{
    CompressedMean, live_elements, mean_gradient, moving_average, norm, squared, zeros_like,
};

#[derive(Debug, Clone, Copy)]
pub(crate) struct OneBitLambRule {
    pub(crate) betas: [f64; 2],
    pub(crate) eps: f64,
    pub(crate) weight_decay: f64,
    /// The number of warm-up steps, at least 1.
    pub(crate) freeze_step: u64,
    pub(crate) max_coeff: f64,
    pub(crate) min_coeff: f64,
    pub(crate) coeff_beta: f64,
    pub(crate) factor_max: f64,
    pub(crate) factor_min: f64,
    pub(crate) factor_threshold: f64,
}

/// The parameters and states as `[tensor][element]` or `[tensor]`, which are the same on every
/// rank.
#[derive(Debug, Clone)]
pub(crate) struct OneBitLamb {
    rule: OneBitLambRule,
    /// The number of steps so far.
    pub(crate) time: u64,
    pub(crate) params: Vec<Vec<f64>>,
    pub(crate) m: Vec<Vec<f64>>,
    pub(crate) v: Vec<Vec<f64>>,
    pub(crate) fresh_v: Vec<Vec<f64>>,
    pub(crate) frozen_coeff: Vec<f64>,
    pub(crate) last_factor: Vec<f64>,
    pub(crate) scaling_coeff: Vec<f64>,
    /// The compressed mean of all concatenated tensors.
    pub(crate) exchange: CompressedMean,
}

impl OneBitLamb {
    pub(crate) fn new(rule: OneBitLambRule, ranks: usize, params: Vec<Vec<f64>>) -> Self {
        let (zeros, count) = (zeros_like(&params), params.len());
        Self {
            rule,
            time: 0,
            exchange: CompressedMean::new(ranks, params.iter().map(Vec::len).sum()),
            params,
            m: zeros.clone(),
            v: zeros.clone(),
            fresh_v: zeros,
            frozen_coeff: vec![0.0; count],
            last_factor: vec![1.0; count],
            scaling_coeff: vec![1.0; count],
        }
    }

    /// Takes a step with `gradients[rank][tensor][element]`.
    pub(crate) fn step(&mut self, lr: f64, gradients: &[Vec<Vec<f64>>]) {
        self.time += 1;
        if self.time > self.rule.freeze_step {
            return self.compressed_step(lr, gradients);
        }
        for tensor in 0..self.params.len() {
            let gradient = mean_gradient(gradients, tensor);
            let [beta1, beta2] = self.rule.betas;
            self.m[tensor] = moving_average(beta1, &self.m[tensor], &gradient);
            self.v[tensor] = moving_average(beta2, &self.v[tensor], &squared(&gradient));
            let (_, direction) = self.directions(tensor);
            let (weights, length) = (norm(&self.params[tensor]), norm(&direction));
            let mut coeff = 1.0;
            if weights != 0.0 && length != 0.0 {
                coeff = (weights / length).min(self.rule.max_coeff).max(self.rule.min_coeff);
            }
            if coeff != 1.0 {
                let beta = self.rule.coeff_beta;
                self.frozen_coeff[tensor] = beta * self.frozen_coeff[tensor] + (1.0 - beta) * coeff;
            }
            self.descend(tensor, lr * coeff, &direction);
        }
        if self.time == self.rule.freeze_step {
            self.fresh_v = self.v.clone();
            // All ratios were 1, so the average was never updated.
            let unseen = self.frozen_coeff.iter_mut().filter(|coeff| **coeff == 0.0);
            unseen.for_each(|coeff| *coeff = 1.0);
            self.set_scaling_coeffs();
        }
    }

    fn set_scaling_coeffs(&mut self) {
        let scale = |(m, v): (&Vec<f64>, &Vec<f64>)| {
            let count = live_elements(v).into_iter().filter(|live| *live).count();
            if count == 0 { 0.0 } else { norm(m) / (count as f64).sqrt() }
        };
        let scales: Vec<f64> = self.m.iter().zip(&self.v).map(scale).collect();
        let with_momentum = scales.iter().filter(|scale| **scale != 0.0).count();
        let united = scales.iter().sum::<f64>() / with_momentum as f64;
        for (coeff, scale) in self.scaling_coeff.iter_mut().zip(scales) {
            *coeff = if scale == 0.0 { 1.0 } else { united / scale };
        }
    }

    fn compressed_step(&mut self, lr: f64, gradients: &[Vec<Vec<f64>>]) {
        let [beta1, beta2] = self.rule.betas;
        let count = self.params.len();
        let own = |rank: &Vec<Vec<f64>>| -> Vec<f64> {
            let scaled = |tensor: usize| {
                let momentum = moving_average(beta1, &self.m[tensor], &rank[tensor]);
                let coeff = self.scaling_coeff[tensor];
                momentum.into_iter().map(move |x| x * coeff)
            };
            (0..count).flat_map(scaled).collect()
        };
        let momenta: Vec<_> = gradients.iter().map(own).collect();
        let lens: Vec<_> = self.v.iter().map(Vec::len).collect();
        let live = live_elements(&self.v.concat());
        let mean = self.exchange.fused_mean(&momenta, &live, &lens);
        let mut rest = &mean[..];
        for tensor in 0..count {
            let (mean, after) = rest.split_at(self.m[tensor].len());
            rest = after;
            let last = std::mem::take(&mut self.m[tensor]);
            let coeff = self.scaling_coeff[tensor];
            self.m[tensor] = mean.iter().map(|x| x / coeff).collect();
            let gradient: Vec<f64> = self.m[tensor]
                .iter()
                .zip(&last)
                .map(|(m, last)| (m - last * beta1) / (1.0 - beta1))
                .collect();
            let fresh = moving_average(beta2, &self.fresh_v[tensor], &squared(&gradient));
            self.fresh_v[tensor] = fresh;
            let (preliminary, direction) = self.directions(tensor);
            let factor = self.factor(tensor, norm(&preliminary) / norm(&direction));
            self.last_factor[tensor] = factor;
            self.descend(tensor, lr * self.frozen_coeff[tensor] * factor, &direction);
        }
    }

    /// Returns the factor of the frozen trust ratio. `ratio` is the norm of the direction without
    /// decay, divided by the norm of the whole direction.
    fn factor(&self, tensor: usize, ratio: f64) -> f64 {
        let (rule, last) = (&self.rule, self.last_factor[tensor]);
        let quotients =
            self.v[tensor].iter().zip(&self.fresh_v[tensor]).filter(|(v, _)| **v != 0.0);
        let largest = quotients
            .map(|(v, fresh)| (v.sqrt() + rule.eps) / (fresh.sqrt() + rule.eps))
            .reduce(f64::max);
        let mut factor = largest.unwrap_or(1.0);
        if rule.weight_decay > 0.0 {
            // If the direction is 0, the ratio is NaN and counts as 1.
            let ratio = ratio.min(1.0);
            factor = factor * ratio + (1.0 - ratio);
        }
        let factor = factor.min(rule.factor_max).max(rule.factor_min);
        factor.min(last * (1.0 + rule.factor_threshold)).max(last * (1.0 - rule.factor_threshold))
    }

    /// Returns the direction without and with weight decay.
    fn directions(&self, tensor: usize) -> (Vec<f64>, Vec<f64>) {
        let moments = self.m[tensor].iter().zip(&self.v[tensor]);
        let preliminary: Vec<f64> = moments.map(|(m, v)| m / (v.sqrt() + self.rule.eps)).collect();
        let decayed = preliminary.iter().zip(&self.params[tensor]);
        let whole = decayed.map(|(d, p)| d + self.rule.weight_decay * p).collect();
        (preliminary, whole)
    }

    fn descend(&mut self, tensor: usize, rate: f64, direction: &[f64]) {
        for (p, d) in self.params[tensor].iter_mut().zip(direction) {
            *p -= rate * d;
        }
    }
}
