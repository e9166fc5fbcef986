//! The element-wise part of Muon: momentum and direction.
//!
//! Main type: [`MuonMomentumStep`]. Source: Jordan et al. 2024, "Muon: An optimizer for hidden
//! layers in neural networks", in the form of `torch.optim.Muon`, where the momentum is an average
//! of gradients. The direction is a matrix. It is orthogonalized before the parameter is moved
//! along it ([`DescentStep`](crate::DescentStep)).
//!
//! ```text
//! momentum  = momentum + (1 - mu) * (grad - momentum)
//! direction = grad + mu * (momentum - grad)               Nesterov, else the momentum
//! ```
//!
//! The orthogonalization needs the complete matrix and is not part of this crate. The results of
//! this module do not depend on the shape of a parameter.

use crate::elementwise::elementwise;

/// Hyper-parameters of Muon's momentum.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MuonMomentum {
    /// Momentum factor.
    pub momentum: f64,
    /// Whether the direction looks ahead along the new momentum.
    pub nesterov: bool,
}

/// The scalars of one step, computed in `f64` and rounded once.
///
/// The step updates the momentum and overwrites the direction, its second array. It does not access
/// the parameter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MuonMomentumStep {
    /// `1 - momentum`.
    gain: f32,
    /// The weight of the momentum in the direction: the momentum factor, or 1 without Nesterov's
    /// look-ahead.
    along: f32,
}

impl MuonMomentumStep {
    /// Returns the step, which does not depend on the step number.
    pub fn new(rule: &MuonMomentum) -> Self {
        let along = if rule.nesterov { rule.momentum as f32 } else { 1.0 };
        Self { gain: (1.0 - rule.momentum) as f32, along }
    }
}

//= torch 2.9.0 optim/_muon.py _single_tensor_muon
// The first interpolation is the same as `torch.lerp`, which has two forms for small and large
// weights.
elementwise! {
    impl Elementwise<2> for MuonMomentumStep {
        name: "muon",
        scalars: [gain, along],
        |p, g, [momentum, direction]| -> [momentum, direction] {
            let momentum = lerp(momentum, g, gain);
            // A weight of 1 returns exactly the momentum, unless the gradient is not finite.
            let direction = lerp(g, momentum, along);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{LENGTHS, follow, noise, update};

    /// Computes momentum and direction of one Muon step (Jordan et al. 2024) in PyTorch's form. The
    /// gradient must already be unscaled.
    fn muon_momentum_reference(
        rule: &MuonMomentum,
        grad: &[f64],
        momentum: &mut [f64],
        direction: &mut [f64],
    ) {
        let mu = rule.momentum;
        for i in 0..grad.len() {
            momentum[i] = mu * momentum[i] + (1.0 - mu) * grad[i];
            direction[i] =
                if rule.nesterov { (1.0 - mu) * grad[i] + mu * momentum[i] } else { momentum[i] };
        }
    }

    const RULES: [MuonMomentum; 2] = [
        MuonMomentum { momentum: 0.95, nesterov: true },
        MuonMomentum { momentum: 0.95, nesterov: false },
    ];

    //= torch 2.9.0 optim/_muon.py _single_tensor_muon
    #[test]
    fn reference_by_hand() {
        // b = .95 * 1 + .05 * 3; ahead: .05 * 3 + .95 * b.
        for (rule, expected) in RULES.iter().zip([0.15 + 0.95 * 1.1, 1.1]) {
            let (mut b, mut direction) = ([1.0_f64], [9.0]);
            muon_momentum_reference(rule, &[3.0], &mut b, &mut direction);
            assert!((b[0] - 1.1).abs() < 1e-15 && (direction[0] - expected).abs() < 1e-15);
        }
    }

    #[test]
    fn without_looking_ahead_the_direction_is_the_momentum() {
        let (mut b, mut direction) = (noise(1000, 2), vec![0.0; 1000]);
        let step = MuonMomentumStep::new(&RULES[1]);
        update(step, 0.5, &mut noise(1000, 1), &noise(1000, 3), &mut [&mut b, &mut direction]);
        assert!(b == direction);
    }

    #[test]
    fn fused_follows_the_f64_reference_at_every_size() {
        for (len, rule) in LENGTHS.into_iter().flat_map(|len| RULES.map(|rule| (len, rule))) {
            let (param, states) = follow(
                [vec![0.0; len], vec![0.0; len]],
                (0.25, [11, 12, 13].map(|seed| noise(len, seed))),
                |_| MuonMomentumStep::new(&rule),
                |_, _, grad, [momentum, direction]| {
                    muon_momentum_reference(&rule, grad, momentum, direction);
                },
            );
            assert!(param.found == noise(len, 1), "the parameter stays");
            // Three steps of six roundings of 2^-24 of numbers up to a quarter.
            states.iter().for_each(|state| state.is_close(0.0, 2e-7));
        }
    }
}
