//! The element-wise parts of 1-bit Adam.
//!
//! Main types: [`LocalMomentumStep`], which computes a rank's momentum from its own gradient, and
//! [`FrozenAdamStep`], which updates the parameter along the averaged momentum. Between the two
//! steps, the ranks exchange the momentum compressed to one bit per element
//! ([`compress`](crate::compress)). Source: Tang et al. 2021, "1-bit Adam: Communication Efficient
//! Large-Scale Training with Adam's Convergence Speed", in the form of DeepSpeed's
//! `runtime/fp16/onebit/adam.py`.
//!
//! ```text
//! each rank    momentum = beta1 * m + (1 - beta1) * grad      LocalMomentumStep
//! exchange     m = mean over ranks of compress(momentum)
//! each rank    p = p - lr * (m / (sqrt(v) + eps) + weight_decay * p)     FrozenAdamStep
//! ```
//!
//! The second moment is frozen when compression begins. There is no bias correction.

use crate::elementwise::elementwise;

/// Hyper-parameters of Adam with a frozen second moment.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FrozenAdam {
    /// The learning rate of this step.
    pub lr: f64,
    /// The decay of the first moment. It is 0 for 1-bit Adam, whose averaged momentum replaces the
    /// first moment.
    pub beta1: f64,
    /// Added to the square root of the second moment.
    pub eps: f64,
    /// The weight decay: the factor of the parameter in the direction. The moments do not include
    /// it.
    pub weight_decay: f64,
}

/// The scalars for the momentum of a rank's own gradient, rounded from `f64` once.
///
/// The step overwrites the local momentum, its third array. The moments and the parameter do not
/// change.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LocalMomentumStep {
    /// The decay of the first moment.
    beta1: f32,
    /// `1 - beta1`.
    gain: f32,
}

impl LocalMomentumStep {
    /// Returns a step with `beta1` as the decay of the first moment.
    pub fn new(beta1: f64) -> Self {
        Self { beta1: beta1 as f32, gain: (1.0 - beta1) as f32 }
    }
}

//= deepspeed 0.19.6 runtime/fp16/onebit/adam.py OnebitAdam.step
// The first moment is the averaged momentum of the previous step, which is the same on all ranks.
elementwise! {
    impl Elementwise<3> for LocalMomentumStep {
        name: "1-bit adam",
        scalars: [beta1, gain],
        |p, g, [m, v, momentum]| -> [momentum] {
            let momentum = m * beta1 + gain * g;
        }
    }
}

/// The scalars of one update with a frozen second moment, rounded from `f64` once.
///
/// The average over all ranks is passed as the gradient: for 1-bit Adam the averaged momentum,
/// which becomes the first moment, and for 0/1 Adam the averaged gradient.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FrozenAdamStep {
    /// The learning rate.
    lr: f32,
    beta1: f32,
    /// `1 - beta1`.
    gain: f32,
    /// Added to the square root of the second moment.
    eps: f32,
    /// The weight decay, a part of the direction.
    decay: f32,
}

impl FrozenAdamStep {
    /// Returns the step, which does not depend on the step number.
    pub fn new(rule: &FrozenAdam) -> Self {
        Self {
            lr: rule.lr as f32,
            beta1: rule.beta1 as f32,
            gain: (1.0 - rule.beta1) as f32,
            eps: rule.eps as f32,
            decay: rule.weight_decay as f32,
        }
    }
}

