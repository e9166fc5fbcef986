//! Rotary embeddings, in place.
//!
//! A thread takes some rows at a time. The sines and cosines of a row are used for all of its
//! heads, and the columns behind the rotated heads are neither read nor written.

use burn_backend::tensor::FloatTensor;
use burn_backend::{DType, TensorMetadata};
use burn_flex::{Flex, FlexTensor};
use rayon::prelude::*;

use super::array::{block_rows, changed, is_supported, round, widen};
use super::vector::vectorized;
use crate::portable;
use crate::rotary::{RotaryOps, RotatedHeads};

vectorized! {
    /// Rotates the heads of a row in place. `cos` and `sin` have an element for each pair of
    /// elements of a head.
    fn rotate_row(row: &mut [f32], head_width: usize, cos: &[f32], sin: &[f32]) {
        let half = cos.len();
        for head in row.chunks_exact_mut(head_width) {
            let (first, rest) = head.split_at_mut(half);
            let pairs = first.iter_mut().zip(&mut rest[..half]);
            for ((first, second), (cos, sin)) in pairs.zip(cos.iter().zip(sin)) {
                let (x, y) = (*first, *second);
                *first = x * cos - y * sin;
                *second = y * cos + x * sin;
            }
        }
    }
}

/// Returns the elements of a table in f32, rounded to `dtype` and multiplied by `sign`.
fn table(table: &FlexTensor, dtype: DType, sign: f32) -> Vec<f32> {
    let mut values = widen(table).into_owned();
    round(&mut values, dtype);
    values.iter_mut().for_each(|value| *value *= sign);
    values
}

/// Rotates the heads of all rows in place if the memory of `x` is not shared.
fn rotated(
    x: FlexTensor,
    [cos, sin]: [&FlexTensor; 2],
    heads: RotatedHeads,
    sign: f32,
) -> FlexTensor {
    let ([rows, columns], dtype) = ([x.shape()[0], x.shape()[1]], x.dtype());
    let (positions, half) = (cos.shape()[0], cos.shape()[1]);
    heads.check([rows, columns], [positions, half]);
    // The negative angle has the same cosine and the negative sine.
    let (cos, sin) = (table(cos, dtype, 1.0), table(sin, dtype, sign));
    let width = heads.heads * heads.width;
    changed(x, |x| {
        block_rows(rows, width).for_each_init(Vec::new, |room, row| {
            let at = row % positions * half;
            let [cos, sin] = [&cos, &sin].map(|table| &table[at..at + half]);
            let rotate = |row: &mut [f32]| rotate_row(row, heads.width, cos, sin);
            let heads = row * columns..row * columns + width;
            // SAFETY: rows are disjoint, and all elements of `x` were written.
            unsafe { x.update(heads, room, rotate) };
        });
    })
}

/// Supports f32, f16 and bf16. The scratch memory is a row per thread for 16-bit inputs, and the
/// table in f32.
impl RotaryOps for Flex {
    fn rotate_heads(
        x: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        heads: RotatedHeads,
    ) -> FloatTensor<Self> {
        if !is_supported(&x) {
            return portable::rotary::rotate::<Self>(x, cos, sin, heads);
        }
        rotated(x, [&cos, &sin], heads, 1.0)
    }

    fn rotate_heads_back(
        grad: FloatTensor<Self>,
        cos: FloatTensor<Self>,
        sin: FloatTensor<Self>,
        heads: RotatedHeads,
    ) -> FloatTensor<Self> {
        if !is_supported(&grad) {
            return portable::rotary::rotate_back::<Self>(grad, cos, sin, heads);
        }
        rotated(grad, [&cos, &sin], heads, -1.0)
    }
}
