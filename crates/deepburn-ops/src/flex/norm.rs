//! Layer normalisation.

use burn_backend::tensor::FloatTensor;
use burn_backend::{DType, TensorMetadata};
use burn_flex::Flex;
use rayon::prelude::*;

use super::array::{
    changed, contiguous, elements, from_values, is_supported, read, widen, written,
};
use super::vector::{combine, sum, vectorised};
use crate::norm::{LayerNormGradients, LayerNormOps, LayerNormOutput, LayerNormSaved};
use crate::portable;

/// Rows that a thread takes at a time.
const ROWS: usize = 32;

/// Mean and reciprocal deviation of a row.
type Statistics = [f32; 2];

vectorised! {
    /// Some rows of `x` to `y`, with the statistics of each.
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

vectorised! {
    /// Some rows of the gradient, by the output on the way in and by `x` on the way out; their share
    /// of the weights' gradients goes to `sums`.
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
            let normalised = |i: usize| (x[i] - mean) * reciprocal;
            let add = |a: f32, b: f32| a + b;
            let mean_grad = combine(width, 0.0, |i| grad[i] * gamma[i], add) / width as f32;
            let along =
                combine(width, 0.0, |i| grad[i] * gamma[i] * normalised(i), add) / width as f32;
            for i in 0..width {
                let normalised = normalised(i);
                gamma_sum[i] += grad[i] * normalised;
                beta_sum[i] += grad[i];
                grad[i] = (grad[i] * gamma[i] - mean_grad - normalised * along) * reciprocal;
            }
        }
    }
}

impl LayerNormOps for Flex {
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
        let x = contiguous(&x);
        let (values, gamma, beta) = (elements(&x), widen(&gamma), widen(&beta));
        let mut statistics = vec![[0.0; 2]; rows];
        let output = written(x.shape(), x.dtype(), |y| {
            // Rows without elements have no statistics to compute.
            let blocks =
                statistics[..if width == 0 { 0 } else { rows }].par_chunks_mut(ROWS).enumerate();
            blocks.for_each_init(
                <[Vec<f32>; 2]>::default,
                |[x_room, y_room], (block, statistics)| {
                    let block = block * ROWS * width..(block * ROWS + statistics.len()) * width;
                    let x = read(values, block.clone(), x_room);
                    let write =
                        |y: &mut [f32]| forward(x, [&gamma, &beta], epsilon as f32, y, statistics);
                    // SAFETY: blocks are disjoint.
                    unsafe { y.write(block, y_room, write) };
                },
            );
        });
        let [mean, reciprocal_deviation] = [0, 1].map(|which| {
            let column = statistics.iter().map(|row| row[which]).collect();
            from_values(column, [rows, 1], DType::F32)
        });
        LayerNormOutput { output, mean, reciprocal_deviation }
    }

    fn layer_norm_backward(
        grad: FloatTensor<Self>,
        saved: LayerNormSaved<Self>,
    ) -> LayerNormGradients<Self> {
        if !is_supported(&saved.x) || grad.dtype() != saved.x.dtype() {
            return portable::norm::backward::<Self>(grad, saved);
        }
        let weight_dtype = saved.gamma.dtype();
        let (x, gamma) = (contiguous(&saved.x), widen(&saved.gamma));
        let values = elements(&x);
        let (mean, reciprocal) = (widen(&saved.mean), widen(&saved.reciprocal_deviation));
        let width = gamma.len();
        let mut partial = Vec::new();
        let grad = changed(grad, |grad| {
            if width == 0 {
                return;
            }
            let blocks = mean.par_chunks(ROWS).zip(reciprocal.par_chunks(ROWS)).enumerate();
            let rooms = <[Vec<f32>; 2]>::default;
            let sums = blocks.map_init(rooms, |[x_room, room], (block, (mean, reciprocal))| {
                let block = block * ROWS * width..(block * ROWS + mean.len()) * width;
                let x = read(values, block.clone(), x_room);
                let [mut gamma_sum, mut beta_sum] = [vec![0.0; width], vec![0.0; width]];
                let sums = [&mut gamma_sum[..], &mut beta_sum[..]];
                let update = |grad: &mut [f32]| backward(grad, x, &gamma, [mean, reciprocal], sums);
                // SAFETY: blocks are disjoint, and all elements of a gradient are written.
                unsafe { grad.update(block, room, update) };
                [gamma_sum, beta_sum]
            });
            partial = sums.collect::<Vec<_>>();
        });
        let [gamma, beta] = [0, 1].map(|which| {
            let total = column_total(partial.iter().map(|sums| &sums[which][..]), gamma.len());
            from_values(total, [gamma.len()], weight_dtype)
        });
        LayerNormGradients { x: grad, gamma, beta }
    }
}

/// Sum of rows of one length, in their order.
pub(super) fn column_total<'a>(rows: impl Iterator<Item = &'a [f32]>, width: usize) -> Vec<f32> {
    let mut total = vec![0.0; width];
    for row in rows {
        for (total, value) in total.iter_mut().zip(row) {
            *total += value;
        }
    }
    total
}
