//! Copies elements between a composed array and the arrays of its components.
//!
//! Components are copied in blocks of at most [`BLOCK`] elements, or one row. A transposed matrix
//! is read in bands of rows. Each band is written tile by tile, because a band that is written row
//! by row would touch a cache line per element.

use std::ops::Range;

use crate::blocks::{ComponentBlocks, MatrixBlock};
use crate::composition::Composition;

/// The number of elements that are copied at a time.
const BLOCK: usize = 1 << 18;
/// The number of columns of a tile.
const TILE: usize = 64;

impl Composition {
    /// Reads the elements `range` of the composed array, like [`append`](Self::append).
    ///
    /// # Errors
    /// Returns the first error of `source`.
    ///
    /// # Panics
    /// Panics if the range is not in the array, or if `source` appends another number of elements.
    pub fn read<T: Copy + Default, E>(
        &self,
        range: Range<usize>,
        source: impl FnMut(&str, Range<usize>, &mut Vec<T>) -> Result<(), E>,
    ) -> Result<Vec<T>, E> {
        let mut values = Vec::new();
        self.append(range, &mut values, source)?;
        Ok(values)
    }

    /// Appends the elements `range` of the composed array to `values`, in row-major order.
    ///
    /// `source` appends the elements of a range of an array, which is given by name, to a vector.
    /// In addition to the result, one block is in memory, and none if the components are
    /// contiguous. Every element of the components that the range contains is read once. Bands of a
    /// transposed matrix are read as a whole, even if the range contains only some of their
    /// columns.
    ///
    /// Memory for the range is reserved after `source` appended the first elements, because it may
    /// be the first to know that the array is shorter than its shape says.
    ///
    /// # Errors
    /// Returns the first error of `source`.
    ///
    /// # Panics
    /// Panics if the range is not in the array, or if `source` appends another number of elements.
    pub fn append<T: Copy + Default, E>(
        &self,
        range: Range<usize>,
        values: &mut Vec<T>,
        mut source: impl FnMut(&str, Range<usize>, &mut Vec<T>) -> Result<(), E>,
    ) -> Result<(), E> {
        assert!(range.end <= self.num_elements(), "{range:?} is not in {:?}", self.shape());
        let located: Vec<_> = self
            .placed()
            .map(|(component, start)| {
                (&component.name, ComponentBlocks::new(self, component, start))
            })
            .collect();
        let start = values.len();
        // Components that are contiguous in both arrays follow each other.
        if located.iter().all(|(_, blocks)| blocks.is_run()) {
            for (name, block) in blocks(&located) {
                let part = overlap(&(block.to..block.to + block.columns), &range);
                if !part.is_empty() {
                    let first = block.from + part.start - block.to;
                    // Straight into the result, without a block in between.
                    source(name, first..first + part.len(), values)?;
                    values.reserve_exact((start + range.len()).saturating_sub(values.len()));
                }
            }
            assert_eq!(values.len() - start, range.len(), "the source appended another number");
            return Ok(());
        }
        let mut reader = RangeReader { values, start, range, buffer: vec![] };
        for (name, block) in blocks(&located) {
            for band in bands(block) {
                reader.read(&band, |range, buffer| source(name, range, buffer))?;
            }
        }
        Ok(())
    }

    /// Writes all components of the composed array. `sink` gets ranges of elements: the name of an
    /// array, the first element, and the values. The ranges of an array are given in ascending
    /// order. In addition to `values`, one block is in memory.
    ///
    /// # Errors
    /// Returns the first error of `sink`.
    ///
    /// # Panics
    /// Panics if `values` has another number of elements than the composed array.
    pub fn write<T: Copy + Default, E>(
        &self,
        values: &[T],
        mut sink: impl FnMut(&str, usize, &[T]) -> Result<(), E>,
    ) -> Result<(), E> {
        assert_eq!(values.len(), self.num_elements(), "{:?}", self.shape());
        let mut buffer = Vec::new();
        for (component, start) in self.placed() {
            let blocks = ComponentBlocks::new(self, component, start);
            for block in blocks.iter() {
                // A run needs no copy, because it is in order already.
                if block.rows == 1 && block.to_column == 1 {
                    sink(&component.name, block.from, &values[block.to..block.to + block.columns])?;
                    continue;
                }
                for band in bands(block) {
                    buffer.clear();
                    buffer.resize(band.rows * band.columns, T::default());
                    let whole = 0..values.len();
                    each_element_run(&band, &whole, |at, to| buffer[at] = values[to]);
                    sink(&component.name, band.from, &buffer)?;
                }
            }
        }
        Ok(())
    }
}

