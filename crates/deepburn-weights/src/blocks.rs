//! The blocks of a component: contiguous runs in its own array and in the composed array.
//!
//! Main type: [`ComponentBlocks`]. Both positions are strides over the axes of the component's
//! array. Axes that are contiguous in both arrays are merged, so most components are one run, or a
//! matrix.

use crate::composition::{Component, Composition};

/// An axis of the blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Axis {
    /// The number of positions.
    size: usize,
    /// The distance between two positions in the component's array.
    from: usize,
    /// The distance between two positions in the composed array.
    to: usize,
}

/// A matrix of elements. Its rows are contiguous in the component's array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MatrixBlock {
    /// The first element in the component's array.
    pub(crate) from: usize,
    /// The first element in the composed array.
    pub(crate) to: usize,
    /// The number of rows.
    pub(crate) rows: usize,
    /// The number of columns.
    pub(crate) columns: usize,
    /// The distance between two rows in the component's array.
    pub(crate) from_row: usize,
    /// The distance between two rows in the composed array.
    pub(crate) to_row: usize,
    /// The distance between two columns in the composed array.
    pub(crate) to_column: usize,
}

/// The elements of a component, in order of its array.
pub(crate) struct ComponentBlocks {
    /// The first element in the component's array.
    from: usize,
    /// The first element in the composed array.
    to: usize,
    /// The axes of the component's array, merged where possible.
    axes: Vec<Axis>,
}

impl ComponentBlocks {
    /// Returns the blocks of `component`, which begins at `start` along the axis of `whole`.
    pub(crate) fn new(whole: &Composition, component: &Component, start: usize) -> Self {
        let (from, mut to) = (strides(&component.shape), strides(whole.shape()));
        let first = to.get(whole.axis()).map_or(0, |stride| stride * start);
        // The axes of a transposed component run across the composed array in the opposite order.
        if component.transposed {
            to.reverse();
        }
        let sizes = component.sliced_shape();
        let axes = sizes.iter().zip(from.iter().zip(&to));
        // Axes with one position have no stride.
        let axes = axes.map(|(&size, (&from, &to))| Axis { size, from, to });
        let mut merged: Vec<Axis> = Vec::new();
        for axis in axes.filter(|axis| axis.size != 1) {
            match merged.last_mut() {
                // One step of the outer axis is all steps of the inner one in both arrays, so the
                // two are one axis.
                Some(outer)
                    if outer.from == axis.size * axis.from && outer.to == axis.size * axis.to =>
                {
                    *outer = Axis { size: outer.size * axis.size, ..axis };
                }
                _ => merged.push(axis),
            }
        }
        // The strides are the whole array's, and a slice begins inside of it.
        let skipped = component.slice.as_ref().map_or(0, |it| it.range.start * from[it.axis]);
        Self { from: skipped, to: first, axes: merged }
    }

    /// Returns whether the elements are contiguous in both arrays.
    pub(crate) fn is_run(&self) -> bool {
        matches!(self.axes[..], [] | [Axis { from: 1, to: 1, .. }])
    }

    /// Returns the blocks, in order of the component's array.
    pub(crate) fn iter(&self) -> impl Iterator<Item = MatrixBlock> {
        let one = Axis { size: 1, from: 1, to: 1 };
        // The last axis may have been a single column of a wider array.
        let (axes, columns) = match self.axes.split_last() {
            Some((columns, axes)) if columns.from == 1 => (axes, *columns),
            _ => (&self.axes[..], one),
        };
        // A block has two axes. Each position along the others starts a block of its own.
        let (rows, outer) = axes.split_last().map_or((one, axes), |(rows, outer)| (*rows, outer));
        let mut starts = vec![(self.from, self.to)];
        for axis in outer {
            let positions = |(from, to)| {
                (0..axis.size).map(move |at| (from + at * axis.from, to + at * axis.to))
            };
            starts = starts.into_iter().flat_map(positions).collect();
        }
        let block = move |(from, to)| MatrixBlock {
            from,
            to,
            rows: rows.size,
            columns: columns.size,
            from_row: rows.from,
            to_row: rows.to,
            to_column: columns.to,
        };
        starts.into_iter().map(block)
    }
}

/// Returns the distance between two positions of each axis of a row-major array.
fn strides(shape: &[usize]) -> Vec<usize> {
    let mut stride = 1;
    let mut strides: Vec<_> = shape
        .iter()
        .rev()
        .map(|size| {
            let own = stride;
            // An empty axis must not make the strides of the others 0.
            stride *= size.max(&1);
            own
        })
        .collect();
    strides.reverse();
    strides
}
