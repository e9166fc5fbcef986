//! Unscaling and clipping, folded into one multiplier of the gradient.

/// Added to the norm before it is compared with the limit, as DeepSpeed and PyTorch do.
const NORM_EPS: f64 = 1e-6;

/// The multiplier that takes the loss scale out of a gradient and clips it to a global norm.
///
/// `scaled_norm` is the global norm of the gradients as they are, `scale` the loss scale used in
/// their own backward pass, `clip` the largest unscaled norm let through (`None` for any). Clipping
/// scales by `clip / (norm + 1e-6)` when that is below 1.
///
/// A norm that is not finite gives NaN: such a step is to be skipped, and one that was not must
/// not pass for an unclipped one.
pub fn unscale_and_clip(scaled_norm: f64, scale: f64, clip: Option<f64>) -> f64 {
    if !scaled_norm.is_finite() {
        return f64::NAN;
    }
    let excess = clip.map_or(0.0, |clip| (scaled_norm / scale + NORM_EPS) / clip);
    1.0 / (scale * excess.max(1.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn multipliers_are_the_published_ones() {
        // [norm of the scaled gradients, scale, clip] -> multiplier
        for ([norm, scale, clip], expected) in [
            ([327680.0, 65536.0, 1.0], 3.0517572021485595e-06),
            ([32768.0, 65536.0, 1.0], 1.52587890625e-05),
            ([2.0, 1.0, 0.1], 0.0499999750000125),
            ([1024.0, 1024.0, 1.0], 0.0009765615234384766),
            ([0.0, 65536.0, 1.0], 1.52587890625e-05),
        ] {
            let actual = unscale_and_clip(norm, scale, Some(clip));
            // A few roundings of 1e-16, relative to numbers up to 0.05.
            assert!((actual - expected).abs() < 1e-15 * expected.max(1e-3), "{actual} {expected}");
        }
    }

    #[test]
    fn without_a_limit_only_the_scale_goes() {
        assert_eq!(unscale_and_clip(1e30, 1024.0, None), 1.0 / 1024.0);
        assert_eq!(unscale_and_clip(1e30, 1.0, None), 1.0);
    }

    #[test]
    fn a_norm_that_is_not_finite_cannot_pass() {
        for norm in [f64::NAN, f64::INFINITY] {
            assert!(unscale_and_clip(norm, 1.0, Some(1.0)).is_nan());
            assert!(unscale_and_clip(norm, 1.0, None).is_nan());
        }
    }

    proptest! {
        #[test]
        fn a_clipped_norm_never_exceeds_the_limit(
            norm in 0.0..1e12_f64, power in 0..32_i32, clip in 1e-3..1e3_f64,
        ) {
            let scale = 2.0_f64.powi(power);
            let clipped = norm * unscale_and_clip(norm, scale, Some(clip));
            prop_assert!(clipped <= clip * (1.0 + 1e-12));
            prop_assert!(clipped <= norm / scale * (1.0 + 1e-12));
        }
    }
}
