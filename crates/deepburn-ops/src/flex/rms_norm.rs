//! RMS normalization, one pass over blocks of rows.
//!
//! Rows are divided as in layer normalization: a thread takes 32 rows at a time, the backward pass
//! updates the gradient in place, and the partial gradients of the weight are added in the order of
//! the blocks.
//!
//! All arithmetic is f32, and sums are in the order of the function `combine`.

use burn_backend::tensor::FloatTensor;
use burn_backend::{DType, TensorMetadata};
use burn_flex::Flex;

use super::array::{from_values, is_supported, round, widen};
use super::blockwise::{map_blocks, update_blocks};
use super::norm::{ROWS, column_total};
use super::vector::{combine, dot, vectorized};
use crate::portable;
use crate::rms_norm::{
    RmsNorm, RmsNormGradients, RmsNormOps, RmsNormOutput, RmsNormSaved, RmsWeight,
};

vectorized! {
    /// Writes the quotients of rows of `x` to `y`, and the reciprocal root of each row to `roots`.
    fn quotients(x: &[f32], width: usize, epsilon: f32, y: &mut [f32], roots: &mut [f32]) {
        let rows = x.chunks_exact(width).zip(y.chunks_exact_mut(width));
        for ((x, y), root) in rows.zip(roots) {
            *root = 1.0 / (dot(x, x) / width as f32 + epsilon).sqrt();
            for (y, x) in y.iter_mut().zip(x) {
                *y = x * *root;
            }
        }
    }
}

vectorized! {
    /// Multiplies each row of `y` by `factor`.
    fn scale_rows(y: &mut [f32], factor: &[f32]) {
        for y in y.chunks_exact_mut(factor.len()) {
            for (y, factor) in y.iter_mut().zip(factor) {
                *y *= factor;
            }
        }
    }
}

vectorized! {
    /// Turns rows of the gradient of the output into rows of the gradient of `x`, in place:
    /// `r (g - q mean(g q))` with `g = grad factor`, the quotients `q = x r` and the reciprocal
    /// root `r`.
    ///
    /// The contribution of these rows to the gradient of the weight is added to `weight_sum`.
    fn backward(
        grad: &mut [f32],
        x: &[f32],
        factor: &[f32],
        roots: &[f32],
        weight_sum: &mut [f32],
    ) {
        let width = factor.len();
        let rows = grad.chunks_exact_mut(width).zip(x.chunks_exact(width));
        for ((grad, x), root) in rows.zip(roots) {
            let product = |i: usize| grad[i] * factor[i] * (x[i] * root);
            // The mean needs the gradient before it is overwritten.
            let along = combine(width, 0.0, product, |a, b| a + b) / width as f32;
            for i in 0..width {
                let quotient = x[i] * root;
                weight_sum[i] += grad[i] * quotient;
                grad[i] = (grad[i] * factor[i] - quotient * along) * root;
            }
        }
    }
}

/// Returns the factor of each column in f32.
fn factor(weight: &FloatTensor<Flex>, norm: RmsNorm) -> Vec<f32> {
    let weight = widen(weight);
    match norm.weight {
        RmsWeight::Factor => weight.into_owned(),
        RmsWeight::PlusOne => weight.iter().map(|weight| 1.0 + weight).collect(),
    }
}

/// Supports f32, f16 and bf16 rows. The weight may have another type, because it is widened to f32
/// completely.
///
/// The scratch memory of a thread is two blocks of f32 rows for 16-bit inputs. The backward pass
/// also needs `width` f32 for every 32 rows, until the sums of all blocks are added.
impl RmsNormOps for Flex {
    /// Allocates the output and one f32 per row. `epsilon` is rounded to f32.
    fn rms_norm_forward(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        norm: RmsNorm,
    ) -> RmsNormOutput<Self> {
        if !is_supported(&x) {
            return portable::rms_norm::forward::<Self>(x, weight, norm);
        }
        let (rows, width, dtype) = (x.shape()[0], x.shape()[1], x.dtype());
        let factor = factor(&weight, norm);
        let (output, roots) = map_blocks([&x], dtype, ROWS * width, |_, [x], y| {
            let mut roots = vec![0.0; x.len() / width];
            quotients(x, width, norm.epsilon as f32, y, &mut roots);
            if norm.weight == RmsWeight::Factor {
                // The reference rounds the quotient to the type of `x` before the product with the
                // weight.
                round(y, dtype);
            }
            scale_rows(y, &factor);
            roots
        });
        let mut roots = roots.concat();
        // Rows without elements are in no block, and have no root to compute.
        roots.resize(rows, 0.0);
        RmsNormOutput { output, reciprocal_root: from_values(roots, [rows, 1], DType::F32) }
    }

    /// Updates `grad` in place if its memory is not shared. Gradients of another type than `x` use
    /// the portable implementation.
    fn rms_norm_backward(
        grad: FloatTensor<Self>,
        saved: RmsNormSaved<Self>,
        norm: RmsNorm,
    ) -> RmsNormGradients<Self> {
        if !is_supported(&saved.x) || grad.dtype() != saved.x.dtype() {
            return portable::rms_norm::backward::<Self>(grad, saved, norm);
        }
        let weight_dtype = saved.weight.dtype();
        let (factor, roots) = (factor(&saved.weight, norm), widen(&saved.reciprocal_root));
        let width = factor.len();
        let update = |block: usize, [x]: [&[f32]; 1], grad: &mut [f32]| {
            let roots = &roots[block * ROWS..block * ROWS + x.len() / width];
            let mut weight_sum = vec![0.0; width];
            backward(grad, x, &factor, roots, &mut weight_sum);
            weight_sum
        };
        let (grad, partial) = update_blocks(grad, [&saved.x], ROWS * width, update);
        let total = column_total(partial.iter().map(Vec::as_slice), width);
        RmsNormGradients { x: grad, weight: from_values(total, [width], weight_dtype) }
    }
}
