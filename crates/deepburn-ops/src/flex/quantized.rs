//! Products with quantized matrices, a panel at a time.
//!
//! A panel of the matrix is decoded by all threads in the type of the product's operand, and
//! multiplied by all threads while it is in a shared cache:
//!
//! ```text
//! y  = x W       panels of columns of W [in, out]         the columns of y, one panel after the other
//! dx = dy W^T    panels of rows of W                      the columns of dx
//! l  = h W^T     panels of rows of W [vocab, width]       the columns of the logits
//! dh = dl W      panels of rows of W                      added to dh
//! ```
//!
//! Each element of the first three is a sum over all depths, as in the product with the whole
//! matrix, and has the same bits. In the last one, panels divide the depth. Its f32 sums are added
//! panel by panel, which rounds differently.
//!
//! The product of one vector and a transposed matrix whose rows are encoded reads the blocks
//! themselves ([`EncodedRows::multiply`]). Its sums are rounded in another order than with several
//! vectors.

use burn_backend::{DType, TensorMetadata};
use burn_flex::{Flex, FlexTensor};
use bytemuck::Pod;
use deepburn_kernels::gemm::{Arithmetic, Matrix, MatrixMut, Product, Target};
use deepburn_kernels::{Element, EncodedRows, EncodedSlice};
use half::{bf16, f16};
use rayon::prelude::*;

use super::array::{
    arithmetic, is_supported, is_supported_type, unwritten, widen, with_matrix, written,
};
use crate::quantized::{HostBlocks, QuantizedMatrix, with_element};

/// The size of a panel in bytes, which is divided by the length of its rows or columns. A panel of
/// this size is in the caches, and has enough columns that packing the left operand again for each
/// panel is little work.
const PANEL_BYTES: usize = 4 << 20;

/// The minimum number of columns or rows of a panel, and the number of which it has a multiple.
const PANEL_STEP: usize = 64;

/// A quantized matrix in host memory, in the order in which it is stored.
pub(super) struct HostMatrix {
    blocks: HostBlocks,
    rows: usize,
    columns: usize,
    dtype: DType,
}

impl HostMatrix {
    /// Returns the stored matrix, without its transposition.
    pub(super) fn of(matrix: &QuantizedMatrix<Flex>) -> Self {
        let [rows, columns] = matrix.stored();
        Self { blocks: matrix.on_host(), rows, columns, dtype: matrix.dtype() }
    }

    /// Calls `work` with each panel of columns and the number of its first column.
    fn each_columns(&self, mut work: impl FnMut(usize, Matrix<'_>)) {
        let matrix = self.blocks.matrix();
        with_element!(self.dtype, E => {
            let (step, mut room) = (panel::<E>(self.rows, self.columns), Vec::new());
            for first in (0..self.columns).step_by(step) {
                let width = step.min(self.columns - first);
                decode_rows::<E>(&matrix, self.columns, [0, self.rows], [first, width], &mut room);
                work(first, Matrix::new(&room[..], self.rows, width, width));
            }
        });
    }

    /// Calls `work` with each panel of rows and the number of its first row.
    fn each_rows(&self, mut work: impl FnMut(usize, Matrix<'_>)) {
        let matrix = self.blocks.matrix();
        with_element!(self.dtype, E => {
            let (step, mut room) = (panel::<E>(self.columns, self.rows), Vec::new());
            for first in (0..self.rows).step_by(step) {
                let count = step.min(self.rows - first);
                decode_rows::<E>(&matrix, self.columns, [first, count], [0, self.columns], &mut room);
                work(first, Matrix::new(&room[..], count, self.columns, self.columns));
            }
        });
    }

    /// Writes `left` times the stored matrix, or its transposed one, to `out`.
    fn multiply(
        &self,
        left: Matrix<'_>,
        transposed: bool,
        arithmetic: Arithmetic,
        bias: Option<&[f32]>,
        out: &Columns,
    ) {
        let product = |first: usize, panel: Matrix<'_>| {
            let bias = bias.map(|bias| &bias[first..first + panel.columns()]);
            let out = out.columns(first, panel.columns());
            Product::new(left, panel, arithmetic).plus(bias).write_to(out);
        };
        match transposed {
            true => self.each_rows(|first, panel| product(first, panel.transposed())),
            false => self.each_columns(product),
        }
    }

    /// Writes the logits `hidden W^T`, `[rows, vocab]`, to `logits`.
    pub(super) fn logits(&self, hidden: Matrix<'_>, arithmetic: Arithmetic, logits: &mut [f32]) {
        let out =
            Columns { first: logits.as_mut_ptr().into(), rows: hidden.rows(), columns: self.rows };
        assert_eq!(logits.len(), out.rows * out.columns, "logits of all rows");
        self.multiply(hidden, true, arithmetic, None, &out);
    }

    /// Writes `grad W`, `[rows, width]`, to `out`. `grad` has the gradients of the logits.
    pub(super) fn hidden_gradient(
        &self,
        grad: Matrix<'_>,
        arithmetic: Arithmetic,
        out: &mut [f32],
    ) {
        let rows = grad.rows();
        self.each_rows(|first, panel| {
            let product = Product::new(grad.columns_from(first, panel.rows()), panel, arithmetic);
            let out = MatrixMut::new(out, rows, self.columns, self.columns);
            // Panels of rows divide the depth of this product, so each adds to the sums of the ones
            // before.
            if first == 0 { product.write_to(out) } else { product.add_to(out) }
        });
    }
}

/// A result that is written in panels of columns.
struct Columns {
    first: Target,
    rows: usize,
    columns: usize,
}

impl Columns {
    /// Returns `count` columns from `first` on. The caller uses one panel at a time.
    fn columns(&self, first: usize, count: usize) -> MatrixMut<'_> {
        // SAFETY: the memory is borrowed as long as `self`, no other code has access to it, and the
        // columns are inside.
        unsafe { MatrixMut::from_pointer(self.first.add(first), self.rows, count, self.columns) }
    }
}

