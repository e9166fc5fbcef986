//! Affine maps.

use burn_backend::tensor::FloatTensor;
use burn_backend::{DType, TensorMetadata};
use burn_flex::{Flex, FlexTensor};
use deepburn_kernels::gemm::{Arithmetic, Matrix, MatrixMut, Product};
use rayon::prelude::*;

use super::array::{
    arithmetic, contiguous, elements, from_values, is_supported, read, widen, with_matrix, written,
};
use super::norm::column_total;
use super::vector::vectorised;
use crate::linear::{LinearGradients, LinearOps};
use crate::portable;

/// Rows that a thread takes at a time.
const ROWS: usize = 64;

vectorised! {
    /// Adds some rows to `sums`.
    fn add_rows(rows: &[f32], sums: &mut [f32]) {
        for row in rows.chunks_exact(sums.len()) {
            for (sum, value) in sums.iter_mut().zip(row) {
                *sum += value;
            }
        }
    }
}

/// `left * right` as a tensor of `dtype`.
fn product(
    left: Matrix<'_>,
    right: Matrix<'_>,
    dtype: DType,
    arithmetic: Arithmetic,
) -> FlexTensor {
    let (rows, columns) = (left.rows(), right.columns());
    written([rows, columns], dtype, |out| {
        // SAFETY: nobody else has the output.
        let out = unsafe { MatrixMut::from_pointer(out.at(0), rows, columns, columns) };
        Product::new(left, right, arithmetic).write_to(out);
    })
}

impl LinearOps for Flex {
    fn fused_linear(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: Option<FloatTensor<Self>>,
    ) -> FloatTensor<Self> {
        let dtype = x.dtype();
        if !is_supported(&x) || !is_supported(&weight) {
            return portable::linear::forward::<Self>(x, weight, bias);
        }
        let arithmetic = arithmetic([dtype, weight.dtype()]);
        let Some(bias) = &bias else {
            return with_matrix(&x, |x| {
                with_matrix(&weight, |weight| product(x, weight, dtype, arithmetic))
            });
        };
        let bias = widen(bias);
        let (rows, columns) = (x.shape()[0], weight.shape()[1]);
        written([rows, columns], dtype, |out| {
            // SAFETY: nobody else has the output.
            let out = unsafe { MatrixMut::from_pointer(out.at(0), rows, columns, columns) };
            with_matrix(&x, |x| {
                with_matrix(&weight, |weight| {
                    Product::new(x, weight, arithmetic).plus(&bias).write_to(out);
                });
            });
        })
    }

    fn linear_x_gradient(grad: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self> {
        let dtype = grad.dtype();
        if !is_supported(&grad) || !is_supported(&weight) {
            return portable::linear::x_gradient::<Self>(grad, weight);
        }
        let arithmetic = arithmetic([dtype, weight.dtype()]);
        with_matrix(&grad, |grad| {
            with_matrix(&weight, |weight| product(grad, weight.transposed(), dtype, arithmetic))
        })
    }

    fn linear_gradients(grad: FloatTensor<Self>, x: FloatTensor<Self>) -> LinearGradients<Self> {
        let dtype = grad.dtype();
        if !is_supported(&grad) || !is_supported(&x) || grad.shape()[1] == 0 {
            return portable::linear::gradients::<Self>(grad, x);
        }
        let arithmetic = arithmetic([x.dtype(), dtype]);
        let grad = contiguous(&grad);
        let weight = with_matrix(&x, |x| {
            with_matrix(&grad, |grad| product(x.transposed(), grad, dtype, arithmetic))
        });
        LinearGradients { weight, bias: row_sum(&grad) }
    }
}

/// The sum of the rows of a contiguous matrix, added in f32.
fn row_sum(matrix: &FlexTensor) -> FlexTensor {
    let (rows, columns) = (matrix.shape()[0], matrix.shape()[1]);
    let values = elements(matrix);
    let partial: Vec<_> = (0..rows.div_ceil(ROWS))
        .into_par_iter()
        .map_init(Vec::new, |room, block| {
            let block = block * ROWS..rows.min((block + 1) * ROWS);
            let mut sums = vec![0.0; columns];
            add_rows(read(values, block.start * columns..block.end * columns, room), &mut sums);
            sums
        })
        .collect();
    let total = column_total(partial.iter().map(Vec::as_slice), columns);
    from_values(total, [columns], matrix.dtype())
}
