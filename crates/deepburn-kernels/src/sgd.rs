//! Stochastic gradient descent with momentum.
//!
//! Main types: [`Sgd`], whose [`step`](Sgd::step) is a [`SgdStep`] or, with momentum, a
//! [`SgdMomentumStep`]. Source: Sutskever et al. 2013 in the form of PyTorch's `SGD`, with
//! dampening, L2 penalty and Nesterov's variant.
//!
//! ```text
//! g      = grad + weight_decay * p
//! buffer = momentum * buffer + (1 - dampening) * g        first step: buffer = g
//! p      = p - lr * buffer                                Nesterov: p - lr * (g + momentum * buffer)
//! ```
//!
//! The state is one f32 array, the momentum buffer. Without momentum there is no state.
//!
//! As in PyTorch, the buffer does not include the learning rate but is multiplied by it, so a
//! change of the learning rate affects the complete velocity at once. In Sutskever et al., the
//! buffer includes the learning rate.

use crate::blocks::{check_lengths, check_time};
use crate::elementwise::elementwise;

/// Hyper-parameters of stochastic gradient descent.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sgd {
    /// Learning rate of this step.
    pub lr: f64,
    /// Momentum factor; 0 disables the momentum buffer.
    pub momentum: f64,
    /// The fraction of the gradient that is not added to the momentum. The first step ignores the
    /// dampening.
    pub dampening: f64,
    /// L2 penalty.
    pub weight_decay: f64,
    /// Whether to use Nesterov momentum: the step looks ahead along the new momentum.
    pub nesterov: bool,
}

impl Sgd {
    /// Returns true if the optimizer has a momentum buffer, which has the length of the parameter
    /// and is initially 0.
    pub fn keeps_momentum(&self) -> bool {
        self.momentum != 0.0
    }

    //= torch 2.9.0 optim/sgd.py _single_tensor_sgd
    /// Returns the factor of the gradient in the momentum at step `t`, counted from 1. The factor
    /// is 1 in the first step, as in PyTorch, where the buffer starts as a copy of the first
    /// gradient.
    ///
    /// # Panics
    /// Panics if `t` is 0.
    pub(crate) fn gradient_gain(&self, t: u64) -> f64 {
        check_time("sgd", t);
        if t == 1 { 1.0 } else { 1.0 - self.dampening }
    }
}

/// Runs step `t`, counted from 1, of stochastic gradient descent (Sutskever et al. 2013) in
/// PyTorch's form. The gradient must already be unscaled. The momentum slice is not used if the
/// momentum factor is 0.
///
/// # Panics
/// Panics if `grad` (or `momentum`, if used) differs from `param` in length, or if `t` is 0.
pub fn sgd_reference(rule: &Sgd, t: u64, param: &mut [f64], grad: &[f64], momentum: &mut [f64]) {
    check_lengths("sgd", ("param", param.len()), &[("grad", grad.len())]);
    let (gain, mu) = (rule.gradient_gain(t), rule.momentum);
    for i in 0..param.len() {
        let g = grad[i] + rule.weight_decay * param[i];
        let direction = if rule.keeps_momentum() {
            momentum[i] = mu * momentum[i] + gain * g;
            if rule.nesterov { g + mu * momentum[i] } else { momentum[i] }
        } else {
            g
        };
        param[i] -= rule.lr * direction;
    }
}

/// The scalars of one step without momentum, computed in `f64` and narrowed once.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SgdStep {
    /// The learning rate.
    lr: f32,
    /// The L2 penalty.
    l2: f32,
}

/// The scalars of one step with momentum, computed in `f64` and narrowed once.
///
/// The step computes `buffer = mu * buffer + gain * g` and moves the parameter along
/// `ahead * g + along * buffer`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SgdMomentumStep {
    /// The learning rate.
    lr: f32,
    /// The L2 penalty.
    l2: f32,
    /// The momentum factor.
    mu: f32,
    /// The factor of the gradient in the buffer: `1 - dampening`, or 1 in the first step.
    gain: f32,
    /// The weight of the gradient in the direction: 1 with Nesterov momentum, otherwise 0.
    ahead: f32,
    /// The weight of the buffer in the direction: `mu` with Nesterov momentum, otherwise 1.
    along: f32,
}

impl SgdStep {
    /// Returns the scalars of a step without momentum.
    pub(crate) fn new(sgd: &Sgd) -> Self {
        Self { lr: sgd.lr as f32, l2: sgd.weight_decay as f32 }
    }
}

impl SgdMomentumStep {
    /// Returns the scalars of a step with momentum. `gain` is the factor of the gradient in the
    /// momentum.
    pub(crate) fn new(sgd: &Sgd, gain: f32) -> Self {
        let (lr, l2, mu) = (sgd.lr as f32, sgd.weight_decay as f32, sgd.momentum as f32);
        let (ahead, along) = if sgd.nesterov { (1.0, mu) } else { (0.0, 1.0) };
        Self { lr, l2, mu, gain, ahead, along }
    }
}

elementwise! {
    impl Elementwise<0> for SgdStep {
        name: "sgd",
        scalars: [lr, l2],
        |p, g, []| -> p, [] {
            let p = p - lr * (g + l2 * p);
        }
    }
}

