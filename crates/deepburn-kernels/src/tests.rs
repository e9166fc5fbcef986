//! Shared helpers for the tests of this crate: data, thread pools and comparisons.

use crate::blocks::{BLOCK, PARALLEL_FROM};
use crate::{ElementwiseStep, FloatSlice, OwnedSlice, WorkingCopy};
use half::{bf16, f16};
use proptest::prelude::*;
use std::collections::BTreeSet;

/// Empty, a single element, odd lengths, near a block, near the limit for multiple threads, and
/// long.
pub(crate) const SIZES: [usize; 10] =
    [0, 1, 7, 33, BLOCK - 1, BLOCK + 1, PARALLEL_FROM - 1, PARALLEL_FROM, 1_000_007, 10_000_000];

/// The sizes without the ones next to a limit, and without the longest one.
pub(crate) const LENGTHS: [usize; 7] = [0, 1, 7, 33, BLOCK + 1, PARALLEL_FROM, 1_000_007];

/// Numbers rounded to one of the formats of a gradient or of a working copy. Tests run a kernel
/// with each format.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Held {
    /// Single precision.
    F32(Vec<f32>),
    /// Half precision.
    F16(Vec<f16>),
    /// The upper half of an `f32`.
    Bf16(Vec<bf16>),
}

impl Held {
    /// Returns the same numbers in every format, rounded to nearest even.
    pub(crate) fn all(values: &[f32]) -> [Self; 3] {
        [
            Self::F32(values.to_vec()),
            Self::F16(values.iter().map(|x| f16::from_f32_const(*x)).collect()),
            Self::Bf16(values.iter().map(|x| bf16::from_f32_const(*x)).collect()),
        ]
    }

    /// Returns the numbers as the gradient of a step.
    pub(crate) fn gradient(&self) -> FloatSlice<'_> {
        match self {
            Self::F32(values) => FloatSlice::F32(values),
            Self::F16(values) => FloatSlice::F16(values),
            Self::Bf16(values) => FloatSlice::Bf16(values),
        }
    }

    /// Returns the numbers as the memory of a working copy; `None` for single precision, which is
    /// not a working copy.
    pub(crate) fn working_copy(&mut self) -> Option<WorkingCopy<'_>> {
        match self {
            Self::F32(_) => None,
            Self::F16(values) => Some(WorkingCopy::F16(values)),
            Self::Bf16(values) => Some(WorkingCopy::Bf16(values)),
        }
    }
}

impl FloatSlice<'_> {
    /// Returns one element, converted by `half`'s scalar function.
    pub(crate) fn get(&self, index: usize) -> f32 {
        match self {
            Self::F32(elements) => elements[index],
            Self::F16(elements) => elements[index].to_f32_const(),
            Self::Bf16(elements) => elements[index].to_f32_const(),
        }
    }
}

/// Returns deterministic numbers in [-1, 1), from a 64-bit linear congruential generator. The same
/// seed gives the same numbers.
pub(crate) fn noise(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..len)
        .map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

/// Returns numbers like [`noise`], but of magnitude 0.5 to 1.5.
///
/// With an L2 penalty of a tenth, no gradient is nearly canceled by the decay. The first steps
/// depend mainly on the sign of the gradient, so a rounding error in a nearly canceled gradient
/// would be amplified without limit.
pub(crate) fn strong_noise(len: usize, seed: u64) -> Vec<f32> {
    noise(len, seed).into_iter().map(|x| x + 0.5_f32.copysign(x)).collect()
}

/// Runs a step on a gradient in single precision, without a working copy.
pub(crate) fn update(
    step: impl Into<ElementwiseStep>,
    grad_scale: f32,
    param: &mut [f32],
    grad: &[f32],
    states: &mut [&mut [f32]],
) {
    let slice = OwnedSlice { param, states, working: None };
    step.into().update(grad_scale, FloatSlice::F32(grad), slice);
}

