//! Adam and AdamW.
//!
//! Main type: [`AdamStep`], the scalars of one step. Sources: Kingma & Ba 2015, algorithm 1;
//! Loshchilov & Hutter 2019, algorithm 2, for the decoupled weight decay. AMSGrad is not supported.
//!
//! ```text
//! p = p * (1 - lr * decay)                                AdamW
//! g = grad + decay * p                                    Adam with L2
//! m = beta1 * m + (1 - beta1) * g
//! v = beta2 * v + (1 - beta2) * g^2
//! p = p - lr * (m / bias1) / (sqrt(v / bias2) + eps)      bias = 1 - beta^t
//! ```
//!
//! The states are two f32 arrays, the moments. Together with an f32 master weight and a 16-bit
//! working copy, an element takes 14 bytes, not counting its gradient.
//!
//! # Numerics
//!
//! All element-wise arithmetic is f32. `(1 - beta2) * g^2` underflows to 0 for gradients below
//! about 1e-21, whose step is then `m / eps`. It overflows above about 6e20, after which the
//! element no longer changes. The gradient is multiplied by its factor before it is squared, so a
//! loss scale does not shift these limits. The caller must skip a step whose gradient is not
//! finite.

use crate::blocks::{check_lengths, check_time};
use crate::elementwise::elementwise;

//= Loshchilov and Hutter 2019 algorithm 2 AdamW
/// The form of the weight decay.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum WeightDecay {
    /// Applied to the parameter: `p *= 1 - lr * decay` (AdamW).
    Decoupled(f64),
    /// Applied to the gradient: `g += decay * p`, and therefore to the moments (Adam).
    L2(f64),
}

/// The hyper-parameters of Adam and AdamW.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Adam {
    /// The learning rate of this step.
    pub lr: f64,
    /// The decay of the first moment.
    pub beta1: f64,
    /// The decay of the second moment.
    pub beta2: f64,
    /// Added to the square root of the second moment.
    pub eps: f64,
    /// The amount and form of the weight decay.
    pub weight_decay: WeightDecay,
    /// Whether the moments are divided by `1 - beta^t`.
    pub bias_correction: bool,
}

impl Adam {
    //= Kingma and Ba 2015 algorithm 1 Adam
    /// Returns `1 - beta1^t` and `1 - beta2^t`, or 1 and 1 without bias correction.
    fn biases(&self, t: u64) -> (f64, f64) {
        check_time("adam", t);
        if self.bias_correction {
            (1.0 - self.beta1.powf(t as f64), 1.0 - self.beta2.powf(t as f64))
        } else {
            (1.0, 1.0)
        }
    }
}

//= torch 2.9.0 optim/adam.py _single_tensor_adam
/// Runs step `t`, counted from 1, of Adam (Kingma & Ba, 2015) with L2 weight decay, or with
/// decoupled weight decay (AdamW, Loshchilov & Hutter, 2019). As in PyTorch, the decoupled decay
/// multiplies the parameter by `1 - lr * decay`. The gradient must already be unscaled.
///
/// # Panics
/// Panics if the slices differ in length or `t` is 0.
pub fn adam_reference(
    rule: &Adam,
    t: u64,
    param: &mut [f64],
    grad: &[f64],
    m: &mut [f64],
    v: &mut [f64],
) {
    check_lengths(
        "adam",
        ("param", param.len()),
        &[("grad", grad.len()), ("m", m.len()), ("v", v.len())],
    );
    let Adam { lr, beta1, beta2, eps, weight_decay, .. } = *rule;
    let (bias1, bias2) = rule.biases(t);
    for i in 0..param.len() {
        let mut g = grad[i];
        match weight_decay {
            WeightDecay::Decoupled(decay) => param[i] *= 1.0 - lr * decay,
            WeightDecay::L2(decay) => g += decay * param[i],
        }
        m[i] = beta1 * m[i] + (1.0 - beta1) * g;
        v[i] = beta2 * v[i] + (1.0 - beta2) * g * g;
        let m_hat = m[i] / bias1;
        let v_hat = v[i] / bias2;
        param[i] -= lr * m_hat / (v_hat.sqrt() + eps);
    }
}

/// The scalars of one step, computed in `f64` and rounded once.
///
/// They include both forms of weight decay. The unused form has a neutral value, so one loop
/// without a branch implements both forms.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamStep {
    /// `1 - beta1`.
    gain1: f32,
    /// The decay of the second moment.
    beta2: f32,
    /// `1 - beta2`.
    gain2: f32,
    /// Added to the square root of the second moment.
    eps: f32,
    /// `lr / bias1`: the learning rate with the bias correction of the first moment.
    step_size: f32,
    /// The square root of `bias2`. The square root of the second moment is divided by it.
    sqrt_bias2: f32,
    /// `1 - lr * decay` for decoupled weight decay, otherwise 1.
    keep: f32,
    /// `decay` for L2 weight decay, otherwise 0.
    l2: f32,
}

