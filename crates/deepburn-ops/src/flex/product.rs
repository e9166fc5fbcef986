//! Matrix products on slices, any strides.

use std::marker::PhantomData;

/// A matrix in a slice: element `(i, j)` is at `i * row_stride + j * column_stride`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Matrix<'a> {
    values: &'a [f32],
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a> Matrix<'a> {
    /// Rows of `columns` elements, one every `row_stride` elements.
    pub(crate) fn new(values: &'a [f32], rows: usize, columns: usize, row_stride: usize) -> Self {
        assert!(rows == 0 || (rows - 1) * row_stride + columns <= values.len());
        Self { values, rows, columns, row_stride, column_stride: 1 }
    }

    pub(crate) fn transposed(self) -> Self {
        Self {
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }
}

/// A matrix to be written, whose rows lie apart.
#[derive(Debug)]
pub(crate) struct MatrixMut<'a> {
    values: *mut f32,
    rows: usize,
    columns: usize,
    row_stride: usize,
    life: PhantomData<&'a mut f32>,
}

impl<'a> MatrixMut<'a> {
    /// As [`Matrix::new`].
    pub(crate) fn new(
        values: &'a mut [f32],
        rows: usize,
        columns: usize,
        row_stride: usize,
    ) -> Self {
        assert!(rows == 0 || (rows - 1) * row_stride + columns <= values.len());
        // SAFETY: the slice is borrowed for as long as the matrix lives, and long enough.
        unsafe { Self::from_pointer(values.as_mut_ptr(), rows, columns, row_stride) }
    }

    /// A matrix whose first element is at `values`.
    ///
    /// # Safety
    /// All elements of the matrix are valid for as long as it lives, and nobody else reads or
    /// writes them meanwhile. What lies between its rows may be another's.
    pub(crate) unsafe fn from_pointer(
        values: *mut f32,
        rows: usize,
        columns: usize,
        row_stride: usize,
    ) -> Self {
        Self { values, rows, columns, row_stride, life: PhantomData }
    }
}

/// Who computes a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Threads {
    /// The calling thread: it is one of many.
    One,
    /// All, if the product is worth it.
    All,
}

/// Whether what is in the result already is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Onto {
    /// The product replaces it, unread.
    Nothing,
    /// The product is added to it.
    Sum,
}

/// `out = factor * left * right`, or that added to `out`.
pub(crate) fn multiply(
    out: MatrixMut<'_>,
    onto: Onto,
    left: Matrix<'_>,
    right: Matrix<'_>,
    factor: f32,
    threads: Threads,
) {
    // As burn-flex has it: below this, handing work over costs more than it saves.
    const WORTH_THREADS: usize = 192 * 192 * 192;
    let (m, n, k) = (out.rows, out.columns, left.columns);
    assert!(left.rows == m && right.columns == n && right.rows == k, "{left:?} {right:?}");
    let parallelism = match threads {
        Threads::All if m * n * k >= WORTH_THREADS => gemm::Parallelism::Rayon(0),
        _ => gemm::Parallelism::None,
    };
    // SAFETY: both operands were checked against their slices, the result against its slice or by
    // its maker; without `read_dst` the result is written before it is read.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out.values,
            1,
            out.row_stride as isize,
            onto == Onto::Sum,
            left.values.as_ptr(),
            left.column_stride as isize,
            left.row_stride as isize,
            right.values.as_ptr(),
            right.column_stride as isize,
            right.row_stride as isize,
            1.0,
            factor,
            false,
            false,
            false,
            parallelism,
        );
    }
}
