//! Arithmetic on f32 slices that the compiler vectorizes for the current processor.
//!
//! The macro [`vectorized`] compiles a function for AVX-512, for AVX2 and for the baseline of the
//! target, and selects one when it is called ([`deepburn_kernels::Instructions`]). Targets other
//! than x86-64 have the baseline only, which includes NEON on 64-bit Arm.
//!
//! Sums have a fixed number of lanes that does not depend on the width of a register, and Rust does
//! not fuse a multiplication with an addition. All variants therefore compute bitwise identical
//! results.
//!
//! ```text
//! values   0  1  2 ... 15 | 16 17 ... 31 | 32 33            element i goes to lane i % 16
//! lanes    l0 l1 l2 ... l15                                  16 running sums
//! tree     l0 + l8, l1 + l9, ..., l7 + l15, then 4, 2, 1     a fixed order
//! ```

/// The number of running sums: one register of 512 bits, or several narrower ones. Additions to
/// different lanes do not depend on each other, so the latency of an addition is hidden.
const LANES: usize = 16;

/// Compiles a function for three generations of x86-64 processors and calls the newest one whose
/// instructions are in use.
///
/// The functions that its body calls must be `#[inline(always)]`: a function that is not inlined is
/// compiled for the baseline instruction set only. The choice is a load of a cached value, so a
/// call should process at least a row.
macro_rules! vectorized {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(-> $result:ty)? $body:block) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name($($arg: $type),*) $(-> $result)? {
            #[inline(always)]
            #[allow(clippy::too_many_arguments)]
            fn body($($arg: $type),*) $(-> $result)? $body

            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
                #[allow(clippy::too_many_arguments)]
                fn avx512($($arg: $type),*) $(-> $result)? { body($($arg),*) }
                #[target_feature(enable = "avx2")]
                #[allow(clippy::too_many_arguments)]
                fn avx2($($arg: $type),*) $(-> $result)? { body($($arg),*) }

                match deepburn_kernels::Instructions::in_use() {
                    deepburn_kernels::Instructions::Portable => {}
                    // SAFETY: the processor has what the function was compiled for.
                    deepburn_kernels::Instructions::Avx2 => return unsafe { avx2($($arg),*) },
                    // SAFETY: as above.
                    _ => return unsafe { avx512($($arg),*) },
                }
            }
            body($($arg),*)
        }
    };
}
pub(crate) use vectorized;

/// Combines `value(0)` to `value(count - 1)` with an associative function. `start` is its neutral
/// element, and also the result for a count of 0.
///
/// Element `i` is combined into lane `i % LANES`; the lanes are then combined pairwise. The order
/// depends on `count` only.
#[inline(always)]
pub(crate) fn combine(
    count: usize,
    start: f32,
    value: impl Fn(usize) -> f32,
    with: impl Fn(f32, f32) -> f32,
) -> f32 {
    let mut lanes = [start; LANES];
    let whole = count - count % LANES;
    let mut at = 0;
    while at < whole {
        for (lane, sum) in lanes.iter_mut().enumerate() {
            *sum = with(*sum, value(at + lane));
        }
        at += LANES;
    }
    for (lane, sum) in lanes.iter_mut().enumerate().take(count - whole) {
        *sum = with(*sum, value(whole + lane));
    }
    let mut width = LANES;
    while width > 1 {
        width /= 2;
        for lane in 0..width {
            lanes[lane] = with(lanes[lane], lanes[lane + width]);
        }
    }
    lanes[0]
}

/// Returns the sum of `values` in the order of [`combine`]; 0 for an empty slice.
#[inline(always)]
pub(crate) fn sum(values: &[f32]) -> f32 {
    combine(values.len(), 0.0, |i| values[i], |a, b| a + b)
}

/// Returns the dot product of two slices in the order of [`combine`]. Each product is rounded to
/// f32 before it is added.
///
/// # Panics
/// Panics if `right` is shorter than `left`. Further elements of `right` are ignored.
#[inline(always)]
pub(crate) fn dot(left: &[f32], right: &[f32]) -> f32 {
    let right = &right[..left.len()];
    combine(left.len(), 0.0, |i| left[i] * right[i], |a, b| a + b)
}

/// Returns the largest of `values`; minus infinity for an empty slice. NaN is ignored, because a
/// comparison with NaN is false.
#[inline(always)]
pub(crate) fn max(values: &[f32]) -> f32 {
    combine(values.len(), f32::NEG_INFINITY, |i| values[i], |a, b| if b > a { b } else { a })
}

