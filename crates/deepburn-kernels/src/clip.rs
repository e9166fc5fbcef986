//! Unscaling and gradient clipping, combined in one factor.
//!
//! ```text
//! norm   = scaled_norm / scale
//! factor = 1 / scale                           if norm + 1e-6 <= clip
//!        = clip / (scale * (norm + 1e-6))      otherwise
//! ```
//!
//! This is the rule of `torch.nn.utils.clip_grad_norm_` and of DeepSpeed's
//! `unscale_and_clip_grads`.

//= torch 2.9.0 nn/utils/clip_grad.py clip_grad_norm_
/// Added to the norm before it is compared with the limit, as in DeepSpeed and PyTorch.
const NORM_EPS: f64 = 1e-6;

//= deepspeed 0.19.8 runtime/zero/stage_1_and_2.py unscale_and_clip_grads
/// Returns the factor that unscales a gradient and clips it to a global norm.
///
/// `scaled_norm` is the global norm of the scaled gradients, `scale` the loss scale of their
/// backward pass, and `clip` the maximum unscaled norm (`None` for no limit). Clipping multiplies
/// by `clip / (norm + 1e-6)` if this quotient is below 1.
///
/// Combining unscaling and clipping in one factor avoids a pass over the gradients and rounds each
/// element only once. If the norm is not finite, the function returns NaN. Such a step must be
/// skipped; if it is applied by mistake, the NaN makes the error visible.
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

    //= deepspeed 0.19.8 runtime/zero/stage_1_and_2.py unscale_and_clip_grads
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
        //= torch 2.9.0 nn/utils/clip_grad.py clip_grad_norm_
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
