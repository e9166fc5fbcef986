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

use crate::blocks::check_lengths;
#[cfg(feature = "cube")]
use crate::cube::{ElementKernel, write};
use crate::elementwise::Elementwise;
use crate::real::Real;
#[cfg(feature = "cube")]
use cubecl::prelude::*;

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

/// Computes `momentum = beta1 * m + (1 - beta1) * grad`. The gradient must already be unscaled.
///
/// # Panics
///
/// Panics if the slices differ in length.
pub fn local_momentum_reference<R: Real>(beta1: f64, m: &[R], grad: &[R], momentum: &mut [R]) {
    let others = [("grad", grad.len()), ("momentum", momentum.len())];
    check_lengths("1-bit adam", ("m", m.len()), &others);
    let beta1 = R::from_f64(beta1);
    for i in 0..m.len() {
        momentum[i] = beta1 * m[i] + (R::ONE - beta1) * grad[i];
    }
}

//= deepspeed 0.19.6 runtime/fp16/onebit/adam.py OnebitAdam.step
/// Computes `m = beta1 * m + (1 - beta1) * momentum`, then `param -= lr * (m / (sqrt(v) + eps) +
/// weight_decay * param)`.
///
/// # Panics
///
/// Panics if the slices differ in length.
pub fn frozen_adam_reference<R: Real>(
    rule: &FrozenAdam,
    param: &mut [R],
    momentum: &[R],
    m: &mut [R],
    v: &[R],
) {
    let others = [("momentum", momentum.len()), ("m", m.len()), ("v", v.len())];
    check_lengths("1-bit adam", ("param", param.len()), &others);
    let [lr, beta1, eps, decay] =
        [rule.lr, rule.beta1, rule.eps, rule.weight_decay].map(|scalar| R::from_f64(scalar));
    for i in 0..param.len() {
        m[i] = beta1 * m[i] + (R::ONE - beta1) * momentum[i];
        param[i] = param[i] - lr * (m[i] / (v[i].sqrt() + eps) + decay * param[i]);
    }
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

impl Elementwise<3> for LocalMomentumStep {
    const NAME: &'static str = "1-bit adam";
    const ARRAYS: [&'static str; 3] = ["m", "v", "momentum"];

    #[inline(always)]
    fn tile(self, grad_scale: f32, _: &mut [f32], grad: &[f32], [m, _, momentum]: [&mut [f32]; 3]) {
        local_momentum_tile((self, grad_scale), grad, m, momentum);
    }

    /// Returns the scalars in the order in which the device function indexes them.
    #[cfg(feature = "cube")]
    fn scalars(&self) -> Vec<f32> {
        vec![self.beta1, self.gain]
    }
}

//= deepspeed 0.19.6 runtime/fp16/onebit/adam.py OnebitAdam.step
/// Computes the momentum of a tile. The first moment is the averaged momentum of the previous step,
/// which is the same on all ranks.
#[inline(always)]
fn local_momentum_tile(
    (step, grad_scale): (LocalMomentumStep, f32),
    grad: &[f32],
    m: &[f32],
    momentum: &mut [f32],
) {
    for ((g, m), momentum) in grad.iter().zip(m).zip(momentum) {
        *momentum = *m * step.beta1 + step.gain * (*g * grad_scale);
    }
}

/// Computes the local momentum of one element on a device. `scalars` are `beta1` and `gain`.
#[cfg(feature = "cube")]
#[cube]
impl ElementKernel for LocalMomentumStep {
    fn element(
        i: usize,
        scalars: &Array<f32>,
        grad: f32,
        _param: &mut Array<f32>,
        states: &mut Sequence<Array<f32>>,
    ) {
        let momentum = states[0][i] * scalars[0] + scalars[1] * grad;
        write(states, 2usize, i, momentum);
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

impl Elementwise<2> for FrozenAdamStep {
    const NAME: &'static str = "1-bit adam";
    const ARRAYS: [&'static str; 2] = ["m", "v"];

    #[inline(always)]
    fn tile(self, grad_scale: f32, param: &mut [f32], momentum: &[f32], [m, v]: [&mut [f32]; 2]) {
        frozen_tile((self, grad_scale), param, momentum, m, v);
    }

    /// Returns the scalars in the order in which the device function indexes them.
    #[cfg(feature = "cube")]
    fn scalars(&self) -> Vec<f32> {
        vec![self.lr, self.eps, self.decay, self.beta1, self.gain]
    }
}

/// Updates a tile of the first moment and the parameter. An element whose moments are 0 only
/// decays.
#[inline(always)]
fn frozen_tile(
    (step, grad_scale): (FrozenAdamStep, f32),
    param: &mut [f32],
    momentum: &[f32],
    m: &mut [f32],
    v: &[f32],
) {
    for (((p, momentum), m), v) in param.iter_mut().zip(momentum).zip(m).zip(v) {
        *m = *m * step.beta1 + step.gain * (*momentum * grad_scale);
        *p -= step.lr * (*m / (v.sqrt() + step.eps) + step.decay * *p);
    }
}

/// Updates one element on a device.
///
/// | Index of `scalars` | Value |
/// |---|---|
/// | 0 | `lr` |
/// | 1 | `eps` |
/// | 2 | `decay` |
/// | 3 | `beta1` |
/// | 4 | `gain` |
#[cfg(feature = "cube")]
#[cube]
impl ElementKernel for FrozenAdamStep {
    fn element(
        i: usize,
        scalars: &Array<f32>,
        momentum: f32,
        param: &mut Array<f32>,
        states: &mut Sequence<Array<f32>>,
    ) {
        let m = states[0][i] * scalars[3] + scalars[4] * momentum;
        write(states, 0usize, i, m);
        let along = m / (f32::sqrt(states[1][i]) + scalars[1]);
        param[i] = param[i] - scalars[0] * (along + scalars[2] * param[i]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blocks::{BLOCK, PARALLEL_FROM};
    use crate::testing::{assert_close, in_pool, noise, strong_noise, update};

    const RULE: FrozenAdam = FrozenAdam { lr: 0.01, beta1: 0.0, eps: 1e-8, weight_decay: 0.1 };
    const LENGTHS: [usize; 7] = [0, 1, 7, 33, BLOCK + 1, PARALLEL_FROM, 1_000_007];

    fn widened(values: &[f32], scale: f64) -> Vec<f64> {
        values.iter().map(|x| f64::from(*x) * scale).collect()
    }

    fn narrowed(values: &[f64]) -> Vec<f32> {
        values.iter().map(|x| *x as f32).collect()
    }

    /// Returns squares of numbers of magnitude 0.5 to 1.5.
    fn squares(len: usize) -> Vec<f32> {
        strong_noise(len, 3).iter().map(|x| x * x).collect()
    }

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
            let (mut param, mut m, mut v) = (noise(len, 1), noise(len, 2), noise(len, 3));
            let (mut momentum, mut momentum64) = (vec![f32::NAN; len], vec![f64::NAN; len]);
            let grad = noise(len, 4);
            let states = &mut [&mut m[..], &mut v, &mut momentum];
            update(LocalMomentumStep::new(0.9), 0.25, &mut param, &grad, states);
            local_momentum_reference(
                0.9,
                &widened(&m, 1.0),
                &widened(&grad, 0.25),
                &mut momentum64,
            );
            assert!(param == noise(len, 1) && m == noise(len, 2) && v == noise(len, 3));
            // Five roundings of 2^-24 of numbers below 1: two scalars, two products and the sum.
            assert_close(&momentum, &narrowed(&momentum64), 0.0, 3e-7);
        }
    }

    #[test]
    fn the_update_follows_the_f64_reference_at_every_size() {
        for len in LENGTHS {
            let (mut param, mut m, mut v) = (noise(len, 1), noise(len, 2), squares(len));
            let (mut param64, mut m64) = (widened(&param, 1.0), widened(&m, 1.0));
            for t in 0..3 {
                let momentum = noise(len, 5 + t);
                update(
                    FrozenAdamStep::new(&RULE),
                    0.25,
                    &mut param,
                    &momentum,
                    &mut [&mut m, &mut v],
                );
                let momentum64 = widened(&momentum, 0.25);
                frozen_adam_reference(
                    &RULE,
                    &mut param64,
                    &momentum64,
                    &mut m64,
                    &widened(&v, 1.0),
                );
            }
            assert!(v == squares(len), "the second moment stays");
            assert!(m == narrowed(&m64), "a quarter of a number is exact");
            // Three updates below .01, with a dozen roundings each, and three roundings of a parameter
            // below 1.1.
            assert_close(&param, &narrowed(&param64), 2e-7, 1e-7);
        }
    }

    #[test]
    fn a_gradient_is_averaged_into_the_first_moment() {
        let rule = FrozenAdam { beta1: 0.9, ..RULE };
        for len in LENGTHS {
            let (mut param, mut m, mut v) = (noise(len, 1), noise(len, 2), squares(len));
            let (mut param64, mut m64) = (widened(&param, 1.0), widened(&m, 1.0));
            let gradient = noise(len, 5);
            let states = &mut [&mut m[..], &mut v];
            update(FrozenAdamStep::new(&rule), 0.25, &mut param, &gradient, states);
            let gradient = widened(&gradient, 0.25);
            frozen_adam_reference(&rule, &mut param64, &gradient, &mut m64, &widened(&v, 1.0));
            // Five roundings of 2^-24 of numbers below 1, as for a local momentum.
            assert_close(&m, &narrowed(&m64), 0.0, 3e-7);
            assert_close(&param, &narrowed(&param64), 2e-7, 1e-7);
        }
    }

    #[test]
    fn elements_without_gradient_only_decay() {
        let (mut p, mut m, mut v) = ([2.0_f32], [0.0], [0.0]);
        let rule = FrozenAdam { lr: 0.5, beta1: 0.0, eps: 1e-8, weight_decay: 0.25 };
        update(FrozenAdamStep::new(&rule), 1.0, &mut p, &[0.0], &mut [&mut m, &mut v]);
        assert_eq!((p, m, v), ([1.75], [0.0], [0.0]));
    }

    #[test]
    fn the_number_of_threads_changes_no_bit() {
        let len = 2 * PARALLEL_FROM + 5;
        let run = |threads| {
            in_pool(threads, || {
                let (mut p, mut m, mut v) = (noise(len, 1), noise(len, 2), squares(len));
                let mut momentum = vec![0.0; len];
                let states = &mut [&mut m[..], &mut v, &mut momentum];
                update(LocalMomentumStep::new(0.9), 0.5, &mut p, &noise(len, 3), states);
                update(FrozenAdamStep::new(&RULE), 1.0, &mut p, &momentum, &mut [&mut m, &mut v]);
                (p, m, momentum)
            })
        };
        let one = run(1);
        assert!(one == run(2) && one == run(3));
    }
}
