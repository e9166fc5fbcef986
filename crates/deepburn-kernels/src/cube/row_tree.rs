//! Several units of a cube for each row of a matrix, and the values that they reduce to one.
//!
//! ```text
//! cube of 256 units   row 0: units 0 .. 63 | row 1: units 64 .. 127 | row 2 | row 3
//! unit u of a row     takes elements u, u + 64, u + 128, ...
//! tree                64 values -> 32 -> ... -> 1, in shared memory, for each row
//! ```
//!
//! The number of units depends only on the length of a row, and so does the order of additions.

use cubecl::prelude::*;

use super::device_buffer::{CUBE_DIM, cubes};

/// The number of elements that a unit of a short row takes, about. The units of a row wait for each
/// other, so fewer units with more elements are faster.
const PER_UNIT: usize = 4;

/// The minimum number of units of a row. They read adjacent elements together.
const MIN_UNITS: usize = 8;

/// The rows of a matrix, as an argument of a kernel.
#[derive(CubeType, CubeLaunch)]
pub(super) struct RowLayout {
    /// The number of rows.
    pub(super) count: usize,
    /// The number of elements of a row.
    pub(super) width: usize,
    /// The distance between the first elements of two rows.
    pub(super) stride: usize,
    /// The number of units of each row, a power of two.
    #[cube(comptime)]
    pub(super) units: usize,
}

/// Returns the grid of a kernel with several units for each row, and its argument for the rows,
/// whose first elements are `stride` elements apart. The last cubes may have units without a row.
pub(super) fn row_grid<R: Runtime>(
    client: &ComputeClient<R>,
    [count, width]: [usize; 2],
    stride: usize,
) -> (CubeCount, CubeDim, RowLayoutLaunch<R>) {
    let most = CUBE_DIM as usize;
    let units = (width / PER_UNIT).clamp(MIN_UNITS, most);
    // The power of two that is not larger.
    let units = 1 << units.ilog2();
    let (cubes, dim) = cubes(client, count.div_ceil(most / units) * most);
    (cubes, dim, RowLayoutLaunch::new(count, width, stride, units))
}

/// Returns the row of this unit, which may be beyond the last one.
#[cube]
pub(super) fn own_row(#[comptime] units: usize) -> usize {
    CUBE_POS * comptime![CUBE_DIM as usize / units] + UNIT_POS as usize / units
}

/// Returns the number of elements of a row, which is 0 beyond the last one.
#[cube]
pub(super) fn row_len(rows: &RowLayout, row: usize) -> usize {
    let mut len = rows.width;
    if row >= rows.count {
        len = 0usize;
    }
    len
}

/// How two values become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Reduction {
    Sum,
    Largest,
}

/// Returns the sum of the values of a row's units to each of them. All units of the cube must call
/// it. `parts` has an element for each unit.
#[cube]
pub(super) fn row_sum(parts: &mut SharedMemory<f32>, value: f32, #[comptime] units: usize) -> f32 {
    reduced(parts, value, units, Reduction::Sum)
}

/// Returns the largest value of a row's units to each of them, as [`row_sum`] does. No value may be
/// NaN.
#[cube]
pub(super) fn row_max(parts: &mut SharedMemory<f32>, value: f32, #[comptime] units: usize) -> f32 {
    reduced(parts, value, units, Reduction::Largest)
}

/// Reduces the values of a row's units in a tree.
#[cube]
fn reduced(
    parts: &mut SharedMemory<f32>,
    value: f32,
    #[comptime] units: usize,
    #[comptime] reduction: Reduction,
) -> f32 {
    let unit = UNIT_POS as usize;
    let place = unit % units;
    // Units may still be reading the result of the call before.
    sync_cube();
    parts[unit] = value;
    let mut half = comptime![units / 2].runtime();
    while half > 0 {
        sync_cube();
        if place < half {
            let left = parts[unit];
            let right = parts[unit + half];
            parts[unit] = match comptime![reduction] {
                Reduction::Sum => left + right,
                Reduction::Largest => max(left, right),
            };
        }
        half /= 2;
    }
    sync_cube();
    parts[unit - place]
}