/// Returns `e^x` to within two units in the last place.
///
/// `x = n ln 2 + r` with an integer `n` and `|r| <= ln 2 / 2`. A polynomial gives `e^r` (the
/// coefficients of `expf` in the Cephes library), and the bits of `n` give `2^n`. Subtracting
/// `n ln 2` in two parts (Cody and Waite) keeps `r` accurate. The code has no branches, so that it
/// vectorizes.
///
/// Results below the smallest normal number are 0, where the exact value is a subnormal number.
/// Above the largest number the result is infinite. NaN gives NaN.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    const LOWEST: f32 = -87.336_54;
    const HIGHEST: f32 = 88.722_83;
    // Adding and subtracting 1.5 * 2^23 rounds to the nearest integer.
    const ROUND: f32 = 12_582_912.0;
    let bounded = if x > HIGHEST { HIGHEST } else { x };
    let bounded = if bounded < LOWEST { LOWEST } else { bounded };
    let n = (bounded * std::f32::consts::LOG2_E + ROUND) - ROUND;
    let r = bounded - n * 0.693_359_4 - n * -2.121_944_4e-4;
    let mut p = 1.987_569_1e-4;
    p = p * r + 1.398_2e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 0.5;
    let e = p * r * r + r + 1.0;
    // n is between -126 and 128. 2^n is the product of two powers with about half the exponent, so
    // that both powers are normal numbers. For NaN, n is arbitrary, and the product is NaN.
    let n = (n + ROUND).to_bits().wrapping_sub(ROUND.to_bits()) as i32;
    let half = n >> 1;
    let power = |n: i32| f32::from_bits(((n.wrapping_add(127)) << 23) as u32);
    let result = e * power(half) * power(n.wrapping_sub(half));
    let result = if x < LOWEST { 0.0 } else { result };
    if x > HIGHEST { f32::INFINITY } else { result }
}

/// Returns the hyperbolic tangent of `x` to within a few units in the last place.
///
/// Near 0 it is a polynomial, because `1 - 2 / (e^2x + 1)` loses digits there (`tanhf` in the
/// Cephes library). Both are computed, so that the code has no branches.
#[inline(always)]
pub(crate) fn tanh(x: f32) -> f32 {
    let square = x * x;
    let mut p = -5.704_988_6e-3;
    p = p * square + 2.063_908_8e-2;
    p = p * square - 5.373_971_5e-2;
    p = p * square + 1.333_144_2e-1;
    p = p * square - 3.333_328e-1;
    let near = p * square * x + x;
    // For large `x` the exponential is infinite, and the quotient 0.
    let far = (1.0 - 2.0 / (exp(2.0 * x.abs()) + 1.0)).copysign(x);
    if x.abs() < 0.625 { near } else { far }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    vectorized! {
        fn exp_all(values: &mut [f32]) {
            for value in values {
                *value = exp(*value);
            }
        }
    }

    #[test]
    fn exp_is_right_everywhere() {
        let xs: Vec<f32> = (-90_000..=89_000).map(|i| i as f32 * 1e-3).collect();
        let mut ys = xs.clone();
        exp_all(&mut ys);
        for (x, y) in xs.iter().zip(&ys) {
            let expected = f64::from(*x).exp();
            let error = (f64::from(*y) - expected).abs();
            // Two units in the last place; subnormal results are 0.
            assert!(error <= 2.4e-7 * expected || *x < -87.33 || *x > 88.72, "{x}: {y}");
            assert_eq!(exp(*x).to_bits(), y.to_bits(), "vector and scalar differ at {x}");
        }
        for (x, y) in [
            (f32::NEG_INFINITY, 0.0),
            (f32::INFINITY, f32::INFINITY),
            (0.0, 1.0),
            (-200.0, 0.0),
            (200.0, f32::INFINITY),
        ] {
            assert_eq!(exp(x), y);
        }
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn tanh_is_right_everywhere() {
        for x in (-20_000..=20_000).map(|i| i as f32 * 1e-3) {
            let (y, expected) = (f64::from(tanh(x)), f64::from(x).tanh());
            // Four units in the last place.
            assert!((y - expected).abs() <= 2.4e-7 * expected.abs(), "{x}: {y}, not {expected}");
        }
        assert_eq!([f32::NEG_INFINITY, -0.0, 1e30].map(tanh), [-1.0, -0.0, 1.0]);
        assert!(tanh(f32::NAN).is_nan());
    }

    /// Runs the tests of vectorized functions again at every narrower level.
    #[test]
    fn every_level_computes_these_bits() {
        use deepburn_kernels::Instructions;

        for level in Instructions::ALL.into_iter().filter(|it| *it < Instructions::in_use()) {
            let mut tests = std::process::Command::new(std::env::current_exe().unwrap());
            tests.env("DEEPBURN_INSTRUCTIONS", level.name()).arg("is_right_everywhere");
            let text = String::from_utf8(tests.output().unwrap().stdout).unwrap();
            assert!(text.contains("test result: ok. 2 passed"), "{level}:\n{text}");
        }
    }

    proptest! {
        #[test]
        fn sums_and_maxima_match(values in proptest::collection::vec(-10_f32..10.0, 0..100)) {
            let expected: f64 = values.iter().map(|v| f64::from(*v)).sum();
            // A hundred roundings of sums up to 1000.
            prop_assert!((f64::from(sum(&values)) - expected).abs() < 1e-3);
            let squares: f64 = values.iter().map(|v| f64::from(*v).powi(2)).sum();
            prop_assert!((f64::from(dot(&values, &values)) - squares).abs() < 1e-2);
            let largest = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            prop_assert_eq!(max(&values), largest);
        }
    }
}