/// An array after some steps, and what the reference in f64 made of the same array.
pub(crate) struct Followed {
    pub(crate) found: Vec<f32>,
    expected: Vec<f32>,
}

impl Followed {
    /// Asserts that both are equal up to these relative and absolute errors ([`assert_close`]).
    pub(crate) fn is_close(&self, relative: f32, absolute: f32) {
        assert_close(&self.found, &self.expected, relative, absolute);
    }
}

/// Runs a step for each of `grads`, whose elements are multiplied by `grad_scale`, and the same
/// steps with a reference in f64. `step` and `reference` get the number of the step, from 1. The
/// parameter starts as `noise(len, 1)`, the states as `states`.
pub(crate) fn follow<S: Into<ElementwiseStep>, const N: usize, const T: usize>(
    mut states: [Vec<f32>; N],
    (grad_scale, grads): (f32, [Vec<f32>; T]),
    step: impl Fn(u64) -> S,
    reference: impl Fn(u64, &mut [f64], &[f64], [&mut [f64]; N]),
) -> (Followed, [Followed; N]) {
    let mut param = noise(grads[0].len(), 1);
    let mut param64 = widened(&param, 1.0);
    let mut states64 = states.each_ref().map(|state| widened(state, 1.0));
    for (t, grad) in (1..).zip(&grads) {
        let mut slices = states.each_mut().map(Vec::as_mut_slice);
        update(step(t), grad_scale, &mut param, grad, &mut slices);
        let grad64 = widened(grad, f64::from(grad_scale));
        reference(t, &mut param64, &grad64, states64.each_mut().map(Vec::as_mut_slice));
    }
    let followed = |found: &mut Vec<f32>, expected: &[f64]| Followed {
        found: std::mem::take(found),
        expected: expected.iter().map(|x| *x as f32).collect(),
    };
    let states = std::array::from_fn(|i| followed(&mut states[i], &states64[i]));
    (followed(&mut param, &param64), states)
}

/// Returns values multiplied by `scale`, in f64.
pub(crate) fn widened(values: &[f32], scale: f64) -> Vec<f64> {
    values.iter().map(|x| f64::from(*x) * scale).collect()
}

/// Returns squares of numbers of magnitude 0.5 to 1.5, as a second moment has them.
pub(crate) fn squares(len: usize, seed: u64) -> Vec<f32> {
    strong_noise(len, seed).iter().map(|x| x * x).collect()
}

/// Runs `work` on a pool of exactly `threads` threads.
///
/// Tests compare the results of pools of different sizes, which must be bitwise identical.
pub(crate) fn in_pool<T: Send>(threads: usize, work: impl FnOnce() -> T + Send) -> T {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(work)
}

/// Asserts that `|actual - expected| <= absolute + relative * |expected|` for each element.
pub(crate) fn assert_close(actual: &[f32], expected: &[f32], relative: f32, absolute: f32) {
    assert_eq!(actual.len(), expected.len());
    for (i, (a, e)) in actual.iter().zip(expected).enumerate() {
        assert!((a - e).abs() <= absolute + relative * e.abs(), "element {i}: {a} is not {e}");
    }
}

/// Returns a strategy for gradients of fewer than `longest` elements with up to three NaNs or
/// infinities, and for their indices.
pub(crate) fn with_values_anywhere(
    longest: usize,
) -> impl Strategy<Value = (Vec<f32>, BTreeSet<usize>)> {
    let bad = prop_oneof![Just(f32::NAN), Just(f32::INFINITY), Just(f32::NEG_INFINITY)];
    (1..longest).prop_flat_map(move |len| {
        prop::collection::btree_map(0..len, bad.clone(), 0..4.min(len)).prop_map(move |places| {
            let mut grad = noise(len, len as u64);
            for (place, value) in &places {
                grad[*place] = *value;
            }
            (grad, places.into_keys().collect())
        })
    })
}
