//! 1-bit LAMB in its compression stage: the element-wise part, and the factor of a tensor.
//!
//! Main types: [`FrozenLambStep`], which computes the moments and the direction from the averaged
//! momentum, and [`FactorRule`], which determines the length of the step. Source: Li et al. 2021,
//! "1-bit LAMB: Communication Efficient Large-Scale Large-Batch Training with LAMB's Convergence
//! Speed", in the form of DeepSpeed's `runtime/fp16/onebit/lamb.py`.
//!
//! ```text
//! g         = (momentum - beta1 * m) / (1 - beta1)      the gradient, reconstructed
//! fresh     = beta2 * fresh + (1 - beta2) * g^2         a second moment that is not frozen
//! m         = momentum
//! direction = m / (sqrt(v) + eps) + weight_decay * p    v is frozen
//! factor    = max (sqrt(v) + eps) / (sqrt(fresh) + eps), limited
//! p         = p - lr * trust_ratio * factor * direction
//! ```
//!
//! The trust ratio is frozen too. The factor adjusts it to the change of the second moment since
//! the freeze. There is no bias correction.

use crate::blocks::{check_lengths, each_block, vectorized};
use crate::elementwise::elementwise;
use crate::norm::pairwise;

/// Hyper-parameters of LAMB's direction with a frozen second moment.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FrozenLamb {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the fresh second moment.
    pub beta2: f64,
    /// Added to the square root of the second moment.
    pub eps: f64,
    /// The weight decay: the factor of the parameter in the direction.
    pub weight_decay: f64,
}

/// The scalars of one step, computed in `f64` and rounded once.
///
/// The averaged momentum is passed as the gradient and becomes the first moment. The step updates
/// the fresh second moment and overwrites the direction. The frozen second moment and the parameter
/// do not change.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FrozenLambStep {
    /// The decay of the first moment.
    beta1: f32,
    /// `1 - beta1`.
    gain1: f32,
    /// The decay of the fresh second moment.
    beta2: f32,
    /// `1 - beta2`.
    gain2: f32,
    /// Added to the square root of the frozen second moment.
    eps: f32,
    /// The weight decay, a part of the direction.
    decay: f32,
}

impl FrozenLambStep {
    /// Returns the step, which does not depend on the step number.
    pub fn new(rule: &FrozenLamb) -> Self {
        Self {
            beta1: rule.beta1 as f32,
            gain1: (1.0 - rule.beta1) as f32,
            beta2: rule.beta2 as f32,
            gain2: (1.0 - rule.beta2) as f32,
            eps: rule.eps as f32,
            decay: rule.weight_decay as f32,
        }
    }
}

//= deepspeed 0.19.6 runtime/fp16/onebit/lamb.py OnebitLamb.step
elementwise! {
    impl Elementwise<4> for FrozenLambStep {
        name: "1-bit lamb",
        scalars: [beta1, gain1, beta2, gain2, eps, decay],
        |p, momentum, [m, v, fresh, direction]| -> [m, fresh, direction] {
            // The gradient is a difference of similar numbers, so its relative error is larger than
            // for other terms. Only the fresh second moment depends on it, and the threshold of the
            // factor limits its effect.
            let gradient = (momentum - m * beta1) / gain1;
            let fresh = fresh * beta2 + gain2 * gradient * gradient;
            let m = momentum;
            let direction = momentum / (f32::sqrt(v) + eps) + decay * p;
        }
    }
}

/// The quantities of a complete tensor that determine its factor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FrozenLambSums {
    /// The norm of the direction without weight decay.
    pub undecayed_norm: f64,
    /// The norm of the direction.
    pub direction_norm: f64,
    /// The largest `(sqrt(v) + eps) / (sqrt(fresh) + eps)` of the elements whose `v` is not 0; 1 if
    /// there are no such elements.
    pub largest_quotient: f64,
}

/// Returns the quantities that determine the factor of a tensor, after its [`FrozenLambStep`].
/// `eps` must be the same as in the step. The result is bitwise identical for every number of
/// threads.
///
/// # Panics
/// Panics if the slices differ in length.
pub fn frozen_lamb_sums(eps: f64, [m, v, fresh, direction]: [&[f32]; 4]) -> FrozenLambSums {
    let others = [("v", v.len()), ("fresh", fresh.len()), ("direction", direction.len())];
    check_lengths("1-bit lamb", ("m", m.len()), &others);
    let eps = eps as f32;
    let sums = each_block(m.len(), |block| {
        let arrays = [m, v, fresh, direction].map(|array| &array[block.clone()]);
        vectorized!(block_sums(eps, arrays))
    });
    let sum = |square: fn(&(f64, f64, f32)) -> f64| {
        pairwise(&sums.iter().map(square).collect::<Vec<_>>()).sqrt()
    };
    let largest = sums.iter().map(|sums| f64::from(sums.2)).fold(0.0, f64::max);
    FrozenLambSums {
        undecayed_norm: sum(|sums| sums.0),
        direction_norm: sum(|sums| sums.1),
        // Quotients are greater than 0, so 0 means that every `v` is 0.
        largest_quotient: if largest == 0.0 { 1.0 } else { largest },
    }
}

