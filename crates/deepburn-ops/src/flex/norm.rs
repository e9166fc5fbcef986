//! Layer normalization, one pass over blocks of rows.
//!
//! A thread takes 32 rows at a time. For each row it computes the mean, then the variance of the
//! centered elements, then the output, while the row is in the cache. The variance is a sum of
//! squared differences, not a difference of large numbers.
//!
//! The backward pass updates the gradient in place. The gradients of `gamma` and `beta` are sums
//! over all rows: each block computes partial sums, which are added in the order of the blocks.
//!
//! ```text
//! grad [rows, width]     rows 0 .. 31    --> sums 0 [width] --+
//!                        rows 32 .. 63   --> sums 1 [width] --+--> gamma and beta gradient
//!                        rows 64 .. 95   --> sums 2 [width] --+    added from first to last
//! ```
//!
//! All arithmetic is f32, and sums are in the order of the function `combine`. A row with an
//! element that is not finite becomes NaN. Other rows are not affected, but the gradients of
//! `gamma` and `beta` are, because they are sums over all rows.

use burn_backend::tensor::FloatTensor;
use burn_backend::{DType, TensorMetadata};
use burn_flex::Flex;

use super::array::{from_values, is_supported, widen};
use super::blockwise::{map_blocks, update_blocks};
use super::vector::{combine, sum, vectorized};
use crate::norm::{LayerNormGradients, LayerNormOps, LayerNormOutput, LayerNormSaved};
use crate::portable;

/// The number of rows that a thread takes at a time. It fixes the order of the sums over rows.
pub(super) const ROWS: usize = 32;

/// The mean of a row and the reciprocal of its deviation, `1 / sqrt(variance + epsilon)`.
type Statistics = [f32; 2];

vectorized! {
    /// Normalizes rows of `x` into `y` and stores the statistics of each row.
    ///
    /// `weights` are `gamma` and `beta`, whose length is the width of a row and must not be 0.
    ///
    /// A row is read three times, for mean, variance and output, from the first-level cache if it
    /// is not longer than some thousand elements.
    fn forward(
        x: &[f32],
        weights: [&[f32]; 2],
        epsilon: f32,
        y: &mut [f32],
        statistics: &mut [Statistics],
    ) {
        let [gamma, beta] = weights;
        let width = gamma.len();
        let rows = x.chunks_exact(width).zip(y.chunks_exact_mut(width));
        for ((x, y), statistics) in rows.zip(statistics) {
            let mean = sum(x) / width as f32;
            let square = |i: usize| (x[i] - mean) * (x[i] - mean);
            let variance = combine(width, 0.0, square, |a, b| a + b) / width as f32;
            let reciprocal = 1.0 / (variance + epsilon).sqrt();
            for (((y, x), gamma), beta) in y.iter_mut().zip(x).zip(gamma).zip(beta) {
                *y = (x - mean) * reciprocal * gamma + beta;
            }
            *statistics = [mean, reciprocal];
        }
    }
}

vectorized! {
    /// Turns rows of the gradient of the output into rows of the gradient of `x`, in place:
    /// `r (g - mean(g) - n mean(g n))` with `g = grad gamma`, the normalized row `n` and its
    /// reciprocal deviation `r`.
    ///
    /// `statistics` are the means and the reciprocal deviations of the rows. The contribution of
    /// these rows to the gradients of `gamma` and `beta` is added to `sums`.
    fn backward(
        grad: &mut [f32],
        x: &[f32],
        gamma: &[f32],
        statistics: [&[f32]; 2],
        sums: [&mut [f32]; 2],
    ) {
        let [gamma_sum, beta_sum] = sums;
        let width = gamma.len();
        let rows = grad.chunks_exact_mut(width).zip(x.chunks_exact(width));
        for ((grad, x), (mean, reciprocal)) in rows.zip(statistics[0].iter().zip(statistics[1])) {
            let normalized = |i: usize| (x[i] - mean) * reciprocal;
            let add = |a: f32, b: f32| a + b;
            // Both means are over the row and need the gradient before it is overwritten.
            let mean_grad = combine(width, 0.0, |i| grad[i] * gamma[i], add) / width as f32;
            let along =
                combine(width, 0.0, |i| grad[i] * gamma[i] * normalized(i), add) / width as f32;
            for i in 0..width {
                let normalized = normalized(i);
                // The gradients of the weights use the gradient of the output, so they come before
                // it is overwritten.
                gamma_sum[i] += grad[i] * normalized;
                beta_sum[i] += grad[i];
                grad[i] = (grad[i] * gamma[i] - mean_grad - normalized * along) * reciprocal;
            }
        }
    }
}

