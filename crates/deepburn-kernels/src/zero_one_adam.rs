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

use crate::blocks::check_lengths;
#[cfg(feature = "cube")]
use crate::cube::{ElementKernel, write};
use crate::elementwise::elementwise;
use crate::one_bit_adam::FrozenAdam;
use crate::real::Real;
#[cfg(feature = "cube")]
use cubecl::prelude::*;

/// Computes a local step. With `m = beta1 * m + (1 - beta1) * grad`, or `m = 0` if `v` is 0, and
/// `keep = 1 - lr * weight_decay`: `common *= keep`,
/// `moved = keep * moved - lr * m / (sqrt(v) + eps)`, `param = common + moved`. The gradient must
/// already be unscaled.
///
/// # Panics
/// Panics if the slices differ in length.
pub fn local_adam_reference<R: Real>(
    rule: &FrozenAdam,
    param: &mut [R],
    grad: &[R],
    [m, moved, common]: [&mut [R]; 3],
    v: &[R],
) {
    let others = [
        ("grad", grad.len()),
        ("m", m.len()),
        ("v", v.len()),
        ("moved", moved.len()),
        ("common", common.len()),
    ];
    check_lengths("0/1 adam", ("param", param.len()), &others);
    let keep = 1.0 - rule.lr * rule.weight_decay;
    let [lr, beta1, eps, keep] =
        [rule.lr, rule.beta1, rule.eps, keep].map(|scalar| R::from_f64(scalar));
    for i in 0..param.len() {
        let is_live = v[i] != R::ZERO;
        m[i] = if is_live { beta1 * m[i] + (R::ONE - beta1) * grad[i] } else { R::ZERO };
        common[i] = keep * common[i];
        moved[i] = keep * moved[i] - lr * (m[i] / (v[i].sqrt() + eps));
        param[i] = common[i] + moved[i];
    }
}

//= deepspeed 0.19.6 runtime/fp16/onebit/zoadam.py ZeroOneAdam exchange
/// Computes the step after an exchange. `movement` is the mean of `moved * (sqrt(v) + eps)` over
/// all ranks: `common = keep * common + movement / (sqrt(v) + eps)`, `param = common`,
/// `m = -movement / rates`, `moved = 0`.
///
/// `keep` is `1 - lr * weight_decay`, and `rates` the sum of the learning rates since the last
/// exchange.
///
/// # Panics
/// Panics if the slices differ in length.
pub fn agreed_movement_reference<R: Real>(
    [eps, rates, keep]: [f64; 3],
    param: &mut [R],
    movement: &[R],
    [m, moved, common]: [&mut [R]; 3],
    v: &[R],
) {
    let others = [
        ("movement", movement.len()),
        ("m", m.len()),
        ("v", v.len()),
        ("moved", moved.len()),
        ("common", common.len()),
    ];
    check_lengths("0/1 adam", ("param", param.len()), &others);
    let [eps, rates, keep] = [eps, rates, keep].map(|scalar| R::from_f64(scalar));
    for i in 0..param.len() {
        common[i] = keep * common[i] + movement[i] / (v[i].sqrt() + eps);
        param[i] = common[i];
        m[i] = R::ZERO - movement[i] / rates;
        moved[i] = R::ZERO;
    }
}

/// The scalars of a local step, rounded from `f64` once, and its arithmetic. The local step and the
/// movement share this arithmetic, so the exchanged movement is identical to the movement of a
/// local step.
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

    /// Returns the first moment updated with a gradient; 0 for an element whose second moment is 0.
    #[inline(always)]
    fn momentum(self, grad: f32, m: f32, v: f32) -> f32 {
        let momentum = m * self.beta1 + self.gain * grad;
        if v != 0.0 { momentum } else { 0.0 }
    }

    /// Returns the movement since the last exchange, after a step along the first moment `m`.
    #[inline(always)]
    fn moved(self, m: f32, v: f32, moved: f32) -> f32 {
        moved * self.keep - self.lr * (m / (v.sqrt() + self.eps))
    }
}

/// Computes [`Local::momentum`] for element `i` on a device.
#[cfg(feature = "cube")]
#[cube]
fn momentum_of(i: usize, scalars: &Array<f32>, grad: f32, states: &Sequence<Array<f32>>) -> f32 {
    let momentum = states[0][i] * scalars[0] + scalars[1] * grad;
    if states[1][i] != 0.0 { momentum } else { f32::new(0.0) }
}

/// Computes [`Local::moved`] for element `i` on a device.
#[cfg(feature = "cube")]
#[cube]
fn moved_of(i: usize, scalars: &Array<f32>, m: f32, states: &Sequence<Array<f32>>) -> f32 {
    let along = m / (f32::sqrt(states[1][i]) + scalars[3]);
    states[2][i] * scalars[4] - scalars[2] * along
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
        arrays: [m, v, moved, common],
        scalars: [0.beta1, 0.gain, 0.lr, 0.eps, 0.keep],
        tile: local_tile,
    }
}

