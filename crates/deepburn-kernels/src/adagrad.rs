//! Adagrad: the learning rate of each element decreases with the sum of its squared gradients.
//!
//! Main type: [`AdagradStep`]. Source: Duchi et al. 2011, diagonal form, with `eps` outside the
//! root as in PyTorch's `Adagrad`. PyTorch's `lr_decay` is not implemented, because learning-rate
//! schedules provide it.
//!
//! ```text
//! g   = grad + weight_decay * p
//! sum = sum + g^2
//! p   = p - lr * g / (sqrt(sum) + eps)
//! ```
//!
//! The state is one f32 array, the sums of squares.
//!
//! The sum never decreases, so the effective learning rate `lr / sqrt(sum)` falls like
//! `1 / sqrt(t)` for gradients of constant size. In f32, a square below 6e-8 of the sum no longer
//! changes the sum.

use crate::blocks::check_lengths;
use crate::elementwise::elementwise;

/// Hyper-parameters of Adagrad.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Adagrad {
    /// Learning rate of this step.
    pub lr: f64,
    /// Added to the square root of the accumulated squares.
    pub eps: f64,
    /// L2 penalty.
    pub weight_decay: f64,
}

/// Runs one Adagrad step (Duchi et al. 2011) in PyTorch's form. The gradient must already be
/// unscaled; `sum` holds the accumulated squares.
///
/// # Panics
/// Panics if the slices differ in length.
pub fn adagrad_reference(rule: &Adagrad, param: &mut [f64], grad: &[f64], sum: &mut [f64]) {
    check_lengths("adagrad", ("param", param.len()), &[("grad", grad.len()), ("sum", sum.len())]);
    let Adagrad { lr, eps, weight_decay } = *rule;
    for i in 0..param.len() {
        let g = grad[i] + weight_decay * param[i];
        sum[i] += g * g;
        param[i] -= lr * g / (sum[i].sqrt() + eps);
    }
}

/// The scalars of one step, computed in `f64` and narrowed once.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdagradStep {
    /// The learning rate.
    lr: f32,
    /// Added to the square root.
    eps: f32,
    /// The L2 penalty.
    l2: f32,
}

impl AdagradStep {
    /// Returns the step. It does not depend on the step number, because the accumulated squares
    /// have the same effect.
    pub fn new(rule: &Adagrad) -> Self {
        Self { lr: rule.lr as f32, eps: rule.eps as f32, l2: rule.weight_decay as f32 }
    }
}

//= torch 2.9.0 optim/adagrad.py _single_tensor_adagrad
// Each operation is rounded to f32, in the order of the reference.
elementwise! {
    impl Elementwise<1> for AdagradStep {
        name: "adagrad",
        scalars: [lr, eps, l2],
        |p, g, [sum]| -> p, [sum] {
            let g = g + l2 * p;
            let sum = sum + g * g;
            let p = p - lr * g / (f32::sqrt(sum) + eps);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{LENGTHS, assert_close, follow, strong_noise, update};

    const RULE: Adagrad = Adagrad { lr: 0.01, eps: 1e-10, weight_decay: 0.1 };

    #[test]
    fn reference_by_hand() {
        let rule = Adagrad { weight_decay: 0.0, eps: 0.0, ..RULE };
        let (mut p, mut sum) = ([1.0_f64], [0.0]);
        adagrad_reference(&rule, &mut p, &[3.0], &mut sum);
        assert!((p[0] - 0.99).abs() < 1e-15 && sum[0] == 9.0);
        adagrad_reference(&rule, &mut p, &[4.0], &mut sum);
        assert!((p[0] - (0.99 - 0.01 * 4.0 / 5.0)).abs() < 1e-15 && sum[0] == 25.0);
    }

    /// Parameters after 5 steps of PyTorch 2.9.0 in fp32 on the CPU from `p = 1, -0.5, 0.25, 1e-3`
    /// with `g = p / t`; written by
    /// `torch.optim.Adagrad([p], lr=.01, eps=1e-10, weight_decay=.1, foreach=False)`.
    const TORCH_ADAGRAD: [f32; 4] = [0.9773941, -0.47753546, 0.22781955, 0.000028752082];

    //= torch 2.9.0 optim/adagrad.py _single_tensor_adagrad
    #[test]
    fn fused_agrees_with_torch() {
        let (mut p, mut sum) = ([1.0_f32, -0.5, 0.25, 1e-3], [0.0; 4]);
        for t in 1..=5 {
            let g = p.map(|p| p / t as f32);
            update(AdagradStep::new(&RULE), 1.0, &mut p, &g, &mut [&mut sum]);
        }
        // PyTorch fuses the multiply-add of the decay: a last bit now and then.
        assert_close(&p, &TORCH_ADAGRAD, 3e-7, 1e-9);
    }

    #[test]
    fn fused_follows_the_f64_reference_at_every_size() {
        for len in LENGTHS {
            let (param, _) = follow(
                [vec![0.0; len]],
                (0.25, [11, 12, 13].map(|seed| strong_noise(len, seed))),
                |_| AdagradStep::new(&RULE),
                |_, param, grad, [sum]| adagrad_reference(&RULE, param, grad, sum),
            );
            // Three updates of at most lr 1e-2 with a relative error of some 1e-6, and the rounding
            // of p itself.
            param.is_close(3e-7, 5e-8);
        }
    }
}