impl AdamStep {
    /// Returns step `t`, counted from 1.
    ///
    /// # Panics
    /// Panics if `t` is 0.
    pub fn new(rule: &Adam, t: u64) -> Self {
        let (bias1, bias2) = rule.biases(t);
        let (keep, l2) = match rule.weight_decay {
            WeightDecay::Decoupled(decay) => (1.0 - rule.lr * decay, 0.0),
            WeightDecay::L2(decay) => (1.0, decay),
        };
        Self {
            gain1: (1.0 - rule.beta1) as f32,
            beta2: rule.beta2 as f32,
            gain2: (1.0 - rule.beta2) as f32,
            eps: rule.eps as f32,
            step_size: (rule.lr / bias1) as f32,
            sqrt_bias2: bias2.sqrt() as f32,
            keep: keep as f32,
            l2: l2 as f32,
        }
    }
}

//= torch 2.9.0 optim/adam.py _single_tensor_adam
// The operations and their order are the same as in PyTorch's single-tensor `AdamW` in fp32. A
// gradient that is not finite makes only the moments and the parameter of its own element NaN or
// infinite.
elementwise! {
    impl Elementwise<2> for AdamStep {
        name: "adam",
        scalars: [gain1, beta2, gain2, eps, step_size, sqrt_bias2, keep, l2],
        |p, g, [m, v]| -> p, [m, v] {
            let decayed = p * keep;
            let g = g + l2 * decayed;
            let m = lerp(m, g, gain1);
            let v = v * beta2 + gain2 * g * g;
            let denominator = f32::sqrt(v) / sqrt_bias2 + eps;
            let p = decayed - step_size * m / denominator;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blocks::TILE;
    use crate::elementwise::{Slices, update_tiles};
    use crate::tests::{Held, SIZES, assert_close, noise, strong_noise};
    use crate::{ElementwiseStep, FloatSlice, OwnedSlice, WorkingCopy};
    use proptest::prelude::*;
    use std::ops::Range;

    /// Runs a step on a gradient in single precision, without a working copy.
    fn update(step: &AdamStep, grad_scale: f32, grad: &[f32], [param, m, v]: [&mut [f32]; 3]) {
        ElementwiseStep::from(*step).update(
            grad_scale,
            FloatSlice::F32(grad),
            OwnedSlice { param, states: &mut [m, v], working: None },
        );
    }

    fn rule(weight_decay: WeightDecay, bias_correction: bool) -> Adam {
        Adam { lr: 0.1, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay, bias_correction }
    }

    const GRADIENTS: [f64; 5] = [0.5, -0.25, 0.125, 1.0, 0.0];

    /// `[p, m, v]` after each of five steps from `p = 1` with [`GRADIENTS`], lr .1, betas .9/.999,
    /// eps 1e-8; computed in double precision from the published formulas by a separate program.
    struct Golden {
        rule: Adam,
        states: [[f64; 3]; 5],
    }

    fn goldens() -> [Golden; 4] {
        [
            Golden {
                rule: rule(WeightDecay::Decoupled(0.1), true),
                states: [
                    [0.890000002, 0.04999999999999999, 0.0002500000000000002],
                    [0.8544662986878464, 0.019999999999999997, 0.0003122500000000003],
                    [0.8118787219097757, 0.030499999999999996, 0.0003275627500000003],
                    [0.7394707437093355, 0.12744999999999998, 0.001327235187250001],
                    [0.6777370102907773, 0.11470499999999999, 0.001325907952062751],
                ],
            },
            Golden {
                rule: rule(WeightDecay::L2(0.1), true),
                states: [
                    [0.9000000016666666, 0.059999999999999984, 0.0003600000000000003],
                    [0.8544413674617626, 0.03800000001666665, 0.00038523999994666703],
                    [0.8005694720858496, 0.055244413689617605, 0.0004291414946375637],
                    [0.7279986481960308, 0.15772566704151433, 0.0015952353623564551],
                    [0.6636209811464157, 0.14923308681932324, 0.0015989399473118513],
                ],
            },
            Golden {
                rule: rule(WeightDecay::Decoupled(0.0), true),
                states: [
                    [0.900000002, 0.04999999999999999, 0.0002500000000000002],
                    [0.8733662987078463, 0.019999999999999997, 0.0003122500000000003],
                    [0.8393233849166541, 0.030499999999999996, 0.0003275627500000003],
                    [0.7750341939353117, 0.12744999999999998, 0.001327235187250001],
                    [0.7206951679538468, 0.11470499999999999, 0.001325907952062751],
                ],
            },
            Golden {
                rule: rule(WeightDecay::Decoupled(0.1), false),
                states: [
                    [0.6737724339830358, 0.04999999999999999, 0.0002500000000000002],
                    [0.5538524066995517, 0.019999999999999997, 0.0003122500000000003],
                    [0.37979353546799743, 0.030499999999999996, 0.0003275627500000003],
                    [0.02615857032758756, 0.12744999999999998, 0.001327235187250001],
                    [-0.2891138869714582, 0.11470499999999999, 0.001325907952062751],
                ],
            },
        ]
    }

    //= Kingma and Ba 2015 algorithm 1 Adam
    //= Loshchilov and Hutter 2019 algorithm 2 AdamW
    #[test]
    fn reference_gives_the_published_numbers() {
        for golden in goldens() {
            let (mut p, mut m, mut v) = ([1.0_f64], [0.0], [0.0]);
            for (i, (g, expected)) in GRADIENTS.iter().zip(golden.states).enumerate() {
                adam_reference(&golden.rule, i as u64 + 1, &mut p, &[*g], &mut m, &mut v);
                // The orders of f64 operations are different but equivalent, which gives errors of
                // some 1e-16 per step.
                for (actual, expected) in [p[0], m[0], v[0]].into_iter().zip(expected) {
                    assert!((actual - expected).abs() < 1e-12, "{actual} {expected}");
                }
            }
        }
    }

    #[test]
    fn fused_gives_the_published_numbers_in_f32() {
        for golden in goldens() {
            let (mut p, mut m, mut v) = ([1.0_f32], [0.0_f32], [0.0_f32]);
            for (i, (g, expected)) in GRADIENTS.iter().zip(golden.states).enumerate() {
                let step = AdamStep::new(&golden.rule, i as u64 + 1);
                // The gradient is halved and the scale doubled, which checks that the scale is
                // applied.
                update(&step, 2.0, &[*g as f32 / 2.0], [&mut p, &mut m, &mut v]);
                let narrowed = expected.map(|x| x as f32);
                // Five steps of a dozen roundings of 6e-8 each, on numbers up to 1.
                assert_close(&[p[0], m[0], v[0]], &narrowed, 1e-6, 5e-7);
            }
        }
    }

    /// AdamW of PyTorch 2.9.0 in fp32 on the CPU (lr 1e-3, betas .9/.95, eps 1e-8, decay .1):
    /// parameters after 10 steps from `p = 1, -0.5, 0.25, 1e-3` with `g = p / t`; written by
    /// `torch.optim.AdamW([p], lr=1e-3, betas=(.9, .95), weight_decay=.1, foreach=False)`.
    const TORCH_ADAMW: [f32; 4] = [0.990987, -0.49149328, 0.24175607, -0.00029137946];

    //= torch 2.9.0 optim/adam.py _single_tensor_adam
    #[test]
    fn fused_agrees_with_torch() {
        let rule = Adam {
            lr: 1e-3,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: WeightDecay::Decoupled(0.1),
            bias_correction: true,
        };
        let mut p = [1.0_f32, -0.5, 0.25, 1e-3];
        let (mut m, mut v) = ([0.0; 4], [0.0; 4]);
        for t in 1..=10 {
            let g = p.map(|p| p / t as f32);
            update(&AdamStep::new(&rule, t), 1.0, &g, [&mut p, &mut m, &mut v]);
        }
        // PyTorch fuses a multiply-add in the first moment, so the last bit can differ.
        assert_close(&p, &TORCH_ADAMW, 3e-7, 1e-9);
    }

    #[test]
    fn beta1_of_zero_keeps_the_gradient_itself() {
        let rule = Adam { beta1: 0.0, ..rule(WeightDecay::Decoupled(0.0), true) };
        let (mut p, mut m, mut v) = ([1.0], [1e10], [0.0]);
        update(&AdamStep::new(&rule, 1), 1.0, &[0.1], [&mut p, &mut m, &mut v]);
        assert_eq!(m, [0.1]);
    }

    #[test]
    fn fused_follows_the_f64_reference_at_every_size_and_format() {
        for len in SIZES {
            for (kind, decay) in (0..3).flat_map(|kind| {
                [WeightDecay::Decoupled, WeightDecay::L2].map(|of| (kind, of(0.1)))
            }) {
                follows_the_f64_reference(&Adam { lr: 1e-2, ..rule(decay, true) }, len, kind);
            }
        }
    }

    fn follows_the_f64_reference(rule: &Adam, len: usize, kind: usize) {
        let (mut param, mut m, mut v) = (noise(len, 1), vec![0.0; len], vec![0.0; len]);
        let mut p64 = param.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
        let (mut m64, mut v64) = (vec![0.0; len], vec![0.0; len]);
        for t in 1..=3 {
            let grad = &Held::all(&strong_noise(len, 10 + t))[kind];
            let g64 = (0..len).map(|i| f64::from(grad.gradient().get(i)) * 0.25);
            let g64 = g64.collect::<Vec<_>>();
            let working = &mut Held::all(&vec![f32::NAN; len])[kind];
            let slice = OwnedSlice {
                param: &mut param,
                states: &mut [&mut m, &mut v],
                working: working.working_copy(),
            };
            ElementwiseStep::from(AdamStep::new(rule, t)).update(0.25, grad.gradient(), slice);
            adam_reference(rule, t, &mut p64, &g64, &mut m64, &mut v64);
            // The working copy is exactly the rounded parameter.
            assert!(kind == 0 || *working == Held::all(&param)[kind]);
        }
        let narrowed = p64.iter().map(|x| *x as f32).collect::<Vec<_>>();
        // Relative: at each of three steps `1 - lr * decay` is narrowed, the decayed parameter is
        // rounded and so is the new one, and the reference is narrowed once: ten times 2^-24.
        // Absolute: three updates of at most lr 1e-2, each with a relative error of some 1e-6 (1 -
        // .999 alone is narrowed from 1e-3 with 6e-8, 1 - beta2^t likewise). The type of the
        // gradient adds no error, because the reference reads the same numbers.
        assert_close(&param, &narrowed, 6e-7, 5e-8);
    }

    #[test]
    fn the_instruction_set_changes_no_bit() {
        let len = 3 * TILE + 5;
        let step = AdamStep::new(&rule(WeightDecay::L2(0.1), true), 3);
        let (param, m, v, grad) = (noise(len, 1), noise(len, 2), vec![0.5; len], noise(len, 3));
        let grad = grad.iter().map(|g| half::bf16::from_f32(*g)).collect::<Vec<_>>();
        let start = (param, m, v, vec![half::f16::ZERO; len]);

        let (mut p, mut m, mut v, mut w) = start.clone();
        let states = [&mut m[..], &mut v];
        update_tiles(step, 0.3, Slices { param: &mut p, grad: &grad, states, working: &mut w });
        let baseline = (p, m, v, w);

        let (mut param, mut m, mut v, mut w) = start;
        let working = Some(WorkingCopy::F16(&mut w));
        let slice = OwnedSlice { param: &mut param, states: &mut [&mut m, &mut v], working };
        ElementwiseStep::from(step).update(0.3, FloatSlice::Bf16(&grad), slice);
        assert!((param, m, v, w) == baseline);
    }

    #[test]
    #[should_panic(expected = "adam: `v` has 3 elements and `param` has 2")]
    fn slices_of_different_lengths_are_refused() {
        let step = AdamStep::new(&rule(WeightDecay::L2(0.0), true), 1);
        update(&step, 1.0, &[0.0; 2], [&mut [0.0; 2], &mut [0.0; 2], &mut [0.0; 3]]);
    }

    #[test]
    #[should_panic(expected = "the first step has time 1")]
    fn time_zero_is_refused() {
        AdamStep::new(&rule(WeightDecay::L2(0.0), true), 0);
    }

    #[test]
    #[should_panic(expected = "adam: `working` has 1 elements and `param` has 2")]
    fn a_working_copy_of_another_length_is_refused() {
        let step = AdamStep::new(&rule(WeightDecay::L2(0.0), true), 1);
        let (param, m, v) = (&mut [0.0; 2], &mut [0.0; 2], &mut [0.0; 2]);
        let mut working = [half::f16::ZERO];
        let working = Some(WorkingCopy::F16(&mut working));
        ElementwiseStep::from(step).update(
            1.0,
            FloatSlice::F32(&[0.0; 2]),
            OwnedSlice { param, states: &mut [m, v], working },
        );
    }

    proptest! {
        #[test]
        fn cutting_a_slice_changes_no_bit(len in 1_usize..300, cut in 0.0..1.0) {
            let cut = (len as f64 * cut) as usize;
            let step = AdamStep::new(&rule(WeightDecay::L2(0.1), true), 2);
            for grad in Held::all(&noise(len, 2)) {
                let run = |ranges: &[Range<usize>]| {
                    let (mut p, mut m, mut v) = (noise(len, 1), noise(len, 3), vec![0.1; len]);
                    for range in ranges {
                        let slice = OwnedSlice { param: &mut p[range.clone()], states: &mut [&mut m[range.clone()], &mut v[range.clone()]], working: None };
                        ElementwiseStep::from(step).update(0.3, grad.gradient().slice(range.clone()), slice);
                    }
                    (p, m, v)
                };
                prop_assert!(run(&[0..len, len..len]) == run(&[0..cut, cut..len]));
            }
        }
    }
}
