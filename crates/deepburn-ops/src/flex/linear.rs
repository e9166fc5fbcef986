//! Affine maps.

use burn_backend::tensor::FloatTensor;
use burn_backend::{DType, TensorMetadata};
use burn_flex::{Flex, FlexTensor};
use rayon::prelude::*;

use super::array::{from_values, unwritten, widen};
use super::norm::column_total;
use super::product::{Matrix, MatrixMut, Onto, Threads, multiply};
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

/// A contiguous matrix of rank 2.
pub(super) fn matrix<'a>(values: &'a [f32], tensor: &FlexTensor) -> Matrix<'a> {
    let (rows, columns) = (tensor.shape()[0], tensor.shape()[1]);
    Matrix::new(values, rows, columns, columns)
}

/// The product of two matrices as a tensor.
fn product(left: Matrix<'_>, right: Matrix<'_>) -> FlexTensor {
    let (rows, columns) = (left.rows, right.columns);
    let mut values = unwritten(rows * columns);
    let out = MatrixMut::new(&mut values, rows, columns, columns);
    multiply(out, Onto::Nothing, left, right, 1.0, Threads::All);
    from_values(values, [rows, columns], DType::F32)
}

/// 16-bit products are left to burn-flex, which multiplies in that type.
impl LinearOps for Flex {
    fn fused_linear(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: Option<FloatTensor<Self>>,
    ) -> FloatTensor<Self> {
        let (DType::F32, Some(bias)) = (x.dtype(), &bias) else {
            return portable::linear::forward::<Self>(x, weight, bias);
        };
        let (rows, columns) = (x.shape()[0], weight.shape()[1]);
        let (x_values, weight_values, bias) = (widen(&x), widen(&weight), widen(bias));
        let mut y = unwritten(rows * columns);
        y.par_chunks_mut(ROWS * columns.max(1)).for_each(|rows| {
            rows.chunks_exact_mut(columns).for_each(|row| row.copy_from_slice(&bias));
        });
        multiply(
            MatrixMut::new(&mut y, rows, columns, columns),
            Onto::Sum,
            matrix(&x_values, &x),
            matrix(&weight_values, &weight),
            1.0,
            Threads::All,
        );
        from_values(y, [rows, columns], DType::F32)
    }

    fn linear_x_gradient(grad: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self> {
        if grad.dtype() != DType::F32 {
            return portable::linear::x_gradient::<Self>(grad, weight);
        }
        let (grad_values, weight_values) = (widen(&grad), widen(&weight));
        product(matrix(&grad_values, &grad), matrix(&weight_values, &weight).transposed())
    }

    fn linear_gradients(grad: FloatTensor<Self>, x: FloatTensor<Self>) -> LinearGradients<Self> {
        if grad.dtype() != DType::F32 {
            return portable::linear::gradients::<Self>(grad, x);
        }
        let columns = grad.shape()[1];
        let (x_values, grad_values) = (widen(&x), widen(&grad));
        let weight = product(matrix(&x_values, &x).transposed(), matrix(&grad_values, &grad));
        let partial: Vec<_> = grad_values
            .par_chunks(ROWS * columns.max(1))
            .map(|rows| {
                let mut sums = vec![0.0; columns];
                add_rows(rows, &mut sums);
                sums
            })
            .collect();
        let total = column_total(partial.iter().map(Vec::as_slice), columns);
        LinearGradients { weight, bias: from_values(total, [columns], DType::F32) }
    }
}