//= deepspeed 0.19.6 runtime/fp16/onebit/adam.py OnebitAdam.step
// An element whose moments are 0 only decays.
elementwise! {
    impl Elementwise<2> for FrozenAdamStep {
        name: "1-bit adam",
        scalars: [lr, eps, decay, beta1, gain],
        |p, momentum, [m, v]| -> p, [m] {
            let m = m * beta1 + gain * momentum;
            let p = p - lr * (m / (f32::sqrt(v) + eps) + decay * p);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{LENGTHS, follow, noise, squares, update};

    /// Computes `momentum = beta1 * m + (1 - beta1) * grad`. The gradient must already be unscaled.
    fn local_momentum_reference(beta1: f64, m: &[f64], grad: &[f64], momentum: &mut [f64]) {
        for i in 0..m.len() {
            momentum[i] = beta1 * m[i] + (1.0 - beta1) * grad[i];
        }
    }

    /// Computes `m = beta1 * m + (1 - beta1) * momentum`, then
    /// `param -= lr * (m / (sqrt(v) + eps) + weight_decay * param)`.
    fn frozen_adam_reference(
        rule: &FrozenAdam,
        param: &mut [f64],
        momentum: &[f64],
        m: &mut [f64],
        v: &[f64],
    ) {
        let FrozenAdam { lr, beta1, eps, weight_decay } = *rule;
        for i in 0..param.len() {
            m[i] = beta1 * m[i] + (1.0 - beta1) * momentum[i];
            param[i] -= lr * (m[i] / (v[i].sqrt() + eps) + weight_decay * param[i]);
        }
    }

    const RULE: FrozenAdam = FrozenAdam { lr: 0.01, beta1: 0.0, eps: 1e-8, weight_decay: 0.1 };

    //= deepspeed 0.19.6 runtime/fp16/onebit/adam.py OnebitAdam.step
    #[test]
    fn references_by_hand() {
        let mut momentum = [9.0_f64];
        local_momentum_reference(0.75, &[2.0], &[-4.0], &mut momentum);
        assert_eq!(momentum, [0.5]);
        // 2 - .5 * (1 / (sqrt(.0625) + .25) + .5 * 2)
        let rule = FrozenAdam { lr: 0.5, beta1: 0.0, eps: 0.25, weight_decay: 0.5 };
        let (mut p, mut m) = ([2.0_f64], [7.0]);
        frozen_adam_reference(&rule, &mut p, &[1.0], &mut m, &[0.0625]);
        assert_eq!((p, m), ([0.5], [1.0]));
        // m = .75 * 1 + .25 * -1 = .5, and .5 - .5 * (.5 / .5 + .5 * .5)
        let rule = FrozenAdam { beta1: 0.75, ..rule };
        frozen_adam_reference(&rule, &mut p, &[-1.0], &mut m, &[0.0625]);
        assert_eq!((p, m), ([-0.125], [0.5]));
    }

    #[test]
    fn the_local_momentum_follows_the_f64_reference_at_every_size() {
        for len in LENGTHS {
            let (param, [m, v, momentum]) = follow(
                [noise(len, 2), noise(len, 3), vec![f32::NAN; len]],
                (0.25, [noise(len, 4)]),
                |_| LocalMomentumStep::new(0.9),
                |_, _, grad, [m, _, momentum]| local_momentum_reference(0.9, m, grad, momentum),
            );
            assert!(param.found == noise(len, 1), "the parameter stays");
            assert!(m.found == noise(len, 2) && v.found == noise(len, 3), "the moments stay");
            // Five roundings of 2^-24 of numbers below 1: two scalars, two products and the sum.
            momentum.is_close(0.0, 3e-7);
        }
    }

    #[test]
    fn the_update_follows_the_f64_reference_at_every_size() {
        for len in LENGTHS {
            let (param, [m, v]) = follow(
                [noise(len, 2), squares(len, 3)],
                (0.25, [5, 6, 7].map(|seed| noise(len, seed))),
                |_| FrozenAdamStep::new(&RULE),
                |_, param, momentum, [m, v]| frozen_adam_reference(&RULE, param, momentum, m, v),
            );
            assert!(v.found == squares(len, 3), "the second moment stays");
            // A quarter of a number is exact.
            m.is_close(0.0, 0.0);
            // Three updates below .01, with a dozen roundings each, and three roundings of a
            // parameter below 1.1.
            param.is_close(2e-7, 1e-7);
        }
    }

    #[test]
    fn a_gradient_is_averaged_into_the_first_moment() {
        let rule = FrozenAdam { beta1: 0.9, ..RULE };
        for len in LENGTHS {
            let (param, [m, _]) = follow(
                [noise(len, 2), squares(len, 3)],
                (0.25, [noise(len, 5)]),
                |_| FrozenAdamStep::new(&rule),
                |_, param, gradient, [m, v]| frozen_adam_reference(&rule, param, gradient, m, v),
            );
            // Five roundings of 2^-24 of numbers below 1, as for a local momentum.
            m.is_close(0.0, 3e-7);
            param.is_close(2e-7, 1e-7);
        }
    }

    #[test]
    fn elements_without_gradient_only_decay() {
        let (mut p, mut m, mut v) = ([2.0_f32], [0.0], [0.0]);
        let rule = FrozenAdam { lr: 0.5, beta1: 0.0, eps: 1e-8, weight_decay: 0.25 };
        update(FrozenAdamStep::new(&rule), 1.0, &mut p, &[0.0], &mut [&mut m, &mut v]);
        assert_eq!((p, m, v), ([1.75], [0.0], [0.0]));
    }
}
