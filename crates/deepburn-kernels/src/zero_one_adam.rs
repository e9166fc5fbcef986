//! The element-wise parts of the local steps of 0/1 Adam.
//!
//! Main types: [`LocalAdamStep`], a step with only the rank's own gradient, and
//! [`LocalMovementStep`] and [`AgreedMovementStep`]. Between the latter two steps, the ranks
//! exchange their movements compressed to one bit per element ([`compress`](crate::compress)).
//! Source: Lu et al. 2022, "Maximizing Communication Efficiency for Large-scale Training via 0/1
//! Adam", in the form of DeepSpeed's `runtime/fp16/onebit/zoadam.py`.
//!
//! ```text
//!               step 1      step 2      step 3      step 4
//! rank 0        local       local       local       local movement -+
//! rank 1        local       local       local       local movement -+-> exchange -> agreed movement
//! parameters    common + moved, different on each rank              |   common, the same on all ranks
//!                                                                       moved = 0
//! ```
//!
//! Between two exchanges, ranks have different parameters. `common` is the parameter after the last
//! exchange, with weight decay applied, and `moved` is the movement that a rank has added since
//! then. `param = common + moved` holds exactly.
//!
//! With the frozen second moment `v` and `keep = 1 - lr * weight_decay`, the steps are:
//!
//! ```text
//! local       m        = beta1 * m + (1 - beta1) * grad               0 where v is 0
//!             common   = keep * common
//!             moved    = keep * moved - lr * m / (sqrt(v) + eps)
//!             param    = common + moved
//! movement    movement = moved * (sqrt(v) + eps)                      of the same local step
//! agreed      common   = keep * common + movement / (sqrt(v) + eps)   the mean of all ranks
//!             m        = -movement / (sum of the learning rates)
//!             moved    = 0, param = common
//! ```
//!
//! Weight decay is decoupled: each step multiplies `common` and `moved` by `keep`, in the same way
//! on every rank. In DeepSpeed, the exchanged values include the weight decay, so the momentum
//! includes it too.
//!
//! An element whose second moment is 0 had no gradient before the freeze. Its later gradients are
//! ignored and its momentum stays 0, because one bit cannot express a movement of 0.

use crate::elementwise::elementwise;
use crate::one_bit_adam::FrozenAdam;

/// The scalars of a local step and of its movement, rounded from `f64` once.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Local {
    /// The decay of the first moment.
    beta1: f32,
    /// `1 - beta1`.
    gain: f32,
    /// The learning rate of this step.
    lr: f32,
    /// Added to the square root of the second moment.
    eps: f32,
    /// `1 - lr * weight_decay`.
    keep: f32,
}

impl Local {
    fn new(rule: &FrozenAdam) -> Self {
        Self {
            beta1: rule.beta1 as f32,
            gain: (1.0 - rule.beta1) as f32,
            lr: rule.lr as f32,
            eps: rule.eps as f32,
            keep: (1.0 - rule.lr * rule.weight_decay) as f32,
        }
    }
}

/// A step with only the rank's own gradient, without communication.
///
/// Updates the first moment, the movement, `common` and the parameter. The second moment does not
/// change.
///
/// The second moment is 0 for an element without gradients before the freeze; such an element only
/// decays.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LocalAdamStep(Local);

impl LocalAdamStep {
    /// Returns the step, which does not depend on the step number.
    pub fn new(rule: &FrozenAdam) -> Self {
        Self(Local::new(rule))
    }
}

elementwise! {
    impl Elementwise<4> for LocalAdamStep {
        name: "0/1 adam",
        scalars in 0: [beta1, gain, lr, eps, keep],
        |p, g, [m, v, moved, common]| -> p, [m, moved, common] {
            let m = only_if(v != 0.0, m * beta1 + gain * g);
            let common = common * keep;
            let moved = moved * keep - lr * (m / (f32::sqrt(v) + eps));
            // Computed from both parts instead of updated, so that `param = common + moved` holds
            // exactly.
            let p = common + moved;
        }
    }
}

/// The movement with the rank's own gradient, in the unit of the momentum: `moved` after a local
/// step, times `sqrt(v) + eps`.
///
/// In this unit the elements of a tensor have similar magnitudes, so one scale represents all of
/// them well. The step overwrites its fourth array. The moments, the previous movement and the
/// parameter do not change.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LocalMovementStep(Local);

impl LocalMovementStep {
    /// Returns the step, which does not depend on the step number.
    pub fn new(rule: &FrozenAdam) -> Self {
        Self(Local::new(rule))
    }
}

