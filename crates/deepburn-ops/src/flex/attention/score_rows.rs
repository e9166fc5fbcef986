//! Arithmetic on rows of scores and weights, a row for each query of a block.

use std::ops::Range;

use crate::attention::dropout::DropoutRow;
use crate::flex::vector::{combine, dot, exp, max, tanh, vectorized};

vectorized! {
    /// Turns the scores of a block of queries into attention weights in place, and stores the
    /// log-sum-exp of each row in `log_sums`.
    ///
    /// `scores` has rows of `keys` elements. Each query attends to the keys in its element of
    /// `visible`. The weights of the other keys are 0.
    pub(super) fn softmax_rows(
        scores: &mut [f32],
        keys: usize,
        visible: &[Range<usize>],
        log_sums: &mut [f32],
    ) {
        let rows = scores.chunks_exact_mut(keys).zip(log_sums).zip(visible);
        for ((row, log_sum), visible) in rows {
            let (row, after) = row.split_at_mut(visible.end);
            let (before, seen) = row.split_at_mut(visible.start);
            // The exponential of the largest score is 1 after the shift, so the sum is not 0. A
            // query that sees none of the keys has a log-sum of minus infinity and no weight.
            let largest = max(seen);
            for score in seen.iter_mut() {
                *score = exp(*score - largest);
            }
            let sum = combine(seen.len(), 0.0, |i| seen[i], |a, b| a + b);
            // One division per row instead of one per key.
            let factor = 1.0 / sum;
            for weight in seen.iter_mut() {
                *weight *= factor;
            }
            // The product with the values runs over all keys of the block.
            before.fill(0.0);
            after.fill(0.0);
            *log_sum = largest + sum.ln();
        }
    }
}

vectorized! {
    /// Adds the attention of each query to a part of its keys, `part`, to its attention to other
    /// keys, `total`. Both have rows of `width` elements, and both are divided by their own sum of
    /// exponentials, whose logarithms are `part_log_sums` and `log_sums`. The result is the
    /// attention to all of these keys, and its log-sum-exp.
    pub(super) fn merge_rows(
        total: &mut [f32],
        log_sums: &mut [f32],
        part: &[f32],
        part_log_sums: &[f32],
        width: usize,
    ) {
        let rows = total.chunks_exact_mut(width).zip(part.chunks_exact(width));
        for ((total, part), (log_sum, part_log_sum)) in rows.zip(log_sums.iter_mut().zip(part_log_sums)) {
            if *part_log_sum == f32::NEG_INFINITY {
                continue;
            }
            // NaN in one of both makes the row NaN.
            let largest = if *log_sum > *part_log_sum { *log_sum } else { *part_log_sum };
            let [old, new] = [*log_sum, *part_log_sum].map(|log_sum| exp(log_sum - largest));
            let sum = old + new;
            let [old, new] = [old / sum, new / sum];
            for (total, part) in total.iter_mut().zip(part) {
                *total = *total * old + part * new;
            }
            *log_sum = largest + sum.ln();
        }
    }
}

vectorized! {
    /// Recomputes the attention weights of the forward pass from the scores and the saved log-sums:
    /// `exp(score - log_sum)`.
    ///
    /// The backward pass therefore does not compute the maximum and the sum of a row again. The
    /// arguments are the same as for [`softmax_rows`].
    pub(super) fn weighted_rows(
        scores: &mut [f32],
        keys: usize,
        visible: &[Range<usize>],
        log_sums: &[f32],
    ) {
        let rows = scores.chunks_exact_mut(keys).zip(log_sums).zip(visible);
        for ((row, log_sum), visible) in rows {
            let (row, after) = row.split_at_mut(visible.end);
            let (before, seen) = row.split_at_mut(visible.start);
            for score in seen {
                *score = exp(*score - log_sum);
            }
            before.fill(0.0);
            after.fill(0.0);
        }
    }
}

vectorized! {
    /// Turns the gradients with respect to the weights into gradients with respect to the scores:
    /// `p (g - c)`, with the correction `c` of the row (Dao et al. 2022, appendix B.2). A weight of
    /// 0 gives 0 if the gradient is finite, so masked keys get no gradient.
    pub(super) fn score_gradient(grad: &mut [f32], weights: &[f32], keys: usize, corrections: &[f32]) {
        let rows = grad.chunks_exact_mut(keys).zip(weights.chunks_exact(keys)).zip(corrections);
        for ((grad, weights), correction) in rows {
            for (grad, weight) in grad.iter_mut().zip(weights) {
                *grad = weight * (*grad - correction);
            }
        }
    }
}

vectorized! {
    /// Limits scores to `cap`, in place: `cap tanh(score / cap)`.
    pub(super) fn cap_scores(scores: &mut [f32], cap: f32) {
        for score in scores {
            *score = cap * tanh(*score / cap);
        }
    }
}

vectorized! {
    /// Does the same, and stores the derivative of each limited score, `1 - tanh^2`.
    pub(super) fn cap_with_slopes(scores: &mut [f32], cap: f32, slopes: &mut [f32]) {
        for (score, slope) in scores.iter_mut().zip(slopes) {
            let tanh = tanh(*score / cap);
            *score = cap * tanh;
            *slope = 1.0 - tanh * tanh;
        }
    }
}

vectorized! {
    /// Multiplies the gradients of scores by the slopes of the limit. A masked score has no slope:
    /// it may be NaN, and its gradient stays unchanged.
    pub(super) fn scale_by_slopes(grad: &mut [f32], slopes: &[f32], keys: usize, visible: &[Range<usize>]) {
        let rows = grad.chunks_exact_mut(keys).zip(slopes.chunks_exact(keys)).zip(visible);
        for ((grad, slopes), visible) in rows {
            let seen = grad[visible.clone()].iter_mut().zip(&slopes[visible.clone()]);
            for (grad, slope) in seen {
                *grad *= slope;
            }
        }
    }
}

vectorized! {
    /// Returns the dot product of two rows, compiled for the widest vectors.
    pub(super) fn row_product(left: &[f32], right: &[f32]) -> f32 {
        dot(left, right)
    }
}

vectorized! {
    /// Multiplies the weights of a query by 0 where they are dropped, and otherwise by `kept`,
    /// which is `1 / (1 - probability)`. `first` is the position of the first key.
    pub(super) fn drop_row(weights: &mut [f32], first: usize, row: DropoutRow, kept: f32) {
        for (key, weight) in weights.iter_mut().enumerate() {
            *weight *= if row.drops((first + key) as u32) { 0.0 } else { kept };
        }
    }
}