/// Returns the sums of squares of the direction without and with weight decay, and the largest
/// quotient (0 if every `v` is 0).
#[inline(always)]
fn block_sums(eps: f32, [m, v, fresh, direction]: [&[f32]; 4]) -> (f64, f64, f32) {
    let (mut undecayed, mut decayed, mut largest) = (0.0, 0.0, 0.0_f32);
    for (((m, v), fresh), direction) in m.iter().zip(v).zip(fresh).zip(direction) {
        let denominator = v.sqrt() + eps;
        undecayed += f64::from(m / denominator).powi(2);
        decayed += f64::from(*direction).powi(2);
        let quotient = denominator / (fresh.sqrt() + eps);
        largest = if *v != 0.0 { largest.max(quotient) } else { largest };
    }
    (undecayed, decayed, largest)
}

/// The rule that determines the factor of a tensor from its sums.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FactorRule {
    /// The weight decay: the factor of the parameter in the direction.
    pub weight_decay: f64,
    /// The smallest and the largest factor.
    pub bounds: [f64; 2],
    /// The maximum relative change of a factor from one step to the next.
    pub threshold: f64,
}

impl FactorRule {
    //= deepspeed 0.19.6 runtime/fp16/onebit/lamb.py OnebitLamb factor
    /// Returns the factor by which the frozen trust ratio is multiplied. `last` is the factor of
    /// the previous step.
    ///
    /// The largest quotient applies to the part of the direction that is not weight decay. The
    /// result is clamped to the bounds, then to the threshold around `last`.
    pub fn factor(&self, sums: FrozenLambSums, last: f64) -> f64 {
        let mut factor = sums.largest_quotient;
        if self.weight_decay > 0.0 {
            // A direction of norm 0 makes the quotient NaN, and `min` replaces NaN by 1.
            let part = (sums.undecayed_norm / sums.direction_norm).min(1.0);
            factor = factor * part + (1.0 - part);
        }
        let [smallest, largest] = self.bounds;
        let factor = factor.min(largest).max(smallest);
        factor.min(last * (1.0 + self.threshold)).max(last * (1.0 - self.threshold))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{LENGTHS, follow, in_pool, noise, squares, strong_noise, update};

    /// Computes moments and direction of one step of 1-bit LAMB (Li et al. 2021) in DeepSpeed's
    /// form.
    ///
    /// `g = (momentum - beta1 * m) / (1 - beta1)`, `fresh = beta2 * fresh + (1 - beta2) * g^2`,
    /// `m = momentum` and `direction = m / (sqrt(v) + eps) + weight_decay * param`.
    fn frozen_lamb_reference(
        rule: &FrozenLamb,
        param: &[f64],
        momentum: &[f64],
        [m, fresh, direction]: [&mut [f64]; 3],
        v: &[f64],
    ) {
        let FrozenLamb { beta1, beta2, eps, weight_decay } = *rule;
        for i in 0..param.len() {
            let gradient = (momentum[i] - beta1 * m[i]) / (1.0 - beta1);
            fresh[i] = beta2 * fresh[i] + (1.0 - beta2) * gradient * gradient;
            m[i] = momentum[i];
            direction[i] = m[i] / (v[i].sqrt() + eps) + weight_decay * param[i];
        }
    }

    const RULE: FrozenLamb = FrozenLamb { beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.1 };

    //= deepspeed 0.19.6 runtime/fp16/onebit/lamb.py OnebitLamb.step
    #[test]
    fn by_hand() {
        // g = (1 - .5 * 4) / .5 = -2, fresh = .75 * 4 + .25 * 4.
        let rule = FrozenLamb { beta1: 0.5, beta2: 0.75, eps: 1.0, weight_decay: 0.5 };
        let (mut m, mut v, mut fresh, mut direction) = ([4.0], [9.0], [4.0], [7.0]);
        let states = &mut [&mut m[..], &mut v, &mut fresh, &mut direction];
        let mut param = [6.0];
        update(FrozenLambStep::new(&rule), 0.5, &mut param, &[2.0], states);
        assert_eq!((param, m, v, fresh, direction), ([6.0], [1.0], [9.0], [4.0], [3.25]));
        let sums = frozen_lamb_sums(1.0, [&m, &v, &fresh, &direction]);
        let expected = FrozenLambSums {
            undecayed_norm: 0.25,
            direction_norm: 3.25,
            largest_quotient: f64::from(4.0_f32 / 3.0),
        };
        assert_eq!(sums, expected);
    }

    //= deepspeed 0.19.6 runtime/fp16/onebit/lamb.py OnebitLamb factor
    #[test]
    fn factors_are_clamped_twice() {
        let sums = |undecayed_norm, direction_norm, largest_quotient| FrozenLambSums {
            undecayed_norm,
            direction_norm,
            largest_quotient,
        };
        let rule = FactorRule { weight_decay: 0.1, bounds: [0.5, 4.0], threshold: 0.25 };
        // Half of the direction is weight decay.
        assert_eq!(rule.factor(sums(1.0, 2.0, 1.25), 1.0), 1.125);
        assert_eq!(rule.factor(sums(3.0, 2.0, 1.25), 1.0), 1.25);
        assert_eq!(rule.factor(sums(0.0, 0.0, 0.875), 1.0), 0.875);
        assert_eq!(rule.factor(sums(1.0, 1.0, 9.0), 1.0), 1.25);
        assert_eq!(rule.factor(sums(1.0, 1.0, 9.0), 3.75), 4.0);
        assert_eq!(rule.factor(sums(1.0, 1.0, 0.1), 1.0), 0.75);
        assert_eq!(rule.factor(sums(1.0, 1.0, 0.1), 0.5625), 0.5);
        let rule = FactorRule { weight_decay: 0.0, ..rule };
        assert_eq!(rule.factor(sums(1.0, 2.0, 1.125), 1.0), 1.125);
    }

    #[test]
    fn fused_follows_the_f64_reference_at_every_size() {
        for len in LENGTHS {
            let (param, states) = follow(
                [noise(len, 3), squares(len, 2), squares(len, 4), vec![0.0; len]],
                (1.0, [11, 12, 13].map(|seed| strong_noise(len, seed))),
                |_| FrozenLambStep::new(&RULE),
                |_, param, momentum, [m, v, fresh, direction]| {
                    frozen_lamb_reference(&RULE, param, momentum, [m, fresh, direction], v);
                },
            );
            assert!(param.found == noise(len, 1), "the parameter stays");
            assert!(states[1].found == squares(len, 2), "the frozen second moment stays");
            // Absolute: a gradient of up to 20 has an error of ten times a rounding of the
            // momentum, 1e-6. Its square has an error of 4e-5, which is multiplied by 1e-3. The
            // direction is a quotient of numbers near 1.
            states.iter().for_each(|state| state.is_close(2e-6, 1e-6));
        }
    }

    #[test]
    fn sums_follow_a_plain_loop_and_skip_dead_elements() {
        for len in LENGTHS {
            let (m, mut v, fresh) = (noise(len, 1), squares(len, 2), squares(len, 3));
            let direction = noise(len, 4);
            // The quotient of this element would be by far the largest if the element were live.
            if len > 1 {
                v[1] = 0.0;
            }
            let run =
                |threads| in_pool(threads, || frozen_lamb_sums(1e-3, [&m, &v, &fresh, &direction]));
            let sums = run(1);
            assert_eq!(sums, run(3));
            let (mut undecayed, mut decayed, mut largest) = (0.0, 0.0, 0.0_f64);
            for i in 0..len {
                let denominator = f64::from(v[i]).sqrt() + 1e-3;
                undecayed += (f64::from(m[i]) / denominator).powi(2);
                decayed += f64::from(direction[i]).powi(2);
                if v[i] != 0.0 {
                    largest = largest.max(denominator / (f64::from(fresh[i]).sqrt() + 1e-3));
                }
            }
            let largest = if largest == 0.0 { 1.0 } else { largest };
            // Three roundings of 6e-8 each.
            for (found, expected) in [
                (sums.undecayed_norm, undecayed.sqrt()),
                (sums.direction_norm, decayed.sqrt()),
                (sums.largest_quotient, largest),
            ] {
                assert!((found - expected).abs() <= 3e-7 * expected, "{found} {expected}");
            }
        }
    }
}