/// Supports f32, f16 and bf16 rows. The weights may have another type, because they are widened to
/// f32 completely.
///
/// In the forward pass, the scratch memory of a thread is two blocks of f32 rows for 16-bit inputs
/// and none for f32. In the backward pass, it also includes two rows of sums per block, `2 * width`
/// f32 for every 32 rows, until the sums of all blocks are added.
///
/// Rows are not divided: one thread computes all sums over a row, so a single very long row uses
/// one thread.
impl LayerNormOps for Flex {
    /// Allocates the output and two f32 numbers per row. `epsilon` is rounded to f32.
    fn layer_norm_forward(
        x: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        beta: FloatTensor<Self>,
        epsilon: f64,
    ) -> LayerNormOutput<Self> {
        if !is_supported(&x) {
            return portable::norm::forward::<Self>(x, gamma, beta, epsilon);
        }
        let (rows, width) = (x.shape()[0], x.shape()[1]);
        let (gamma, beta) = (widen(&gamma), widen(&beta));
        let (output, statistics) = map_blocks([&x], x.dtype(), ROWS * width, |_, [x], y| {
            let mut statistics = vec![[0.0; 2]; x.len() / width];
            forward(x, [&gamma, &beta], epsilon as f32, y, &mut statistics);
            statistics
        });
        let mut statistics = statistics.concat();
        // Rows without elements are in no block, and have no statistics to compute.
        statistics.resize(rows, [0.0; 2]);
        let [mean, reciprocal_deviation] = [0, 1].map(|which| {
            let column = statistics.iter().map(|row| row[which]).collect();
            from_values(column, [rows, 1], DType::F32)
        });
        LayerNormOutput { output, mean, reciprocal_deviation }
    }

    /// Updates `grad` in place if its memory is not shared. Gradients of another type than `x` use
    /// the portable implementation.
    fn layer_norm_backward(
        grad: FloatTensor<Self>,
        saved: LayerNormSaved<Self>,
    ) -> LayerNormGradients<Self> {
        if !is_supported(&saved.x) || grad.dtype() != saved.x.dtype() {
            return portable::norm::backward::<Self>(grad, saved);
        }
        let weight_dtype = saved.gamma.dtype();
        let (gamma, statistics) =
            (widen(&saved.gamma), [&saved.mean, &saved.reciprocal_deviation].map(widen));
        let width = gamma.len();
        let update = |block: usize, [x]: [&[f32]; 1], grad: &mut [f32]| {
            let rows = block * ROWS..block * ROWS + x.len() / width;
            let statistics = statistics.each_ref().map(|all| &all[rows.clone()]);
            // Each block has its own sums, because blocks run on several threads. They are added in
            // the order of the blocks below.
            let mut sums = [vec![0.0; width], vec![0.0; width]];
            backward(grad, x, &gamma, statistics, sums.each_mut().map(Vec::as_mut_slice));
            sums
        };
        let (grad, partial) = update_blocks(grad, [&saved.x], ROWS * width, update);
        let [gamma, beta] = [0, 1].map(|which| {
            let total = column_total(partial.iter().map(|sums| &sums[which][..]), gamma.len());
            from_values(total, [gamma.len()], weight_dtype)
        });
        LayerNormGradients { x: grad, gamma, beta }
    }
}

/// Returns the element-wise sum of rows of length `width`, added in f32 in the order of the
/// iterator.
pub(super) fn column_total<'a>(rows: impl Iterator<Item = &'a [f32]>, width: usize) -> Vec<f32> {
    let mut total = vec![0.0; width];
    for row in rows {
        for (total, value) in total.iter_mut().zip(row) {
            *total += value;
        }
    }
    total
}