// Repeats the arithmetic of a local step, so that the exchanged movement is identical to the
// movement of a local step, without changing the states: `AgreedMovementStep` needs the states from
// before the step.
elementwise! {
    impl Elementwise<4> for LocalMovementStep {
        name: "0/1 adam",
        scalars in 0: [beta1, gain, lr, eps, keep],
        |p, g, [m, v, moved, movement]| -> [movement] {
            let m = only_if(v != 0.0, m * beta1 + gain * g);
            let moved = moved * keep - lr * (m / (f32::sqrt(v) + eps));
            let movement = moved * (f32::sqrt(v) + eps);
        }
    }
}

/// The scalars of a step with the averaged movement of all ranks, rounded from `f64` once.
///
/// The movement is passed as the gradient. After the step, all ranks have the same parameter and
/// first moment.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AgreedMovementStep {
    /// Added to the square root of the second moment.
    eps: f32,
    /// The sum of the learning rates since the last exchange. Dividing a movement by this sum gives
    /// an average momentum.
    rates: f32,
    /// `1 - lr * weight_decay`.
    keep: f32,
}

impl AgreedMovementStep {
    /// Returns the step. `rates` is the sum of the learning rates since the last exchange and must
    /// be greater than 0.
    pub fn new(rule: &FrozenAdam, rates: f64) -> Self {
        // A sum that f32 rounds to 0 would make the momentum infinite.
        let rates = (rates as f32).max(f32::MIN_POSITIVE);
        let keep = (1.0 - rule.lr * rule.weight_decay) as f32;
        Self { eps: rule.eps as f32, rates, keep }
    }
}

