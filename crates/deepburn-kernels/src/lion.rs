//! Lion: a step of constant size along the sign of an interpolated momentum.
//!
//! Main type: [`LionStep`]. Source: Chen et al. 2023, "Symbolic Discovery of Optimization
//! Algorithms", algorithm 2.
//!
//! ```text
//! c = beta1 * m + (1 - beta1) * grad
//! p = p - lr * (sign(c) + weight_decay * p)       sign(0) = 0
//! m = beta2 * m + (1 - beta2) * grad
//! ```
//!
//! The state is one f32 array, the momentum. There is no bias correction.
//!
//! A step moves every element by `lr`, independently of the size of its gradient. Learning rates
//! are therefore 3 to 10 times smaller than for Adam, and weight decay is larger by the same factor
//! (section 5 of the paper).

use crate::blocks::check_lengths;
use crate::elementwise::elementwise;

/// Hyper-parameters of Lion.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Lion {
    /// Learning rate of this step.
    pub lr: f64,
    /// Weight of the momentum in the direction.
    pub beta1: f64,
    /// Decay of the momentum.
    pub beta2: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
}

//= Chen et al. 2023 algorithm 2 Lion
/// Runs one Lion step (Chen et al. 2023, algorithm 2). The gradient must already be unscaled.
///
/// # Panics
/// Panics if the slices differ in length.
pub fn lion_reference(rule: &Lion, param: &mut [f64], grad: &[f64], m: &mut [f64]) {
    check_lengths("lion", ("param", param.len()), &[("grad", grad.len()), ("m", m.len())]);
    let Lion { lr, beta1, beta2, weight_decay } = *rule;
    for i in 0..param.len() {
        let c = beta1 * m[i] + (1.0 - beta1) * grad[i];
        let sign = f64::from(i8::from(c > 0.0) - i8::from(c < 0.0));
        param[i] -= lr * (sign + weight_decay * param[i]);
        m[i] = beta2 * m[i] + (1.0 - beta2) * grad[i];
    }
}

/// The scalars of one step, computed in `f64` and narrowed once.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LionStep {
    /// The learning rate, the size of every step.
    lr: f32,
    /// The weight of the momentum in the direction.
    beta1: f32,
    /// `1 - beta1`.
    gain1: f32,
    /// The decay of the momentum.
    beta2: f32,
    /// `1 - beta2`.
    gain2: f32,
    /// `1 - lr * decay`.
    keep: f32,
}

impl LionStep {
    /// Returns the step. Lion has no bias correction, so the step does not depend on the step
    /// number.
    pub fn new(rule: &Lion) -> Self {
        Self {
            lr: rule.lr as f32,
            beta1: rule.beta1 as f32,
            gain1: (1.0 - rule.beta1) as f32,
            beta2: rule.beta2 as f32,
            gain2: (1.0 - rule.beta2) as f32,
            keep: (1.0 - rule.lr * rule.weight_decay) as f32,
        }
    }
}

//= Chen et al. 2023 algorithm 2 Lion
// The sign is computed with two selections instead of a branch, so the loop vectorizes. A direction
// of NaN is neither positive nor negative, so it does not move the parameter. The NaN stays visible
// in the momentum.
elementwise! {
    impl Elementwise<1> for LionStep {
        name: "lion",
        scalars: [lr, beta1, gain1, beta2, gain2, keep],
        |p, g, [m]| -> p, [m] {
            let c = m * beta1 + gain1 * g;
            let p = p * keep - only_if(c > 0.0, lr) + only_if(c < 0.0, lr);
            let m = m * beta2 + gain2 * g;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{LENGTHS, assert_close, noise, update};

    const RULE: Lion = Lion { lr: 0.01, beta1: 0.9, beta2: 0.99, weight_decay: 0.1 };

    //= Chen et al. 2023 algorithm 2 Lion
    #[test]
    fn reference_by_hand() {
        // c = .1 * .5 > 0: p = 1 - .01 * (1 + .1); m = .01 * .5. Then c = .9 * .005 - .1 * .25 < 0.
        let (mut p, mut m) = ([1.0_f64], [0.0]);
        lion_reference(&RULE, &mut p, &[0.5], &mut m);
        assert!((p[0] - 0.989).abs() < 1e-15 && (m[0] - 0.005).abs() < 1e-15);
        lion_reference(&RULE, &mut p, &[-0.25], &mut m);
        assert!((p[0] - (0.989 + 0.01 - 0.01 * 0.1 * 0.989)).abs() < 1e-15);
        assert!((m[0] - (0.99 * 0.005 - 0.01 * 0.25)).abs() < 1e-15);
    }

    #[test]
    fn a_zero_direction_only_decays() {
        let (mut p, mut m) = ([1.0_f32], [0.0_f32]);
        update(LionStep::new(&RULE), 1.0, &mut p, &[0.0], &mut [&mut m]);
        assert_eq!((p, m), ([0.999], [0.0]));
    }

    #[test]
    fn a_direction_of_nan_moves_no_parameter() {
        let (mut p, mut m) = ([1.0_f32], [0.5_f32]);
        update(LionStep::new(&RULE), 1.0, &mut p, &[f32::NAN], &mut [&mut m]);
        assert!(p == [0.999] && m[0].is_nan());
    }

    //= Chen et al. 2023 algorithm 2 Lion
    #[test]
    fn fused_follows_the_f64_reference_at_every_size() {
        let step = LionStep::new(&RULE);
        for len in LENGTHS {
            let (mut p, mut m) = (noise(len, 1), vec![0.0; len]);
            let mut p64 = p.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
            let mut m64 = vec![0.0; len];
            let mut near_zero = vec![false; len];
            for t in 1..=3 {
                let g = noise(len, 10 + t);
                let g64 = g.iter().map(|x| f64::from(*x) * 0.25).collect::<Vec<_>>();
                for i in 0..len {
                    near_zero[i] |= (0.9 * m64[i] + 0.1 * g64[i]).abs() < 1e-8;
                }
                update(step, 0.25, &mut p, &g, &mut [&mut m]);
                lion_reference(&RULE, &mut p64, &g64, &mut m64);
            }
            for i in 0..len {
                // Three roundings of numbers below 1; a direction within rounding of 0 may take
                // either sign, which moves the parameter by up to 2 lr a step.
                let tolerance = if near_zero[i] { 0.06 } else { 3e-7 };
                assert!((f64::from(p[i]) - p64[i]).abs() < tolerance, "element {i} of {len}");
            }
            let narrowed = m64.iter().map(|x| *x as f32).collect::<Vec<_>>();
            assert_close(&m, &narrowed, 1e-6, 1e-9);
        }
    }
}