/// Updates a tile.
#[inline(always)]
fn local_tile(
    (LocalAdamStep(step), grad_scale): (LocalAdamStep, f32),
    param: &mut [f32],
    grad: &[f32],
    m: &mut [f32],
    v: &[f32],
    moved: &mut [f32],
    common: &mut [f32],
) {
    let states = m.iter_mut().zip(v).zip(moved).zip(common);
    for ((p, g), (((m, v), moved), common)) in param.iter_mut().zip(grad).zip(states) {
        *m = step.momentum(*g * grad_scale, *m, *v);
        *common *= step.keep;
        *moved = step.moved(*m, *v, *moved);
        // Computed from both parts instead of updated, so that `param = common + moved` holds
        // exactly.
        *p = *common + *moved;
    }
}

/// Runs a local step for one element on a device.
///
/// | Index of `scalars` | Value |
/// |---|---|
/// | 0 | `beta1` |
/// | 1 | `gain` |
/// | 2 | `lr` |
/// | 3 | `eps` |
/// | 4 | `keep` |
#[cfg(feature = "cube")]
#[cube]
impl ElementKernel for LocalAdamStep {
    fn element(
        i: usize,
        scalars: &Array<f32>,
        grad: f32,
        param: &mut Array<f32>,
        states: &mut Sequence<Array<f32>>,
    ) {
        let m = momentum_of(i, scalars, grad, states);
        let moved = moved_of(i, scalars, m, states);
        let common = states[3][i] * scalars[4];
        write(states, 0usize, i, m);
        write(states, 2usize, i, moved);
        write(states, 3usize, i, common);
        param[i] = common + moved;
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

elementwise! {
    impl Elementwise<4> for LocalMovementStep {
        name: "0/1 adam",
        arrays: [m, v, moved, movement],
        scalars: [0.beta1, 0.gain, 0.lr, 0.eps, 0.keep],
        tile: movement_tile,
    }
}

/// Computes the movement of a tile.
///
/// It repeats the arithmetic of a local step without changing the states, because
/// [`AgreedMovementStep`] needs the states from before the step.
#[inline(always)]
fn movement_tile(
    (LocalMovementStep(step), grad_scale): (LocalMovementStep, f32),
    _param: &[f32],
    grad: &[f32],
    m: &[f32],
    v: &[f32],
    moved: &[f32],
    movement: &mut [f32],
) {
    let states = m.iter().zip(v).zip(moved).zip(movement);
    for (g, (((m, v), moved), movement)) in grad.iter().zip(states) {
        let m = step.momentum(*g * grad_scale, *m, *v);
        *movement = step.moved(m, *v, *moved) * (v.sqrt() + step.eps);
    }
}

/// Computes the movement of one element on a device, with the scalars of a local step.
#[cfg(feature = "cube")]
#[cube]
impl ElementKernel for LocalMovementStep {
    fn element(
        i: usize,
        scalars: &Array<f32>,
        grad: f32,
        _param: &mut Array<f32>,
        states: &mut Sequence<Array<f32>>,
    ) {
        let m = momentum_of(i, scalars, grad, states);
        let moved = moved_of(i, scalars, m, states);
        write(states, 3usize, i, moved * (f32::sqrt(states[1][i]) + scalars[3]));
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

elementwise! {
    impl Elementwise<4> for AgreedMovementStep {
        name: "0/1 adam",
        arrays: [m, v, moved, common],
        scalars: [eps, rates, keep],
        tile: agreed_tile,
    }
}

/// Updates a tile of the first moment, the movement, `common` and the parameter.
#[inline(always)]
fn agreed_tile(
    (step, grad_scale): (AgreedMovementStep, f32),
    param: &mut [f32],
    movement: &[f32],
    m: &mut [f32],
    v: &[f32],
    moved: &mut [f32],
    common: &mut [f32],
) {
    let states = m.iter_mut().zip(v).zip(moved).zip(common);
    for ((p, movement), (((m, v), moved), common)) in param.iter_mut().zip(movement).zip(states) {
        let movement = *movement * grad_scale;
        *common = *common * step.keep + movement / (v.sqrt() + step.eps);
        *p = *common;
        *m = 0.0 - movement / step.rates;
        *moved = 0.0;
    }
}

/// Runs the step after an exchange for one element on a device. `scalars` are `eps`, `rates` and
/// `keep`.
#[cfg(feature = "cube")]
#[cube]
impl ElementKernel for AgreedMovementStep {
    fn element(
        i: usize,
        scalars: &Array<f32>,
        movement: f32,
        param: &mut Array<f32>,
        states: &mut Sequence<Array<f32>>,
    ) {
        let along = movement / (f32::sqrt(states[1][i]) + scalars[0]);
        let common = states[3][i] * scalars[2] + along;
        write(states, 0usize, i, 0.0 - movement / scalars[1]);
        write(states, 2usize, i, f32::new(0.0));
        write(states, 3usize, i, common);
        param[i] = common;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{LENGTHS, follow, noise, squares, update};

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
