//! Linear layers as one or two matrix products.
//!
//! The bias is added to the finished f32 sums of the product before they are rounded, so the result
//! is rounded once. The products read transposed operands through their strides and run on all
//! threads.
//!
//! ```text
//! forward           y  = x W + b       [rows, in] x [in, out]
//! input gradient    dx = dy W^T        [rows, out] x [out, in]
//! weight gradient   dW = x^T dy        [in, rows] x [rows, out]
//! bias gradient     db = sum of the rows of dy, in f32
//! ```

use burn_backend::tensor::FloatTensor;
use burn_backend::{DType, TensorMetadata};
use burn_flex::{Flex, FlexTensor};
use deepburn_kernels::gemm::{MatrixMut, Product};
use rayon::prelude::*;

use super::array::{
    arithmetic, contiguous, elements, from_values, is_supported, read, widen, with_matrix, written,
};
use super::norm::column_total;
use super::quantized;
use super::vector::vectorized;
use crate::linear::{LinearGradients, LinearOps};
use crate::portable;
use crate::quantized::QuantizedMatrix;

/// The number of rows that a thread adds at a time for a bias gradient. It fixes the order of the
/// additions.
const ROWS: usize = 64;

vectorized! {
    /// Adds rows to `sums`, one after the other. The length of `sums` is the length of a row and
    /// must not be 0.
    fn add_rows(rows: &[f32], sums: &mut [f32]) {
        for row in rows.chunks_exact(sums.len()) {
            for (sum, value) in sums.iter_mut().zip(row) {
                *sum += value;
            }
        }
    }
}

/// Returns `left * right`, plus a bias, as a tensor of `dtype`, computed by all threads.
fn product(
    left: &FlexTensor,
    right: &FlexTensor,
    bias: Option<&[f32]>,
    dtype: DType,
) -> FlexTensor {
    let (rows, columns) = (left.shape()[0], right.shape()[1]);
    let arithmetic = arithmetic([left.dtype(), right.dtype()]);
    written([rows, columns], dtype, |out| {
        // SAFETY: no other code has access to the output.
        let out = unsafe { MatrixMut::from_pointer(out.at(0), rows, columns, columns) };
        with_matrix(left, |left| {
            with_matrix(right, |right| {
                Product::new(left, right, arithmetic).plus(bias).write_to(out);
            });
        });
    })
}

/// The products use bf16 arithmetic if both operands are bf16, and f32 otherwise. Types other than
/// f32, f16 and bf16 use the portable implementation.
///
/// Transposed matrices and views with other strides are multiplied without a copy. Only negative
/// strides require a copy.
impl LinearOps for Flex {
    /// The result has the type of `x`.
    fn fused_linear(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: Option<FloatTensor<Self>>,
    ) -> FloatTensor<Self> {
        if !is_supported(&x) || !is_supported(&weight) {
            return portable::linear::forward::<Self>(x, weight, bias);
        }
        // A bias has the length of one row, so an f32 copy of it is small.
        let bias = bias.as_ref().map(widen);
        product(&x, &weight, bias.as_deref(), x.dtype())
    }

    /// The result has the type of `grad`.
    fn linear_x_gradient(grad: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self> {
        if !is_supported(&grad) || !is_supported(&weight) {
            return portable::linear::x_gradient::<Self>(grad, weight);
        }
        product(&grad, &weight.transpose(0, 1), None, grad.dtype())
    }

    fn quantized_linear(
        x: FloatTensor<Self>,
        weight: &QuantizedMatrix<Self>,
        bias: Option<FloatTensor<Self>>,
    ) -> FloatTensor<Self> {
        match quantized::product(&x, weight, bias.as_ref()) {
            Some(output) => output,
            None => Self::fused_linear(x, weight.dequantized(), bias),
        }
    }

    fn quantized_x_gradient(
        grad: FloatTensor<Self>,
        weight: &QuantizedMatrix<Self>,
    ) -> FloatTensor<Self> {
        match quantized::product(&grad, &weight.clone().transposed(), None) {
            Some(gradient) => gradient,
            None => Self::linear_x_gradient(grad, weight.dequantized()),
        }
    }

    /// Both gradients have the type of `grad`. Outputs without columns use the portable
    /// implementation, because rows of length 0 cannot be divided into chunks.
    fn linear_gradients(grad: FloatTensor<Self>, x: FloatTensor<Self>) -> LinearGradients<Self> {
        if !is_supported(&grad) || !is_supported(&x) || grad.shape()[1] == 0 {
            return portable::linear::gradients::<Self>(grad, x);
        }
        // The products read any strides, but the bias gradient adds whole rows.
        let grad = contiguous(&grad);
        let weight = product(&x.transpose(0, 1), &grad, None, grad.dtype());
        LinearGradients { weight, bias: row_sum(&grad) }
    }
}

/// Returns the sum of the rows of a contiguous matrix, in the type of the matrix.
///
/// Blocks of [`ROWS`] rows are summed in parallel in f32, and the sums of the blocks are added in
/// their order.
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
