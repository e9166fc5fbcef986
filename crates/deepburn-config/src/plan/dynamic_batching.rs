//! Batches of as many samples as a budget of tokens holds, and the learning rate they get.

use serde::Serialize;

use crate::choice::choices;

/// Batches of about equal cost, with as many samples as fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct DynamicBatchingPlan {
    /// Most tokens of a rank's micro-batch, padding included.
    pub max_tokens: usize,
    /// Fewest samples of a micro-batch.
    pub min_batch_size: usize,
    /// Most samples of a micro-batch; `None` leaves it to `max_tokens`.
    pub max_batch_size: Option<usize>,
    /// The order in which samples are taken.
    pub order: PickingOrderPlan,
    /// How the learning rate follows the number of samples of a step. The schedule's rate applies
    /// to a step of `train_batch_size` samples.
    pub lr_scaling: LrScaling,
    /// Print how the samples of an epoch are batched.
    pub verbose: bool,
}

/// The order in which samples are taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum PickingOrderPlan {
    /// As they lie.
    Dataloader,
    /// Another one each epoch.
    Random {
        /// Fixes all epochs.
        seed: u64,
    },
    /// The shortest first.
    Seqlen,
}

/// How the learning rate follows the batch size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LrScaling {
    /// In proportion (Goyal et al. 2017).
    Linear,
    /// With its square root (Krizhevsky 2014), which keeps the variance of an update.
    Sqrt,
    /// Not at all.
    None,
}

choices!(LrScaling { "linear" => Linear, "sqrt" => Sqrt, "none" => None });

impl LrScaling {
    /// Factor of the learning rate for a step of `samples` samples, where the rate is meant for one
    /// of `reference` (at least 1).
    ///
    /// ```
    /// use deepburn_config::LrScaling;
    ///
    /// // Four times as many samples as the rate is meant for.
    /// assert_eq!(LrScaling::Linear.factor(64, 16), 4.0);
    /// assert_eq!(LrScaling::Sqrt.factor(64, 16), 2.0);
    /// assert_eq!(LrScaling::None.factor(64, 16), 1.0);
    /// ```
    pub fn factor(self, samples: usize, reference: usize) -> f64 {
        let ratio = samples as f64 / reference as f64;
        match self {
            Self::Linear => ratio,
            Self::Sqrt => ratio.sqrt(),
            Self::None => 1.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// DeepSpeed's `scale_lr(base_batch_size=8, batch_size, 1.0, method)`.
    #[test]
    fn factors_of_deepspeed() {
        for (samples, linear, sqrt) in
            [(2, 0.25, 0.5), (8, 1.0, 1.0), (11, 1.375, 1.172_603_939_955_857_4), (32, 4.0, 2.0)]
        {
            assert_eq!(LrScaling::Linear.factor(samples, 8), linear);
            assert_eq!(LrScaling::Sqrt.factor(samples, 8), sqrt);
            assert_eq!(LrScaling::None.factor(samples, 8), 1.0);
        }
    }

    proptest! {
        #[test]
        fn factors_are_finite_and_one_at_the_reference(samples: u32, reference in 1u32..) {
            for scaling in [LrScaling::Linear, LrScaling::Sqrt, LrScaling::None] {
                let factor = scaling.factor(samples as usize, reference as usize);
                prop_assert!(factor.is_finite() && factor >= 0.0);
                prop_assert_eq!(scaling.factor(reference as usize, reference as usize), 1.0);
            }
        }

        #[test]
        fn the_square_of_the_root_is_the_line(samples in 1usize..1 << 20, reference in 1usize..1 << 20) {
            let (line, root) = (LrScaling::Linear, LrScaling::Sqrt);
            let square = root.factor(samples, reference).powi(2);
            prop_assert!((square / line.factor(samples, reference) - 1.0).abs() < 1e-14);
        }
    }
}
