//! Writing finished sums to the result.

use half::{bf16, f16};

use super::matrix::{MatrixMut, Target};
use crate::element::Element;

/// The epilogue of a product, the conversion of its sums to elements of the result:
/// `element = factor * sum + bias`, or `element += factor * sum + bias` if `accumulate` is true.
#[derive(Debug, Clone, Copy)]
pub(super) struct Epilogue<'a> {
    pub(super) factor: f32,
    /// One number per column.
    pub(super) bias: Option<&'a [f32]>,
    pub(super) accumulate: bool,
}

impl<'a> Epilogue<'a> {
    /// Returns the epilogue for a range of the columns.
    pub(super) fn columns(self, start: usize, columns: usize) -> Self {
        Self { bias: self.bias.map(|bias| &bias[start..start + columns]), ..self }
    }
}

/// Consecutive elements of a row of the result.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowMut<'a> {
    target: Target,
    epilogue: Epilogue<'a>,
}

impl<'a> RowMut<'a> {
    /// Returns the elements of row `row` from column `column` on.
    ///
    /// # Safety
    /// The elements that are written are in the matrix, and no other thread accesses them.
    pub(super) unsafe fn new(
        out: &MatrixMut<'_>,
        row: usize,
        column: usize,
        epilogue: Epilogue<'a>,
    ) -> Self {
        // SAFETY: in the matrix, as the caller promises.
        let target = unsafe { out.target.add(row * out.row_stride + column) };
        Self { target, epilogue }
    }

    /// Returns the address range of the first `columns` elements.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn addresses(self, columns: usize) -> std::ops::Range<*const u8> {
        let (first, size) = match self.target {
            Target::F32(row) => (row.cast_const().cast::<u8>(), size_of::<f32>()),
            Target::F16(row) => (row.cast_const().cast(), size_of::<f16>()),
            Target::Bf16(row) => (row.cast_const().cast(), size_of::<bf16>()),
        };
        first..first.wrapping_add(columns * size)
    }

    #[inline(always)]
    pub(super) fn write(self, sums: &[f32]) {
        // SAFETY: the constructor's caller promised the elements.
        unsafe {
            match self.target {
                Target::F32(row) => write(sums, row, self.epilogue),
                Target::F16(row) => write(sums, row, self.epilogue),
                Target::Bf16(row) => write(sums, row, self.epilogue),
            }
        }
    }
}

/// Writes sums to the elements from `row` on.
///
/// # Safety
/// There are as many elements as sums, and no other code accesses them.
#[inline(always)]
unsafe fn write<E: Element>(sums: &[f32], row: *mut E, epilogue: Epilogue<'_>) {
    // SAFETY: as the caller promises.
    let row = unsafe { std::slice::from_raw_parts_mut(row, sums.len()) };
    let Epilogue { factor, bias, accumulate } = epilogue;
    // Each case is a loop of its own, without a branch for each element.
    match (bias, accumulate) {
        (None, false) => {
            for (element, sum) in row.iter_mut().zip(sums) {
                *element = E::narrow(sum * factor);
            }
        }
        (Some(bias), false) => {
            for ((element, sum), bias) in row.iter_mut().zip(sums).zip(bias) {
                *element = E::narrow(sum * factor + bias);
            }
        }
        (None, true) => {
            for (element, sum) in row.iter_mut().zip(sums) {
                *element = E::narrow(element.widen() + sum * factor);
            }
        }
        (Some(bias), true) => {
            for ((element, sum), bias) in row.iter_mut().zip(sums).zip(bias) {
                *element = E::narrow(element.widen() + (sum * factor + bias));
            }
        }
    }
}
