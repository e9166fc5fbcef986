//! The element-wise part of LAMB: moments and direction.
//!
//! Main type: [`LambStep`]. Source: You et al. 2020, "Large Batch Optimization for Deep Learning",
//! in the form of DeepSpeed's `csrc/lamb/fused_lamb_cuda_kernel.cu`. The parameter is then moved by
//! `-step_size * trust_ratio * direction` ([`lamb_step_size`], [`trust_ratio`],
//! [`DescentStep`](crate::DescentStep)). This needs the norms of the complete parameter and of the
//! complete direction.
//!
//! ```text
//! m         = beta1 * m + (1 - beta1) * grad
//! v         = beta2 * v + (1 - beta2) * grad^2
//! direction = m / (sqrt(v) + eps) + weight_decay * p      or m / sqrt(v + eps)
//! p         = p - step_size * clamp(|p| / |direction|) * direction
//! ```
//!
//! The paper corrects the bias of both moments before it computes the direction. Here, as in
//! DeepSpeed, the direction uses uncorrected moments, and the correction multiplies the step size
//! outside the trust ratio. The first steps are therefore shorter.

use crate::blocks::check_time;
use crate::elementwise::elementwise;

/// Hyper-parameters of LAMB's direction.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Lamb {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the second moment or to its square root.
    pub eps: f64,
    /// Whether `eps` is added before the square root is taken.
    pub eps_inside_sqrt: bool,
    /// The weight decay: the factor of the parameter in the direction.
    pub weight_decay: f64,
}

//= deepspeed 0.19.8 ops/csrc/lamb/fused_lamb_cuda_kernel.cu lamb_cuda_kernel_part3
/// Returns the factor that scales a direction to the size of its parameter:
/// `weight_norm / direction_norm`, clamped to `min_coeff..=max_coeff`. Returns 1 if either norm is
/// 0, even if 1 is outside the limits.
///
/// Returns NaN if the ratio is NaN.
pub fn trust_ratio(weight_norm: f64, direction_norm: f64, min_coeff: f64, max_coeff: f64) -> f64 {
    if weight_norm == 0.0 || direction_norm == 0.0 {
        return 1.0;
    }
    let ratio = weight_norm / direction_norm;
    // Same order as in DeepSpeed: if the limits contradict each other, the lower limit takes
    // precedence.
    let ratio = if ratio > max_coeff { max_coeff } else { ratio };
    if ratio < min_coeff { min_coeff } else { ratio }
}

//= deepspeed 0.19.8 ops/csrc/lamb/fused_lamb_cuda_kernel.cu fused_lamb_cuda
/// Returns the step size of step `t`, counted from 1: `lr * sqrt(1 - beta2^t) / (1 - beta1^t)`, or
/// `lr` without bias correction.
///
/// # Panics
/// Panics if `t` is 0.
pub fn lamb_step_size(lr: f64, [beta1, beta2]: [f64; 2], t: u64, bias_correction: bool) -> f64 {
    check_time("lamb", t);
    if !bias_correction {
        return lr;
    }
    lr * (1.0 - beta2.powf(t as f64)).sqrt() / (1.0 - beta1.powf(t as f64))
}

/// The scalars of one step, computed in `f64` and narrowed once.
///
/// The step updates the moments and overwrites the direction, its third array. It only reads the
/// parameter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LambStep {
    /// The decay of the first moment.
    beta1: f32,
    /// `1 - beta1`.
    gain1: f32,
    /// The decay of the second moment.
    beta2: f32,
    /// `1 - beta2`.
    gain2: f32,
    /// Added under the root: `eps` or 0.
    inner_eps: f32,
    /// Added to the root: 0 or `eps`.
    outer_eps: f32,
    /// The weight decay, a part of the direction.
    decay: f32,
}

impl LambStep {
    /// Returns the step. Only [`lamb_step_size`] depends on the step number.
    pub fn new(rule: &Lamb) -> Self {
        let eps = rule.eps as f32;
        let (inner_eps, outer_eps) = if rule.eps_inside_sqrt { (eps, 0.0) } else { (0.0, eps) };
        Self {
            beta1: rule.beta1 as f32,
            gain1: (1.0 - rule.beta1) as f32,
            beta2: rule.beta2 as f32,
            gain2: (1.0 - rule.beta2) as f32,
            inner_eps,
            outer_eps,
            decay: rule.weight_decay as f32,
        }
    }
}