//= torch 2.9.0 optim/sgd.py _single_tensor_sgd
// `ahead` and `along` are 1 and `mu` with Nesterov momentum and otherwise 0 and 1, so both forms
// are computed without a branch. A gradient that is not finite makes its own element NaN, because 0
// times infinity is NaN.
elementwise! {
    impl Elementwise<1> for SgdMomentumStep {
        name: "sgd",
        scalars: [lr, l2, mu, gain, ahead, along],
        |p, g, [momentum]| -> p, [momentum] {
            let g = g + l2 * p;
            let momentum = momentum * mu + gain * g;
            let p = p - lr * (ahead * g + along * momentum);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{LENGTHS, assert_close, follow, noise, update};

    const PLAIN: Sgd =
        Sgd { lr: 0.1, momentum: 0.0, dampening: 0.0, weight_decay: 0.0, nesterov: false };

    fn rules() -> [Sgd; 5] {
        [
            PLAIN,
            Sgd { weight_decay: 0.1, ..PLAIN },
            Sgd { momentum: 0.9, ..PLAIN },
            Sgd { momentum: 0.9, dampening: 0.5, weight_decay: 0.1, ..PLAIN },
            Sgd { momentum: 0.9, weight_decay: 0.1, nesterov: true, ..PLAIN },
        ]
    }

    #[test]
    fn reference_by_hand() {
        // p0 = 1, g = 0.5 twice. Momentum: b = 0.5 then 0.9 * 0.5 + 0.5 * 0.5 (dampening 0.5).
        let rule = Sgd { momentum: 0.9, dampening: 0.5, ..PLAIN };
        let (mut p, mut b) = ([1.0_f64], [0.0]);
        sgd_reference(&rule, 1, &mut p, &[0.5], &mut b);
        assert!((p[0] - 0.95).abs() < 1e-15 && b[0] == 0.5);
        sgd_reference(&rule, 2, &mut p, &[0.5], &mut b);
        assert!((b[0] - 0.7).abs() < 1e-15 && (p[0] - 0.88).abs() < 1e-15);
        // Nesterov, first step: b = 0.5, direction = 0.5 + 0.9 * 0.5.
        let rule = Sgd { momentum: 0.9, nesterov: true, ..PLAIN };
        let (mut p, mut b) = ([1.0_f64], [0.0]);
        sgd_reference(&rule, 1, &mut p, &[0.5], &mut b);
        assert!((p[0] - 0.905).abs() < 1e-15);
    }

    /// Parameters after 5 steps of PyTorch 2.9.0 in fp32 on the CPU from `p = 1, -0.5, 0.25, 1e-3`
    /// with `g = p / t`, one row for each of [`rules`]; written by
    /// `torch.optim.SGD([p], lr=.1, momentum=.., dampening=.., weight_decay=.., nesterov=..)`.
    const TORCH_SGD: [[f32; 4]; 5] = [
        [0.7897207, -0.39486036, 0.19743018, 0.0007897208],
        [0.7491651, -0.37458256, 0.18729128, 0.00074916513],
        [0.32786998, -0.16393499, 0.081967495, 0.00032787008],
        [0.38413805, -0.19206902, 0.09603451, 0.00038413802],
        [0.14082986, -0.07041493, 0.035207465, 0.00014082987],
    ];

    //= torch 2.9.0 optim/sgd.py _single_tensor_sgd
    #[test]
    fn fused_agrees_with_torch() {
        for (rule, expected) in rules().iter().zip(TORCH_SGD) {
            let mut p = [1.0_f32, -0.5, 0.25, 1e-3];
            let mut buffer = [0.0; 4];
            for t in 1..=5 {
                let g = p.map(|p| p / t as f32);
                update(rule.step(t), 1.0, &mut p, &g, &mut [&mut buffer]);
            }
            // PyTorch fuses multiply-adds, so the last bit can differ at each of five steps.
            assert_close(&p, &expected, 6e-7, 1e-9);
        }
    }

    #[test]
    fn fused_follows_the_f64_reference_at_every_size() {
        for (len, rule) in LENGTHS.into_iter().flat_map(|len| rules().map(|rule| (len, rule))) {
            let (param, _) = follow(
                [vec![0.0; len]],
                (0.25, [11, 12, 13].map(|seed| noise(len, seed))),
                |t| rule.step(t),
                |t, param, grad, [momentum]| sgd_reference(&rule, t, param, grad, momentum),
            );
            // Three roundings of numbers below 2 and of updates below 0.2.
            param.is_close(2e-7, 3e-7);
        }
    }

    #[test]
    #[should_panic(expected = "sgd: 0 state arrays were given, and the step updates 1")]
    fn a_missing_momentum_is_refused() {
        let step = Sgd { momentum: 0.9, ..PLAIN }.step(1);
        update(step, 1.0, &mut [0.0], &[0.0], &mut []);
    }

    #[test]
    fn a_momentum_that_is_not_used_stays_as_it_is() {
        let (mut p, mut b) = ([1.0], [3.0]);
        update(PLAIN.step(1), 1.0, &mut p, &[1.0], &mut [&mut b]);
        assert_eq!((p, b), ([0.9], [3.0]));
    }
}
