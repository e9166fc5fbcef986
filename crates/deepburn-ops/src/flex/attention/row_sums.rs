//! Sums of the gradients of keys or values over blocks of queries.

use std::ops::Range;

use deepburn_kernels::gemm::{MatrixMut, Product};

use crate::flex::array::unwritten;

/// `[rows, width]`: a sum over blocks of queries and over heads, in f32 for every type of the
/// result.
pub(super) struct RowSums {
    /// The sums of the rows in `begun`. The rows of the part before them are not initialized.
    pub(super) values: Vec<f32>,
    /// The position of the first row.
    first: usize,
    /// The positions that have a sum. They are contiguous, because the blocks of queries are.
    pub(super) begun: Range<usize>,
}

impl RowSums {
    /// Allocates the memory for the sums of the positions `rows` without initializing it.
    pub(super) fn new(rows: &Range<usize>, width: usize) -> Self {
        Self { values: unwritten(rows.len() * width), first: rows.start, begun: 0..0 }
    }

    /// Returns the sums of the positions `rows`.
    fn at(&mut self, rows: &Range<usize>, width: usize) -> &mut [f32] {
        &mut self.values[(rows.start - self.first) * width..(rows.end - self.first) * width]
    }

    /// Adds a product of shape `[rows, width]` to the rows `rows`.
    ///
    /// Under a causal mask, only the last block of a part attends to all of its keys. It runs
    /// first, from its last keys to its first, and writes the sums to which the others add.
    pub(super) fn add(&mut self, rows: &Range<usize>, width: usize, product: Product<'_>) {
        let is_first = self.begun.is_empty();
        let is_new = is_first || rows.end <= self.begun.start;
        if !is_new && rows.start < self.begun.start {
            let new = rows.start..self.begun.start;
            self.at(&new, width).fill(0.0);
        }
        self.begun = if is_first { rows.clone() } else { joined(self.begun.clone(), rows.clone()) };
        let out = MatrixMut::new(self.at(rows, width), rows.len(), width, width);
        if is_new { product.write_to(out) } else { product.add_to(out) }
    }

    /// Adds two finished sums, which may be of different positions.
    pub(super) fn plus(self, other: Self, width: usize) -> Self {
        for sums in [&self, &other] {
            // Other rows are not initialized.
            assert_eq!(sums.values.len(), sums.begun.len() * width, "positions without a gradient");
        }
        let (mut more, less) =
            if self.begun.len() < other.begun.len() { (other, self) } else { (self, other) };
        let all = joined(more.begun.clone(), less.begun.clone());
        if all != more.begun {
            let mut sums = Self::new(&all, width);
            sums.values.fill(0.0);
            sums.at(&more.begun, width).copy_from_slice(&more.values);
            sums.begun = all;
            more = sums;
        }
        for (sum, value) in more.at(&less.begun, width).iter_mut().zip(&less.values) {
            *sum += value;
        }
        more
    }
}

/// Returns the rows from the first to the last row of two ranges.
pub(super) fn joined(a: Range<usize>, b: Range<usize>) -> Range<usize> {
    a.start.min(b.start)..a.end.max(b.end)
}