/// Returns the number of rows or columns of `depth` elements in a panel: about equal parts of
/// `count`.
fn panel<E>(depth: usize, count: usize) -> usize {
    let most = (PANEL_BYTES / (depth * size_of::<E>()).max(1)).max(PANEL_STEP);
    let parts = count.div_ceil(most / PANEL_STEP * PANEL_STEP).max(1);
    count.div_ceil(parts).max(1).next_multiple_of(PANEL_STEP)
}

/// Decodes the columns `columns` (start and count) of the rows `rows` (start and count) of a matrix
/// whose rows have `width` elements.
fn decode_rows<E: Element + Pod>(
    matrix: &EncodedSlice<'_>,
    width: usize,
    rows: [usize; 2],
    columns: [usize; 2],
    room: &mut Vec<E>,
) {
    let ([row, count], [column, len]) = (rows, columns);
    if room.len() < count * len {
        *room = unwritten(count * len);
    }
    // The last panel may be shorter. The content of the vector stays, because all of it is
    // overwritten.
    room.truncate(count * len);
    let rows = room.par_chunks_mut(len.max(1)).enumerate().with_min_len(16);
    rows.for_each(|(index, out)| matrix.decode((row + index) * width + column, out));
}

/// Returns `left` times the matrix, plus a bias, in the type of `left`; `None` if a kernel does not
/// support the types.
pub(super) fn product(
    left: &FlexTensor,
    matrix: &QuantizedMatrix<Flex>,
    bias: Option<&FlexTensor>,
) -> Option<FlexTensor> {
    let dtype = left.dtype();
    if !is_supported(left) || !is_supported_type(matrix.dtype()) {
        return None;
    }
    let (rows, [_, columns]) = (left.shape()[0], matrix.shape());
    let (blocks, bias) = (HostMatrix::of(matrix), bias.map(widen));
    // A new token of generation: with one row, decoding a panel would take longer than its product.
    if let (1, true, EncodedSlice::ByRow(encoded)) =
        (rows, matrix.is_transposed(), blocks.blocks.matrix())
    {
        return Some(vector_product(left, &encoded, bias.as_deref()));
    }
    let arithmetic = arithmetic([dtype, matrix.dtype()]);
    Some(written([rows, columns], dtype, |out| {
        let out = Columns { first: out.at(0), rows, columns };
        with_matrix(left, |left| {
            blocks.multiply(left, matrix.is_transposed(), arithmetic, bias.as_deref(), &out);
        });
    }))
}

/// Returns the vector `left`, `[1, depth]`, times the transposed matrix, plus a bias, in the type
/// of `left`. The elements of the matrix are not rounded to another type.
fn vector_product(left: &FlexTensor, matrix: &EncodedRows<'_>, bias: Option<&[f32]>) -> FlexTensor {
    let columns = matrix.rows();
    written([1, columns], left.dtype(), |out| {
        let product = |out: &mut [f32]| matrix.multiply(&widen(left), bias, out);
        // SAFETY: no other code has access to the output.
        unsafe { out.write(0..columns, &mut Vec::new(), product) };
    })
}