/// Returns all blocks with the name of their array.
fn blocks<'a>(
    located: &'a [(&'a String, ComponentBlocks)],
) -> impl Iterator<Item = (&'a str, MatrixBlock)> {
    let blocks = |(name, blocks): &'a (&'a String, ComponentBlocks)| {
        blocks.iter().map(|block| (name.as_str(), block))
    };
    located.iter().flat_map(blocks)
}

/// A reader of a range of a composed array.
struct RangeReader<'a, T> {
    /// The elements of the range, from `start`.
    values: &'a mut Vec<T>,
    start: usize,
    /// The range.
    range: Range<usize>,
    /// The band that is copied, in the order of its own array.
    buffer: Vec<T>,
}

impl<T: Copy + Default> RangeReader<'_, T> {
    /// Reads the elements of a band that are in the range. `source` reads a range of the band's
    /// array.
    fn read<E>(
        &mut self,
        band: &MatrixBlock,
        mut source: impl FnMut(Range<usize>, &mut Vec<T>) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut band = *band;
        if band.to_column == 1 {
            // Rows that are not in the range are skipped.
            let first = first_at_least(self.range.start, band.to + band.columns - 1, band.to_row);
            let end = first_at_least(self.range.end, band.to, band.to_row).min(band.rows);
            let first = first.min(end);
            band.from += first * band.from_row;
            band.to += first * band.to_row;
            band.rows = end - first;
        } else if band.rows > 0 {
            // A transposed band is spread over the composed array, so only a band that is wholly
            // outside can be skipped.
            let last = band.to + (band.rows - 1) * band.to_row;
            let is_after = band.to >= self.range.end;
            let is_before = last + (band.columns - 1) * band.to_column < self.range.start;
            if is_after || is_before {
                return Ok(());
            }
        }
        if band.rows == 0 {
            return Ok(());
        }
        let len = (band.rows - 1) * band.from_row + band.columns;
        self.buffer.clear();
        source(band.from..band.from + len, &mut self.buffer)?;
        assert_eq!(self.buffer.len(), len, "the source appended another number");
        // After the first read: a damaged file fails there before its alleged size is allocated.
        self.values.resize(self.start + self.range.len(), T::default());
        let (values, buffer) = (&mut self.values[self.start..], &self.buffer);
        each_element_run(&band, &self.range, |at, to| values[to - self.range.start] = buffer[at]);
        Ok(())
    }
}

/// Returns the smallest `n` for which `start + n * step` is at least `bound`.
fn first_at_least(bound: usize, start: usize, step: usize) -> usize {
    bound.saturating_sub(start).div_ceil(step.max(1))
}

/// Divides a block into bands: whole rows that are contiguous in the component's array, with at
/// most [`BLOCK`] elements, or a part of one row.
fn bands(block: MatrixBlock) -> impl Iterator<Item = MatrixBlock> {
    // Only rows without gaps between them can be read at once.
    let is_dense = block.from_row == block.columns;
    let (rows, columns) = match (BLOCK / block.columns.max(1)).max(1) {
        rows if is_dense => (rows, block.columns.min(BLOCK)),
        _ => (1, block.columns.min(BLOCK)),
    };
    // A row that is longer than a band is divided.
    let rows = if columns < block.columns { 1 } else { rows };
    (0..block.rows).step_by(rows).flat_map(move |row| {
        (0..block.columns).step_by(columns.max(1)).map(move |column| MatrixBlock {
            from: block.from + row * block.from_row + column,
            to: block.to + row * block.to_row + column * block.to_column,
            rows: rows.min(block.rows - row),
            columns: columns.min(block.columns - column),
            ..block
        })
    })
}

/// Calls `copy` with the position of each element in the band and in the composed array, for the
/// elements whose position in the composed array is in `range`.
fn each_element_run(band: &MatrixBlock, range: &Range<usize>, mut copy: impl FnMut(usize, usize)) {
    let MatrixBlock { rows, columns, to, to_row, to_column, .. } = *band;
    let from_row = columns;
    if to_column == 1 {
        for row in 0..rows {
            let start = to + row * to_row;
            for at in overlap(&(start..start + columns), range) {
                copy(row * from_row + at - start, at);
            }
        }
        return;
    }
    // Column by column in the band, and so contiguous in the composed array.
    for tile in (0..columns).step_by(TILE) {
        for column in tile..columns.min(tile + TILE) {
            let start = to + column * to_column;
            // The rows of a transposed matrix are contiguous in the composed array.
            let first = first_at_least(range.start, start, to_row).min(rows);
            let end = first_at_least(range.end, start, to_row).min(rows);
            for row in first..end {
                copy(row * from_row + column, start + row * to_row);
            }
        }
    }
}

/// Returns the positions that two ranges share. The result is empty if they share none.
fn overlap(left: &Range<usize>, right: &Range<usize>) -> Range<usize> {
    let start = left.start.max(right.start);
    start..left.end.min(right.end).max(start)
}
