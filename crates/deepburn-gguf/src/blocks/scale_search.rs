//! The searches for scales of sub-blocks.
//!
//! [`affine`] is `make_qkx2_quants` and [`symmetric`] is `make_qx_quants` of llama.cpp, for eight
//! sub-blocks at a time. Both try a few scales around the one that covers the range of the values,
//! compute the levels of each, and keep the levels whose weighted least-squares fit has the
//! smallest error.

use super::rounding::nearest_int;
use super::sub_blocks::{LANES, Lanes};

/// Below this magnitude, values count as zero (`GROUP_MAX_EPS`).
pub(super) const ALL_ZERO: f32 = 1e-15;

/// The scales that [`affine`] tries: level counts `max_level + first + step · i` for `i` up to
/// `last`.
pub(super) struct Candidates {
    /// The largest level; levels start at 0.
    pub(super) max_level: f32,
    /// The first offset.
    pub(super) first: f32,
    /// The distance of offsets.
    pub(super) step: f32,
    /// The number of candidates minus one.
    pub(super) last: u8,
}

/// The result of [`affine`]: `value ≈ scale · level - minimum`.
pub(super) struct AffineFit<const N: usize> {
    pub(super) scales: Lanes<f32>,
    /// The negative of the smallest value, at least 0.
    pub(super) minima: Lanes<f32>,
    pub(super) levels: [Lanes<u8>; N],
}

/// The running best fit of [`affine`].
struct Best<const N: usize> {
    scale: Lanes<f32>,
    min: Lanes<f32>,
    error: Lanes<f32>,
    levels: [Lanes<u8>; N],
}

/// Finds scales, minima and levels that minimize `Σ weight · (scale · level - minimum - value)²`.
pub(super) fn affine<const N: usize>(
    values: &[Lanes<f32>; N],
    weights: &[Lanes<f32>; N],
    candidates: &Candidates,
) -> AffineFit<N> {
    let (mut min, mut max) = (values[0], values[0]);
    // All sums are in the order of the elements, as in the source, because their last bits depend
    // on it.
    let (mut sum_w, mut sum_x) = ([0.0; LANES], [0.0; LANES]);
    for (x, w) in values.iter().zip(weights) {
        for j in 0..LANES {
            min[j] = if x[j] < min[j] { x[j] } else { min[j] };
            max[j] = if x[j] > max[j] { x[j] } else { max[j] };
            sum_w[j] += w[j];
            sum_x[j] += w[j] * x[j];
        }
    }
    // A stored minimum is a distance below zero, so it cannot be positive.
    min = min.map(|min| if min > 0.0 { 0.0 } else { min });
    // Levels that represent a constant: the minimum alone.
    let is_flat: Lanes<bool> = std::array::from_fn(|j| max[j] == min[j]);
    let flat_min = min;
    let mut best = first_fit(values, weights, min, max, candidates.max_level);
    for i in 0..=candidates.last {
        let count = candidates.step * f32::from(i) + candidates.first + candidates.max_level;
        try_candidate(values, weights, (sum_w, sum_x), max, count, candidates.max_level, &mut best);
    }
    // These lanes were divided by an empty range. What they computed does not affect the others.
    for j in (0..LANES).filter(|j| is_flat[*j]) {
        (best.scale[j], best.min[j]) = (0.0, flat_min[j]);
        best.levels.iter_mut().for_each(|levels| levels[j] = 0);
    }
    AffineFit { scales: best.scale, minima: best.min.map(|min| -min), levels: best.levels }
}

/// Returns the levels of the scale that covers the range, and their error.
fn first_fit<const N: usize>(
    values: &[Lanes<f32>; N],
    weights: &[Lanes<f32>; N],
    min: Lanes<f32>,
    max: Lanes<f32>,
    max_level: f32,
) -> Best<N> {
    let inverse: Lanes<f32> = std::array::from_fn(|j| max_level / (max[j] - min[j]));
    let scale = inverse.map(|inverse| 1.0 / inverse);
    let mut best = Best { scale, min, error: [0.0; LANES], levels: [[0; LANES]; N] };
    for ((x, w), levels) in values.iter().zip(weights).zip(&mut best.levels) {
        for j in 0..LANES {
            let level = nearest_int(inverse[j] * (x[j] - min[j])).clamp(0, max_level as i32);
            levels[j] = level as u8;
            let difference = scale[j] * level as f32 + min[j] - x[j];
            best.error[j] += w[j] * (difference * difference);
        }
    }
    best
}

