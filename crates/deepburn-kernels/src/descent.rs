//! A step along a given direction, with decoupled weight decay.
//!
//! Main type: [`DescentStep`]. It is the last part of LAMB and Muon, whose updates are not purely
//! element-wise: LAMB needs the norms of complete tensors, and Muon an orthogonalized matrix.
//!
//! ```text
//! LambStep, MuonMomentumStep     element-wise: moments and direction
//! norms or orthogonalization     over complete tensors
//! DescentStep                    element-wise: param = param * keep - rate * direction
//! ```

use crate::elementwise::elementwise;

/// The scalars of one step, rounded from `f64` once. The direction is passed as the gradient and is
/// multiplied by `grad_scale` as well.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DescentStep {
    /// The factor by which the parameter is multiplied: `1 - lr * weight_decay`.
    keep: f32,
    /// The factor by which the direction is multiplied: the step size, for LAMB times the trust
    /// ratio.
    rate: f32,
}

impl DescentStep {
    /// Returns a step that multiplies the parameter by `keep` (`1 - lr * decay`; 1 without decay)
    /// and then subtracts `rate` times the direction.
    pub fn new(keep: f64, rate: f64) -> Self {
        Self { keep: keep as f32, rate: rate as f32 }
    }
}

elementwise! {
    impl Elementwise<0> for DescentStep {
        name: "descent",
        scalars: [keep, rate],
        |p, direction, []| -> p, [] {
            let p = p * keep - rate * direction;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{LENGTHS, follow, noise};

    /// Computes `param = param * keep - rate * direction`.
    fn descent_reference(keep: f64, rate: f64, param: &mut [f64], direction: &[f64]) {
        for (p, d) in param.iter_mut().zip(direction) {
            *p = *p * keep - rate * *d;
        }
    }

    #[test]
    fn reference_by_hand() {
        let mut p = [2.0_f64, -1.0];
        descent_reference(0.5, 0.25, &mut p, &[4.0, 8.0]);
        assert_eq!(p, [0.0, -2.5]);
    }

    #[test]
    fn fused_follows_the_f64_reference_at_every_size() {
        for len in LENGTHS {
            let (param, []) = follow(
                [],
                (0.5, [noise(len, 2)]),
                |_| DescentStep::new(0.999, 0.02),
                |_, param, direction, []| descent_reference(0.999, 0.02, param, direction),
            );
            // Four roundings of 2^-24 of numbers below 1: `keep`, its product, the sum and the
            // reference.
            param.is_close(0.0, 2.4e-7);
        }
    }
}
