//! Products of one row, the products of text generation: each new token is one row.
//!
//! Such a product reads each element of the right operand once, so it is as fast as memory. Packing
//! would copy the whole operand. If the columns of the operand are adjacent, its rows are read in
//! place instead, several at a time:
//!
//! ```text
//! left   l0 l1 l2 l3 ...               right   r00 r01 r02 ...     sums   s0 s1 s2 ...   in the first-level cache
//!                                              r10 r11 r12 ...
//!        sj = sj + l0 r0j + l1 r1j + ... in this order, in panels of the kernel's depth
//! ```
//!
//! The order of summation is the order of the kernel's tiles, so a row has the same bits as in a
//! product of more rows.

use super::blocking::{Computation, each};
use super::kernel::Kernel;
use super::matrix::Matrix;
use super::result::RowMut;
use crate::element::Element;
use crate::float_slice::with_elements;

/// The number of columns of a task. Their sums take 2 KiB of the first-level cache.
const COLUMNS: usize = 512;

/// The smallest number of columns for which a thread is worth its start, because memory is read in
/// long sequences.
const FEW_COLUMNS: usize = 64;

/// Number of multiplications below which distributing the work over threads costs more than it
/// saves. Each one reads an element from memory, so it takes longer than in a product of many rows.
const WORTH_THREADS: usize = 1 << 17;

/// The number of rows of the right operand that are read at the same time.
const ROWS: usize = 8;

/// Computes the product and returns true if it has one row, and the kernel can read the right
/// operand in place.
pub(super) fn multiply<K: Kernel>(computation: Computation<'_, K>, threads: usize) -> bool {
    let Computation { kernel, product, out, epilogue } = computation;
    if !K::MULTIPLIES_ROWS || out.rows != 1 || product.right.column_stride != 1 {
        return false;
    }
    // Widened once for all tasks; the row is small in comparison with the right operand.
    let left = values(product.left);
    let columns = out.columns;
    let threads = if columns * left.len() >= WORTH_THREADS { threads } else { 1 };
    let size = columns.div_ceil(threads).next_multiple_of(FEW_COLUMNS).min(COLUMNS);
    each(columns.div_ceil(size), threads, |task, _| {
        let first = task * size;
        let count = size.min(columns - first);
        let mut sums = [0.0; COLUMNS];
        let sums = &mut sums[..count];
        kernel.multiply_row(&left, product.right.columns_from(first, count), sums);
        // SAFETY: the elements are in the result, and each belongs to one task.
        kernel.finish(sums, unsafe { RowMut::new(out, 0, first, epilogue.columns(first, count)) });
    });
    true
}

/// Returns the elements of a matrix of one row.
fn values(row: Matrix<'_>) -> Vec<f32> {
    with_elements!(row.elements, elements => {
        (0..row.columns).map(|column| elements[column * row.column_stride].widen()).collect()
    })
}

/// Adds the product of the row `left` and the matrix `right`, whose columns are adjacent, to
/// `sums`. The sums of `panel` depths are added to each other before they are added to `sums`.
/// `add` returns `left * right + sum`.
#[inline(always)]
pub(super) fn add_product(
    left: &[f32],
    right: Matrix<'_>,
    sums: &mut [f32],
    panel: usize,
    add: impl Fn(f32, f32, f32) -> f32 + Copy,
) {
    with_elements!(right.elements, elements => {
        add_panels(left, elements, right.row_stride, sums, panel, add);
    });
}

#[inline(always)]
fn add_panels<E: Element>(
    left: &[f32],
    right: &[E],
    stride: usize,
    sums: &mut [f32],
    panel: usize,
    add: impl Fn(f32, f32, f32) -> f32 + Copy,
) {
    let columns = sums.len();
    let mut part = [0.0; COLUMNS];
    let part = &mut part[..columns];
    let row = |depth: usize| &right[depth * stride..][..columns];
    for (number, panel_of_left) in left.chunks(panel).enumerate() {
        let start = number * panel;
        part.fill(0.0);
        let groups = panel_of_left.chunks_exact(ROWS);
        let rest = groups.remainder();
        for (group, factors) in groups.enumerate() {
            let rows: [&[E]; ROWS] = std::array::from_fn(|i| row(start + group * ROWS + i));
            for column in 0..columns {
                let mut sum = part[column];
                for i in 0..ROWS {
                    sum = add(factors[i], rows[i][column].widen(), sum);
                }
                part[column] = sum;
            }
        }
        for (i, factor) in rest.iter().enumerate() {
            let row = row(start + panel_of_left.len() - rest.len() + i);
            for (sum, right) in part.iter_mut().zip(row) {
                *sum = add(*factor, right.widen(), *sum);
            }
        }
        for (sum, part) in sums.iter_mut().zip(&*part) {
            *sum += part;
        }
    }
}