/// Computes the levels of the candidate with `count` levels and their best scale and minimum, and
/// keeps them in the lanes where the error is smaller than before. The minimum of the best fit so
/// far determines the range.
fn try_candidate<const N: usize>(
    values: &[Lanes<f32>; N],
    weights: &[Lanes<f32>; N],
    (sum_w, sum_x): (Lanes<f32>, Lanes<f32>),
    max: Lanes<f32>,
    count: f32,
    max_level: f32,
    best: &mut Best<N>,
) {
    let inverse: Lanes<f32> = std::array::from_fn(|j| count / (max[j] - best.min[j]));
    let (mut sum_l, mut sum_l2, mut sum_xl) = ([0.0; LANES], [0.0; LANES], [0.0; LANES]);
    let mut all_levels = [[0_i32; LANES]; N];
    for ((x, w), levels) in values.iter().zip(weights).zip(&mut all_levels) {
        for j in 0..LANES {
            let level = nearest_int(inverse[j] * (x[j] - best.min[j])).clamp(0, max_level as i32);
            levels[j] = level;
            let weighted = w[j] * level as f32;
            sum_l[j] += weighted;
            sum_l2[j] += weighted * level as f32;
            sum_xl[j] += weighted * x[j];
        }
    }
    let (mut scale, mut min, mut is_solved) = ([0.0; LANES], [0.0; LANES], [false; LANES]);
    for j in 0..LANES {
        // The normal equations of the weighted least-squares fit.
        let determinant = sum_w[j] * sum_l2[j] - sum_l[j] * sum_l[j];
        is_solved[j] = determinant > 0.0;
        scale[j] = (sum_w[j] * sum_xl[j] - sum_x[j] * sum_l[j]) / determinant;
        min[j] = (sum_l2[j] * sum_x[j] - sum_l[j] * sum_xl[j]) / determinant;
        // The best fit has a minimum that cannot be stored, so the best scale without one is taken.
        if min[j] > 0.0 {
            (scale[j], min[j]) = (sum_xl[j] / sum_l2[j], 0.0);
        }
    }
    let mut error = [0.0; LANES];
    for ((x, w), levels) in values.iter().zip(weights).zip(&all_levels) {
        for j in 0..LANES {
            let difference = scale[j] * levels[j] as f32 + min[j] - x[j];
            error[j] += w[j] * (difference * difference);
        }
    }
    for j in 0..LANES {
        // A candidate may be better in some sub-blocks only.
        if !is_solved[j] || error[j] >= best.error[j] || error[j].is_nan() {
            continue;
        }
        (best.error[j], best.scale[j], best.min[j]) = (error[j], scale[j], min[j]);
        for (kept, levels) in best.levels.iter_mut().zip(&all_levels) {
            kept[j] = levels[j] as u8;
        }
    }
}

/// The result of [`symmetric`]: `value ≈ scale · (level - max_level)`.
pub(super) struct SymmetricFit<const N: usize> {
    pub(super) scales: Lanes<f32>,
    pub(super) levels: [Lanes<u8>; N],
}

/// Finds scales and levels that minimize `Σ value² · (scale · (level - max_level) - value)²`.
/// Levels are below `2 · max_level`.
pub(super) fn symmetric<const N: usize>(
    values: &[Lanes<f32>; N],
    max_level: i32,
) -> SymmetricFit<N> {
    let mut extreme: Lanes<f32> = [0.0; LANES];
    for x in values {
        for j in 0..LANES {
            extreme[j] = if x[j].abs() > extreme[j].abs() { x[j] } else { extreme[j] };
        }
    }
    // The value of the largest magnitude gets the lowest level, because there is one more negative
    // level than positive ones.
    let inverse = extreme.map(|extreme| -(max_level as f32) / extreme);
    let (mut levels, sum_lx, sum_l2) = levels_of(values, inverse, max_level);
    let mut scales: Lanes<f32> =
        std::array::from_fn(|j| if sum_l2[j] == 0.0 { 0.0 } else { sum_lx[j] / sum_l2[j] });
    let mut best: Lanes<f32> = std::array::from_fn(|j| scales[j] * sum_lx[j]);
    // The candidate 0 was the first one, above.
    for i in (-9_i8..=9).filter(|i| *i != 0) {
        let inverse = extreme.map(|extreme| -(max_level as f32 + 0.1 * f32::from(i)) / extreme);
        let (candidate, sum_lx, sum_l2) = levels_of(values, inverse, max_level);
        for j in 0..LANES {
            // Maximizing sum_lx² / sum_l2 minimizes the error of the best scale.
            if sum_l2[j] > 0.0 && sum_lx[j] * sum_lx[j] > best[j] * sum_l2[j] {
                scales[j] = sum_lx[j] / sum_l2[j];
                best[j] = scales[j] * sum_lx[j];
                levels.iter_mut().zip(&candidate).for_each(|(kept, levels)| kept[j] = levels[j]);
            }
        }
    }
    let is_zero = extreme.map(|extreme| extreme.abs() < ALL_ZERO);
    // Their inverse scales were infinite or close to it.
    for j in (0..LANES).filter(|j| is_zero[*j]) {
        scales[j] = 0.0;
        levels.iter_mut().for_each(|levels| levels[j] = 0);
    }
    SymmetricFit { scales, levels }
}

/// Returns the levels with the given inverse scales, and the weighted sums of `value · level` and
/// `level²`, where levels are signed and the weight is the square of the value.
fn levels_of<const N: usize>(
    values: &[Lanes<f32>; N],
    inverse: Lanes<f32>,
    max_level: i32,
) -> ([Lanes<u8>; N], Lanes<f32>, Lanes<f32>) {
    let mut all_levels = [[0_u8; LANES]; N];
    let (mut sum_lx, mut sum_l2) = ([0.0; LANES], [0.0; LANES]);
    for (x, levels) in values.iter().zip(&mut all_levels) {
        for j in 0..LANES {
            let level = nearest_int(inverse[j] * x[j]).clamp(-max_level, max_level - 1);
            levels[j] = (level + max_level) as u8;
            let weight = x[j] * x[j];
            sum_lx[j] += weight * x[j] * level as f32;
            sum_l2[j] += weight * level as f32 * level as f32;
        }
    }
    (all_levels, sum_lx, sum_l2)
}
