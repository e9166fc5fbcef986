//! Reference simulations of 1-bit Adam, 0/1 Adam and 1-bit LAMB in f64, for several ranks in one
//! process.
//!
//! Main types: [`one_bit_adam::OneBitAdam`], [`zero_one_adam::ZeroOneAdam`] and
//! [`one_bit_lamb::OneBitLamb`], each with a `step` on the gradients of all ranks,
//! `gradients[rank][tensor][element]`; and [`CompressedMean`], the mean over ranks with one bit per
//! element.
//!
//! They follow DeepSpeed's `runtime/fp16/onebit/{adam,zoadam,lamb}.py` and `runtime/comm/nccl.py`,
//! except for these faults, which all of them share:
//! - DeepSpeed's first call of `step` allocates states, counts as a step and drops the gradient.
//!   Here the first step trains and has time 1.
//! - DeepSpeed pads a vector to a multiple of `ranks * lcm(8, ranks)`. The zeros are also
//!   compressed, which makes the scale smaller, and their errors grow. Here padding is excluded.
//! - DeepSpeed compresses elements that never had a gradient, unless a mask excludes them. Here
//!   such elements are dead as long as their second moment is 0: nothing is sent for them, and
//!   their momentum is 0.

pub(crate) mod one_bit_adam;
pub(crate) mod one_bit_lamb;
pub(crate) mod zero_one_adam;

use std::ops::Range;

/// The mean of a vector over ranks with one bit per element, and its compression errors.
#[derive(Debug, Clone)]
pub(crate) struct CompressedMean {
    /// The compression error of each rank's vector.
    pub(crate) worker_errors: Vec<Vec<f64>>,
    /// The compression error of the mean. Each rank is the server of one chunk.
    pub(crate) server_error: Vec<f64>,
    /// The smallest sum whose sign was sent, relative to its scale. In f32, a sum near 0 may have
    /// the other sign.
    pub(crate) closest: f64,
}

impl CompressedMean {
    pub(crate) fn new(ranks: usize, len: usize) -> Self {
        Self {
            worker_errors: vec![vec![0.0; len]; ranks],
            server_error: vec![0.0; len],
            closest: f64::INFINITY,
        }
    }

    /// Resets the errors.
    pub(crate) fn reset(&mut self) {
        *self = Self::new(self.worker_errors.len(), self.server_error.len());
    }

    /// Returns the mean of the ranks' vectors, which is 0 for dead elements. A single rank does not
    /// compress.
    pub(crate) fn mean(&mut self, values: &[Vec<f64>], live: &[bool]) -> Vec<f64> {
        self.fused_mean(values, live, &[live.len()])
    }

    /// Returns the mean of several concatenated tensors of these lengths. A server has a chunk of
    /// each tensor, and one scale for all its chunks.
    pub(crate) fn fused_mean(
        &mut self,
        values: &[Vec<f64>],
        live: &[bool],
        lens: &[usize],
    ) -> Vec<f64> {
        let (ranks, len) = (values.len(), live.len());
        if ranks == 1 {
            return masked(&values[0], live);
        }
        let mut mean = vec![0.0; len];
        for (values, error) in values.iter().zip(&mut self.worker_errors) {
            let sent = compress(values, error, live, &mut self.closest);
            mean.iter_mut().zip(sent).for_each(|(mean, sent)| *mean += sent / ranks as f64);
        }
        for server in 0..ranks {
            let (mut elements, mut start) = (Vec::new(), 0);
            for len in lens {
                let chunk = chunks(*len, ranks).nth(server).unwrap();
                elements.extend(chunk.map(|i| start + i));
                start += len;
            }
            let of = |array: &[f64]| elements.iter().map(|i| array[*i]).collect::<Vec<_>>();
            let mut error = of(&self.server_error);
            let live: Vec<_> = elements.iter().map(|i| live[*i]).collect();
            let sent = compress(&of(&mean), &mut error, &live, &mut self.closest);
            for ((i, sent), error) in elements.iter().zip(sent).zip(error) {
                (mean[*i], self.server_error[*i]) = (sent, error);
            }
        }
        mean
    }
}

