//! Operands and results of products: elements in memory with strides.

use std::marker::PhantomData;

use half::{bf16, f16};

use crate::FloatSlice;

/// A read-only matrix. Element `(i, j)` is at index `i * row_stride + j * column_stride`.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'a> {
    pub(super) elements: FloatSlice<'a>,
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) row_stride: usize,
    pub(super) column_stride: usize,
}

impl<'a> Matrix<'a> {
    /// Creates a matrix of `[rows, columns]` elements with strides `[row_stride, column_stride]`,
    /// in elements. A stride of 0 repeats a row or a column.
    ///
    /// # Panics
    /// Panics if an element is outside of `elements`.
    pub fn strided(
        elements: impl Into<FloatSlice<'a>>,
        shape: [usize; 2],
        strides: [usize; 2],
    ) -> Self {
        let (elements, [rows, columns], [row_stride, column_stride]) =
            (elements.into(), shape, strides);
        if rows > 0 && columns > 0 {
            // Checked arithmetic: an index that wraps around would accept strides that lead out of
            // the slice.
            let last_row = (rows - 1).checked_mul(row_stride);
            let last_column = (columns - 1).checked_mul(column_stride);
            let last = last_row.zip(last_column).and_then(|(row, column)| row.checked_add(column));
            assert!(
                last.is_some_and(|last| last < elements.len()),
                "{shape:?} with strides {strides:?} in {} elements",
                elements.len()
            );
        }
        Self { elements, rows, columns, row_stride, column_stride }
    }

    /// Creates a matrix whose rows start every `row_stride` elements.
    ///
    /// # Panics
    /// Panics under the same conditions as [`Self::strided`].
    pub fn new(
        elements: impl Into<FloatSlice<'a>>,
        rows: usize,
        columns: usize,
        row_stride: usize,
    ) -> Self {
        Self::strided(elements, [rows, columns], [row_stride, 1])
    }

    /// Returns the same elements with rows and columns exchanged.
    pub fn transposed(self) -> Self {
        Self {
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
            ..self
        }
    }

    /// Returns the number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the number of columns.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Returns columns `start..start + columns`.
    ///
    /// # Panics
    /// Panics if an element is outside of the matrix's elements.
    pub fn columns_from(self, start: usize, columns: usize) -> Self {
        let elements =
            self.elements.starting_at((start * self.column_stride).min(self.elements.len()));
        Self::strided(elements, [self.rows, columns], [self.row_stride, self.column_stride])
    }

    /// Returns rows `start..start + rows`.
    pub(super) fn rows_from(self, start: usize, rows: usize) -> Self {
        self.transposed().columns_from(start, rows).transposed()
    }
}

/// A pointer to the first element of a result.
#[derive(Debug, Clone, Copy)]
pub enum Target {
    /// Single precision.
    F32(*mut f32),
    /// IEEE half precision.
    F16(*mut f16),
    /// bfloat16.
    Bf16(*mut bf16),
}

impl Target {
    /// Returns a pointer that is `count` elements after this one.
    ///
    /// # Safety
    /// The same conditions as for
    /// [`pointer::add`](https://doc.rust-lang.org/std/primitive.pointer.html#method.add): both
    /// pointers are in the same array.
    pub unsafe fn add(self, count: usize) -> Self {
        // SAFETY: as the caller promises.
        unsafe {
            match self {
                Self::F32(first) => Self::F32(first.add(count)),
                Self::F16(first) => Self::F16(first.add(count)),
                Self::Bf16(first) => Self::Bf16(first.add(count)),
            }
        }
    }
}

impl From<*mut f32> for Target {
    fn from(pointer: *mut f32) -> Self {
        Self::F32(pointer)
    }
}

impl From<*mut f16> for Target {
    fn from(pointer: *mut f16) -> Self {
        Self::F16(pointer)
    }
}

impl From<*mut bf16> for Target {
    fn from(pointer: *mut bf16) -> Self {
        Self::Bf16(pointer)
    }
}

/// A mutable matrix, whose rows need not be adjacent in memory.
#[derive(Debug)]
pub struct MatrixMut<'a> {
    pub(super) target: Target,
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) row_stride: usize,
    life: PhantomData<&'a mut f32>,
}

// SAFETY: the creator of the matrix promised that no other code accesses its elements during its
// lifetime.
unsafe impl Send for MatrixMut<'_> {}
// SAFETY: only this crate writes through a shared reference, and each element is written by one
// thread only.
unsafe impl Sync for MatrixMut<'_> {}

impl<'a> MatrixMut<'a> {
    /// Creates a matrix whose rows start every `row_stride` elements.
    ///
    /// # Panics
    /// Panics if an element is outside of `elements`, or if rows overlap.
    pub fn new<E>(elements: &'a mut [E], rows: usize, columns: usize, row_stride: usize) -> Self
    where
        *mut E: Into<Target>,
    {
        let end = rows
            .saturating_sub(1)
            .checked_mul(row_stride)
            .and_then(|last| last.checked_add(columns));
        assert!(rows == 0 || end.is_some_and(|end| end <= elements.len()));
        // SAFETY: the slice is borrowed for the lifetime of the matrix, and it is long enough.
        unsafe { Self::from_pointer(elements.as_mut_ptr(), rows, columns, row_stride) }
    }

    /// Creates a matrix whose first element is at `pointer`.
    ///
    /// # Safety
    /// All elements of the matrix are valid during its lifetime, and no other code reads or writes
    /// them during this time. The memory between the rows may be used by other code.
    ///
    /// # Panics
    /// Panics if rows overlap.
    pub unsafe fn from_pointer(
        pointer: impl Into<Target>,
        rows: usize,
        columns: usize,
        row_stride: usize,
    ) -> Self {
        assert!(
            rows <= 1 || columns <= row_stride,
            "rows of {columns} elements {row_stride} apart"
        );
        Self { target: pointer.into(), rows, columns, row_stride, life: PhantomData }
    }
}