//= deepspeed 0.19.8 ops/csrc/lamb/fused_lamb_cuda_kernel.cu lamb_cuda_kernel_part1
// A second moment of 0 with `eps` of 0 gives NaN or an infinity, as in the reference.
elementwise! {
    impl Elementwise<3> for LambStep {
        name: "lamb",
        scalars: [beta1, gain1, beta2, gain2, inner_eps, outer_eps, decay],
        |p, g, [m, v, direction]| -> [m, v, direction] {
            let m = m * beta1 + gain1 * g;
            let v = v * beta2 + gain2 * g * g;
            // One of `inner_eps` and `outer_eps` is 0, and adding 0 does not change the result.
            let denominator = f32::sqrt(v + inner_eps) + outer_eps;
            let direction = m / denominator + decay * p;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{LENGTHS, follow, noise, strong_noise};

    /// Computes moments and direction of one LAMB step (You et al. 2020) in DeepSpeed's form. The
    /// gradient must already be unscaled.
    fn lamb_reference(
        rule: &Lamb,
        param: &[f64],
        grad: &[f64],
        [m, v, direction]: [&mut [f64]; 3],
    ) {
        let Lamb { beta1, beta2, eps, weight_decay, .. } = *rule;
        for i in 0..param.len() {
            m[i] = beta1 * m[i] + (1.0 - beta1) * grad[i];
            v[i] = beta2 * v[i] + (1.0 - beta2) * grad[i] * grad[i];
            let denominator =
                if rule.eps_inside_sqrt { (v[i] + eps).sqrt() } else { v[i].sqrt() + eps };
            direction[i] = m[i] / denominator + weight_decay * param[i];
        }
    }

    const RULE: Lamb =
        Lamb { beta1: 0.9, beta2: 0.999, eps: 1e-8, eps_inside_sqrt: false, weight_decay: 0.01 };

    //= deepspeed 0.19.8 ops/csrc/lamb/fused_lamb_cuda_kernel.cu lamb_cuda_kernel_part1
    #[test]
    fn reference_by_hand() {
        // m = .1 * .5, v = .25 of .5^2: sqrt(v) = .25.
        let rule = Lamb { beta2: 0.75, eps: 0.0, weight_decay: 0.5, ..RULE };
        let (mut m, mut v, mut direction) = ([0.0_f64], [0.0], [9.0]);
        lamb_reference(&rule, &[3.0], &[0.5], [&mut m, &mut v, &mut direction]);
        assert!((m[0] - 0.05).abs() < 1e-15 && v[0] == 0.0625);
        assert!((direction[0] - (0.05 / 0.25 + 1.5)).abs() < 1e-15);
        // sqrt(.0625 * .75 + .25 * .25 + .140625) = sqrt(.25)
        let rule = Lamb { eps: 0.140_625, eps_inside_sqrt: true, weight_decay: 0.0, ..rule };
        lamb_reference(&rule, &[3.0], &[0.5], [&mut m, &mut v, &mut direction]);
        assert!((direction[0] - 0.095 / 0.5).abs() < 1e-15);
    }

    //= deepspeed 0.19.8 ops/csrc/lamb/fused_lamb_cuda_kernel.cu lamb_cuda_kernel_part3
    #[test]
    fn the_trust_ratio_is_the_clamped_quotient() {
        assert_eq!(trust_ratio(2.0, 4.0, 0.01, 10.0), 0.5);
        assert_eq!(trust_ratio(1.0, 1e3, 0.01, 10.0), 0.01);
        assert_eq!(trust_ratio(1e3, 1.0, 0.01, 10.0), 10.0);
        assert_eq!(trust_ratio(0.0, 5.0, 2.0, 10.0), 1.0);
        assert_eq!(trust_ratio(5.0, 0.0, 2.0, 10.0), 1.0);
        assert!(trust_ratio(f64::NAN, 1.0, 0.01, 10.0).is_nan());
    }

    //= deepspeed 0.19.8 ops/csrc/lamb/fused_lamb_cuda_kernel.cu fused_lamb_cuda
    #[test]
    fn the_step_size_carries_the_bias_correction() {
        let betas = [0.9, 0.999];
        // sqrt(.001) / .1, then sqrt(1 - .999^2) / (1 - .81).
        assert!((lamb_step_size(2.0, betas, 1, true) - 0.632_455_532_033_675_9).abs() < 1e-12);
        let second = 2.0 * 0.001_999_f64.sqrt() / 0.19;
        assert!((lamb_step_size(2.0, betas, 2, true) - second).abs() < 1e-12);
        assert_eq!(lamb_step_size(2.0, betas, 1, false), 2.0);
    }

    #[test]
    #[should_panic(expected = "lamb: optimizer time is 0")]
    fn time_zero_is_refused() {
        lamb_step_size(1.0, [0.9, 0.999], 0, true);
    }

    #[test]
    fn fused_follows_the_f64_reference_at_every_size() {
        let rules = [false, true].map(|eps_inside_sqrt| Lamb { eps_inside_sqrt, ..RULE });
        for (len, rule) in LENGTHS.into_iter().flat_map(|len| rules.map(|rule| (len, rule))) {
            let (param, states) = follow(
                [vec![0.0; len], vec![0.0; len], vec![0.0; len]],
                (0.25, [11, 12, 13].map(|seed| strong_noise(len, seed))),
                |_| LambStep::new(&rule),
                |_, param, grad, states| lamb_reference(&rule, param, grad, states),
            );
            assert!(param.found == noise(len, 1), "the parameter stays");
            // Relative: three steps of four roundings of 6e-8, in both moments and their quotient.
            // Absolute: if the terms of a momentum, up to .04, nearly cancel, their rounding errors
            // of some 1e-8 remain. The root is .02 for such terms, so the error of the direction is
            // 5e-7.
            states.iter().for_each(|state| state.is_close(1e-6, 1e-6));
        }
    }
}