/// Returns the elements of each rank as a server. They form whole bytes of bits, and the last ranks
/// may have fewer elements or none.
fn chunks(len: usize, ranks: usize) -> impl Iterator<Item = Range<usize>> {
    let chunk = 8 * len.div_ceil(8).div_ceil(ranks);
    (0..ranks).map(move |rank| (rank * chunk).min(len)..((rank + 1) * chunk).min(len))
}

/// Returns the live elements of `values + error` as plus or minus their root mean square, and
/// stores the remainder in `error`.
fn compress(values: &[f64], error: &mut [f64], live: &[bool], closest: &mut f64) -> Vec<f64> {
    let sums: Vec<f64> =
        values.iter().zip(error.iter()).map(|(value, error)| value + error).collect();
    let sums = masked(&sums, live);
    let count = live.iter().filter(|live| **live).count();
    let scale = if count == 0 { 0.0 } else { norm(&sums) / (count as f64).sqrt() };
    let signs: Vec<f64> = sums.iter().map(|c| if *c >= 0.0 { scale } else { -scale }).collect();
    let sent = masked(&signs, live);
    let live_sums = sums.iter().zip(live).filter(|(c, live)| **live && **c != 0.0);
    *closest = live_sums.map(|(c, _)| c.abs() / scale).fold(*closest, f64::min);
    for i in 0..sums.len() {
        error[i] = sums[i] - sent[i];
    }
    sent
}

/// Returns the values, with 0 for dead elements.
fn masked(values: &[f64], live: &[bool]) -> Vec<f64> {
    values.iter().zip(live).map(|(value, live)| if *live { *value } else { 0.0 }).collect()
}

/// Returns the live elements, which are the elements that have ever had a gradient.
fn live_elements(second_moment: &[f64]) -> Vec<bool> {
    second_moment.iter().map(|v| *v != 0.0).collect()
}

fn norm(values: &[f64]) -> f64 {
    values.iter().map(|x| x * x).sum::<f64>().sqrt()
}

/// Returns the uncompressed mean over ranks of the gradient of one tensor.
fn mean_gradient(gradients: &[Vec<Vec<f64>>], tensor: usize) -> Vec<f64> {
    let len = gradients[0][tensor].len();
    let mean =
        |i| gradients.iter().map(|rank| rank[tensor][i]).sum::<f64>() / gradients.len() as f64;
    (0..len).map(mean).collect()
}

/// Returns `beta * average + (1 - beta) * values`.
fn moving_average(beta: f64, average: &[f64], values: &[f64]) -> Vec<f64> {
    average.iter().zip(values).map(|(a, x)| beta * a + (1.0 - beta) * x).collect()
}

fn squared(values: &[f64]) -> Vec<f64> {
    values.iter().map(|x| x * x).collect()
}

/// Returns a state of zeros for each tensor.
fn zeros_like(tensors: &[Vec<f64>]) -> Vec<Vec<f64>> {
    tensors.iter().map(|tensor| vec![0.0; tensor.len()]).collect()
}

#[cfg(test)]
mod tests {
    use super::one_bit_adam::{OneBitAdam, OneBitAdamRule};
    use super::one_bit_lamb::{OneBitLamb, OneBitLambRule};
    use super::zero_one_adam::{ZeroOneAdam, ZeroOneAdamRule};
    use super::*;

    const BETAS: [f64; 2] = [0.9, 0.99];
    /// The number of the last step before compression.
    const FREEZE: u64 = 5;

    /// Returns the gradients of two tensors for each of three ranks. Every fifth element has no
    /// gradient up to `FREEZE`.
    fn gradients(step: u64) -> Vec<Vec<Vec<f64>>> {
        let element = |rank: u64, tensor: u64, i: u64| {
            let dead = i.is_multiple_of(5) && step <= FREEZE;
            if dead {
                0.0
            } else {
                ((step * 31 + rank * 17 + tensor * 7 + i * 13) % 29) as f64 - 14.2
            }
        };
        let tensor = |rank, tensor, len| (0..len).map(|i| element(rank, tensor, i)).collect();
        (0..3).map(|rank| vec![tensor(rank, 0, 11), tensor(rank, 1, 50)]).collect()
    }

