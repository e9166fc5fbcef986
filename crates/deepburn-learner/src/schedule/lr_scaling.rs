//! The learning-rate factor of dynamic batching, in which steps have different numbers of samples.

use deepburn_config::LrScaling;

//= deepspeed 0.19.8 runtime/data_pipeline/data_sampling/variable_batch_size_and_lr.py scale_lr
/// Returns the factor of the learning rate for a step of `samples` samples, if the rate was chosen
/// for `reference` samples (at least 1). The factor is the ratio of the two (Goyal et al. 2017),
/// the square root of the ratio (Krizhevsky 2014), or 1:
///
/// ```
/// use deepburn_config::LrScaling;
/// use deepburn_learner::schedule::lr_factor;
///
/// // Four times as many samples as the rate was chosen for.
/// assert_eq!(lr_factor(LrScaling::Linear, 64, 16), 4.0);
/// assert_eq!(lr_factor(LrScaling::Sqrt, 64, 16), 2.0);
/// assert_eq!(lr_factor(LrScaling::None, 64, 16), 1.0);
/// ```
pub fn lr_factor(scaling: LrScaling, samples: usize, reference: usize) -> f64 {
    let ratio = samples as f64 / reference as f64;
    match scaling {
        LrScaling::Linear => ratio,
        LrScaling::Sqrt => ratio.sqrt(),
        LrScaling::None => 1.0,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    //= deepspeed 0.19.8 runtime/data_pipeline/data_sampling/variable_batch_size_and_lr.py scale_lr
    /// DeepSpeed's `scale_lr(base_batch_size=8, batch_size, 1.0, method)`.
    #[test]
    fn factors_of_deepspeed() {
        for (samples, linear, sqrt) in
            [(2, 0.25, 0.5), (8, 1.0, 1.0), (11, 1.375, 1.172_603_939_955_857_4), (32, 4.0, 2.0)]
        {
            assert_eq!(lr_factor(LrScaling::Linear, samples, 8), linear);
            assert_eq!(lr_factor(LrScaling::Sqrt, samples, 8), sqrt);
            assert_eq!(lr_factor(LrScaling::None, samples, 8), 1.0);
        }
    }

    proptest! {
        #[test]
        fn factors_are_finite_and_one_at_the_reference(samples: u32, reference in 1u32..) {
            for scaling in [LrScaling::Linear, LrScaling::Sqrt, LrScaling::None] {
                let factor = lr_factor(scaling, samples as usize, reference as usize);
                prop_assert!(factor.is_finite() && factor >= 0.0);
                prop_assert_eq!(lr_factor(scaling, reference as usize, reference as usize), 1.0);
            }
        }

        #[test]
        fn the_square_of_the_root_is_the_line(samples in 1usize..1 << 20, reference in 1usize..1 << 20) {
            let (line, root) = (LrScaling::Linear, LrScaling::Sqrt);
            let square = lr_factor(root, samples, reference).powi(2);
            prop_assert!((square / lr_factor(line, samples, reference) - 1.0).abs() < 1e-14);
        }
    }
}