//= deepspeed 0.19.6 runtime/fp16/onebit/zoadam.py ZeroOneAdam exchange
elementwise! {
    impl Elementwise<4> for AgreedMovementStep {
        name: "0/1 adam",
        scalars: [eps, rates, keep],
        |p, movement, [m, v, moved, common]| -> p, [m, moved, common] {
            let common = common * keep + movement / (f32::sqrt(v) + eps);
            let p = common;
            let m = 0.0 - movement / rates;
            let moved = 0.0_f32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{LENGTHS, follow, noise, squares, update};

    /// Computes a local step. With `m = beta1 * m + (1 - beta1) * grad`, or `m = 0` if `v` is 0,
    /// and `keep = 1 - lr * weight_decay`: `common *= keep`,
    /// `moved = keep * moved - lr * m / (sqrt(v) + eps)`, `param = common + moved`. The gradient
    /// must already be unscaled.
    fn local_adam_reference(
        rule: &FrozenAdam,
        param: &mut [f64],
        grad: &[f64],
        [m, moved, common]: [&mut [f64]; 3],
        v: &[f64],
    ) {
        let FrozenAdam { lr, beta1, eps, weight_decay } = *rule;
        let keep = 1.0 - lr * weight_decay;
        for i in 0..param.len() {
            let is_live = v[i] != 0.0;
            m[i] = if is_live { beta1 * m[i] + (1.0 - beta1) * grad[i] } else { 0.0 };
            common[i] *= keep;
            moved[i] = keep * moved[i] - lr * (m[i] / (v[i].sqrt() + eps));
            param[i] = common[i] + moved[i];
        }
    }

    /// Computes the step after an exchange. `movement` is the mean of `moved * (sqrt(v) + eps)`
    /// over all ranks: `common = keep * common + movement / (sqrt(v) + eps)`, `param = common`,
    /// `m = -movement / rates`, `moved = 0`.
    ///
    /// `keep` is `1 - lr * weight_decay`, and `rates` the sum of the learning rates since the last
    /// exchange.
    fn agreed_movement_reference(
        [eps, rates, keep]: [f64; 3],
        param: &mut [f64],
        movement: &[f64],
        [m, moved, common]: [&mut [f64]; 3],
        v: &[f64],
    ) {
        for i in 0..param.len() {
            common[i] = keep * common[i] + movement[i] / (v[i].sqrt() + eps);
            param[i] = common[i];
            m[i] = 0.0 - movement[i] / rates;
            moved[i] = 0.0;
        }
    }

    const RULE: FrozenAdam = FrozenAdam { lr: 0.01, beta1: 0.9, eps: 1e-8, weight_decay: 0.1 };

    /// Returns a second moment in which every fifth element is 0.
    fn moments(len: usize) -> Vec<f32> {
        let kept = |(i, x)| if i % 5 == 4 { 0.0 } else { x };
        squares(len, 3).into_iter().enumerate().map(kept).collect()
    }

    #[test]
    fn references_by_hand() {
        let rule = FrozenAdam { lr: 0.5, beta1: 0.75, eps: 0.25, weight_decay: 0.5 };
        let (mut p, mut m, mut moved) = ([2.0_f64, 2.0], [1.0, 1.0], [0.5, 0.0]);
        let (v, mut common) = ([0.0625, 0.0], [1.5, 2.0]);
        let states = [&mut m[..], &mut moved, &mut common];
        local_adam_reference(&rule, &mut p, &[-4.0, -4.0], states, &v);
        // 1 - .5 * .5 is kept; m = .75 - 1; .75 * .5 + .5 * .25 / (.25 + .25); the second is dead.
        assert_eq!((m, moved, common), ([-0.25, 0.0], [0.625, 0.0], [1.125, 1.5]));
        assert_eq!(p, [1.75, 1.5]);
        let states = [&mut m[..], &mut moved, &mut common];
        agreed_movement_reference([0.25, 2.0, 0.5], &mut p, &[1.0, 0.0], states, &v);
        assert_eq!((m, moved, p), ([-0.5, 0.0], [0.0, 0.0], [2.5625, 0.75]));
        assert_eq!(common, p);
    }

    #[test]
    fn local_steps_follow_the_f64_reference_at_every_size() {
        for len in LENGTHS {
            let (param, [m, v, moved, common]) = follow(
                [noise(len, 2), moments(len), vec![0.0; len], noise(len, 1)],
                (0.25, [5, 6, 7].map(|seed| noise(len, seed))),
                |_| LocalAdamStep::new(&RULE),
                |_, param, grad, [m, v, moved, common]| {
                    local_adam_reference(&RULE, param, grad, [m, moved, common], v);
                },
            );
            assert!(v.found == moments(len), "the second moment stays");
            assert!((0..len).all(|i| param.found[i] == common.found[i] + moved.found[i]));
            assert!(m.found.iter().zip(&v.found).all(|(m, v)| *v != 0.0 || *m == 0.0));
            // Three times five roundings of 2^-24 of numbers below 1.
            m.is_close(0.0, 6e-7);
            // Three updates below .02 with a dozen roundings each, and one rounding of a parameter.
            moved.is_close(1e-6, 2e-8);
            param.is_close(2e-7, 1e-7);
            // Three roundings of a factor and of three products.
            common.is_close(4e-7, 0.0);
        }
    }

    /// The exchanged movement is identical to the movement of a local step, and computing it
    /// changes no state.
    #[test]
    fn the_movement_equals_a_local_step() {
        for len in LENGTHS {
            let (mut param, mut m, mut v) = (noise(len, 1), noise(len, 2), moments(len));
            let (mut moved, mut common) = (noise(len, 4), noise(len, 5));
            let (grad, mut movement) = (noise(len, 6), vec![f32::NAN; len]);
            let states = &mut [&mut m[..], &mut v, &mut moved, &mut movement];
            update(LocalMovementStep::new(&RULE), 0.25, &mut param, &grad, states);
            assert!(param == noise(len, 1) && m == noise(len, 2) && moved == noise(len, 4));
            let states = &mut [&mut m[..], &mut v, &mut moved, &mut common];
            update(LocalAdamStep::new(&RULE), 0.25, &mut param, &grad, states);
            for i in 0..len {
                assert_eq!(movement[i], moved[i] * (v[i].sqrt() + RULE.eps as f32), "{i} of {len}");
            }
        }
    }

    //= deepspeed 0.19.6 runtime/fp16/onebit/zoadam.py ZeroOneAdam exchange
    #[test]
    fn the_agreed_movement_follows_the_f64_reference_at_every_size() {
        for len in LENGTHS {
            let mut movement = noise(len, 6);
            movement
                .iter_mut()
                .zip(moments(len))
                .for_each(|(c, v)| *c = if v == 0.0 { 0.0 } else { *c });
            let (param, [m, _, moved, common]) = follow(
                [noise(len, 2), moments(len), noise(len, 4), noise(len, 5)],
                (1.0, [movement]),
                |_| AgreedMovementStep::new(&RULE, 0.5),
                |_, param, movement, [m, v, moved, common]| {
                    let scalars = [1e-8, 0.5, 0.999];
                    agreed_movement_reference(scalars, param, movement, [m, moved, common], v);
                },
            );
            assert!(param.found == common.found && moved.found.iter().all(|x| *x == 0.0));
            // Two and four roundings of 2^-24 of numbers up to 3.
            m.is_close(2e-7, 0.0);
            param.is_close(2e-7, 4e-7);
        }
    }

    #[test]
    fn rates_below_the_f32_range_keep_the_momentum_finite() {
        let (mut p, mut m, mut v) = ([1.0_f32], [0.0], [1.0]);
        let (mut moved, mut common) = ([0.0], [1.0]);
        let states = &mut [&mut m[..], &mut v, &mut moved, &mut common];
        update(AgreedMovementStep::new(&RULE, 1e-60), 1.0, &mut p, &[0.0], states);
        assert_eq!((p, m), ([0.999], [0.0]));
    }
}