    fn simulations() -> (OneBitAdam, ZeroOneAdam, OneBitLamb) {
        let start = vec![vec![0.5; 11], vec![-0.25; 50]];
        let (betas, eps, weight_decay) = (BETAS, 1e-8, 0.0);
        let adam = OneBitAdamRule { betas, eps, weight_decay, freeze_step: FREEZE };
        let zero_one = ZeroOneAdamRule {
            betas,
            eps,
            weight_decay,
            var_freeze_step: FREEZE,
            var_update_scaler: 100,
            local_step_scaler: 2,
            local_step_clipper: 4,
        };
        let lamb = OneBitLambRule {
            betas,
            eps,
            weight_decay,
            freeze_step: FREEZE,
            max_coeff: 1.0,
            min_coeff: 1.0,
            coeff_beta: 0.9,
            factor_max: 4.0,
            factor_min: 0.5,
            factor_threshold: 0.1,
        };
        (
            OneBitAdam::new(adam, 3, start.clone()),
            ZeroOneAdam::new(zero_one, 3, start.clone()),
            OneBitLamb::new(lamb, 3, start),
        )
    }

    #[test]
    fn all_are_the_same_before_compression_without_their_own_factors() {
        let (mut adam, mut zero_one, mut lamb) = simulations();
        for step in 1..=FREEZE {
            adam.step(0.01, &gradients(step));
            zero_one.step(0.01, &gradients(step));
            lamb.step(0.01, &gradients(step));
        }
        assert!(zero_one.ranks.iter().all(|rank| rank.params == adam.params));
        assert_eq!(adam.params, lamb.params);
    }

    #[test]
    fn dead_elements_stay_and_ranks_agree_after_an_exchange() {
        let (mut adam, mut zero_one, mut lamb) = simulations();
        for step in 1..=50 {
            adam.step(0.01, &gradients(step));
            zero_one.step(0.01, &gradients(step));
            lamb.step(0.01, &gradients(step));
            // Ranks exchange in steps 6 and 7, then in every second step, and from step 10 on in
            // every fourth step.
            let exchanges = step < 8 || step % if step < 10 { 2 } else { 4 } == 0;
            let agree = zero_one.ranks.iter().all(|rank| rank.params == zero_one.common);
            assert_eq!(agree, exchanges, "{step}");
        }
        assert_eq!(zero_one.local_step_interval, 4);
        for params in [&adam.params, &zero_one.common, &lamb.params] {
            for (i, p) in params[1].iter().enumerate() {
                // LAMB moves in the warm-up alone: all ratios are 1, so that its frozen ones are 0.
                assert_eq!(*p == -0.25, i % 5 == 0, "{i}");
            }
        }
    }

    #[test]
    fn what_was_sent_and_the_last_errors_are_what_was_given() {
        let (mut exchange, live) = (CompressedMean::new(3, 50), vec![true; 50]);
        let (mut given, mut sent) = (vec![0.0; 50], vec![0.0; 50]);
        for step in FREEZE + 1..50 {
            let gradients = gradients(step);
            let own: Vec<_> = gradients.iter().map(|rank| rank[1].clone()).collect();
            let mean = exchange.mean(&own, &live);
            for i in 0..50 {
                given[i] += own.iter().map(|rank| rank[i]).sum::<f64>() / 3.0;
                sent[i] += mean[i];
            }
        }
        for i in 0..50 {
            let kept = exchange.worker_errors.iter().map(|error| error[i]).sum::<f64>() / 3.0;
            let rest = given[i] - sent[i] - kept - exchange.server_error[i];
            // The tolerance covers hundreds of roundings of numbers below 1000.
            assert!(rest.abs() < 1e-10, "{i}: {rest:e}");
        }
    }
}
