//! Sums of the columns of matrices, in an order that depends only on the number of rows.
//!
//! ```text
//! cube of 256 units    32 columns by 8 rows, for a block of at most 256 rows
//! unit                 adds one column of rows r, r + 8, r + 16, ... of its block
//! tree                 8 rows of units -> 4 -> 2 -> 1
//! first launch         one sum for each block and column, in f32
//! second launch        the sum of these sums, one block of all of them, in the wanted type
//! ```
//!
//! Adjacent units read adjacent columns, so that the device coalesces their reads. A sum with one
//! unit for each column would leave most of the device idle: a layer has some thousand columns.

use cubecl::prelude::*;

use super::device_buffer::{CUBE_DIM, DeviceBuffer, DeviceDType, cubes, with_element};
use super::elementwise::write;

/// The number of columns of a cube.
pub(super) const TILE: usize = 32;

/// The number of rows that a cube reads at a time.
pub(super) const LANES: usize = CUBE_DIM as usize / TILE;

/// The maximum number of rows of a block in the first launch.
const BLOCK_ROWS: usize = 256;

/// Returns the sum of each column of a matrix with rows of `width` elements, in its type. Without
/// rows, all sums are 0.
///
/// Elements are added in f32 and the sums are rounded once. Queues two kernels.
pub fn column_sums<R: Runtime>(
    client: &ComputeClient<R>,
    values: &DeviceBuffer,
    width: usize,
) -> DeviceBuffer {
    let rows = values.len() / width.max(1);
    let sums = block_sums(client, [rows, width], 1, |grid| {
        let BlockGrid { count, dim, blocks, partials } = grid;
        // SAFETY: units check that their row, column and block exist.
        unsafe {
            with_element!(values.dtype(), V => {
                block_kernel::launch_unchecked::<V, R>(
                    client,
                    count,
                    dim,
                    values.arg(),
                    partials,
                    blocks,
                );
            });
        }
    });
    sums.total(client, values.dtype()).swap_remove(0)
}

/// The division of a matrix into blocks of rows and tiles of columns, as an argument of a kernel.
#[derive(CubeType, CubeLaunch)]
pub(super) struct ColumnBlocks {
    /// The number of rows.
    pub(super) rows: usize,
    /// The number of columns.
    pub(super) width: usize,
    /// The number of blocks.
    pub(super) count: usize,
    /// The number of rows of a block. The last one may have fewer.
    pub(super) block_rows: usize,
}

/// A launch that writes a sum for each block and column.
pub(super) struct BlockGrid<R: Runtime> {
    /// The number of cubes. The last ones may have no block.
    pub(super) count: CubeCount,
    /// The number of units of a cube.
    pub(super) dim: CubeDim,
    /// The division.
    pub(super) blocks: ColumnBlocksLaunch<R>,
    /// Receives the sums: `[kind, block, column]`.
    pub(super) partials: ArrayArg<R>,
}

/// The sums of the blocks of a matrix, which are still to be added.
pub(super) struct BlockSums {
    /// `[kind, block, column]`, in f32.
    partials: DeviceBuffer,
    /// The number of kinds of sums, of blocks, and of columns.
    shape: [usize; 3],
}

/// Divides a matrix into blocks, and calls `launch` to write `kinds` sums for each block and
/// column. Without columns, nothing is launched.
pub(super) fn block_sums<R: Runtime>(
    client: &ComputeClient<R>,
    [rows, width]: [usize; 2],
    kinds: usize,
    launch: impl FnOnce(BlockGrid<R>),
) -> BlockSums {
    let blocks = rows.div_ceil(BLOCK_ROWS).max(1);
    let partials = DeviceBuffer::empty(client, kinds * blocks * width, DeviceDType::F32);
    if width > 0 {
        launch(block_grid(client, [rows, width], [blocks, BLOCK_ROWS], &partials));
    }
    BlockSums { partials, shape: [kinds, blocks, width] }
}

/// Returns a launch with a cube for each block and tile.
fn block_grid<R: Runtime>(
    client: &ComputeClient<R>,
    [rows, width]: [usize; 2],
    [blocks, block_rows]: [usize; 2],
    partials: &DeviceBuffer,
) -> BlockGrid<R> {
    let (count, dim) = cubes(client, blocks * width.div_ceil(TILE) * CUBE_DIM as usize);
    let blocks = ColumnBlocksLaunch::new(rows, width, blocks, block_rows);
    BlockGrid { count, dim, blocks, partials: partials.arg() }
}

impl BlockSums {
    /// Adds the sums of the blocks and returns the total of each kind, rounded to `dtype` once.
    ///
    /// Queues one kernel.
    pub(super) fn total<R: Runtime>(
        self,
        client: &ComputeClient<R>,
        dtype: DeviceDType,
    ) -> Vec<DeviceBuffer> {
        let [kinds, blocks, width] = self.shape;
        let totals: Vec<_> =
            (0..kinds).map(|_| DeviceBuffer::empty(client, width, dtype)).collect();
        if width == 0 {
            return totals;
        }
        // Each kind is a block: all its rows are added by one row of cubes.
        let (rows, division) = (kinds * blocks, [kinds, blocks]);
        let grid = block_grid(client, [rows, width], division, &self.partials);
        // SAFETY: units check that their row, column and kind exist.
        unsafe {
            with_element!(dtype, T => {
                total_kernel::launch_unchecked::<T, R>(
                    client,
                    grid.count,
                    grid.dim,
                    grid.partials,
                    totals.iter().map(|total| total.arg()).collect(),
                    grid.blocks,
                );
            });
        }
        totals
    }
}

/// The rows and the column that a unit adds.
#[derive(CubeType)]
pub(super) struct UnitColumn {
    /// The block of the unit's cube, which may be beyond the last one.
    block: usize,
    /// The column, which may be beyond the last one.
    pub(super) column: usize,
    /// The first row.
    pub(super) first: usize,
    /// The end of the rows. Without a block or a column, there are no rows.
    pub(super) end: usize,
}

/// Returns the rows and the column of this unit.
#[cube]
pub(super) fn unit_column(blocks: &ColumnBlocks) -> UnitColumn {
    let unit = UNIT_POS as usize;
    let tiles = blocks.width.div_ceil(TILE);
    let block = CUBE_POS / tiles;
    let column = CUBE_POS % tiles * TILE + unit % TILE;
    let start = block * blocks.block_rows;
    let mut end = start;
    if block < blocks.count && column < blocks.width {
        end = min(blocks.rows, start + blocks.block_rows);
    }
    UnitColumn { block, column, first: start + unit / TILE, end }
}

/// Returns the sum of the values of a column's units to the first of them. All units of the cube
/// must call it. `parts` has an element for each unit.
#[cube]
pub(super) fn column_sum(parts: &mut SharedMemory<f32>, value: f32) -> f32 {
    let unit = UNIT_POS as usize;
    // Units may still be reading the result of the call before.
    sync_cube();
    parts[unit] = value;
    let mut half = comptime![CUBE_DIM as usize / 2].runtime();
    while half >= TILE {
        sync_cube();
        if unit < half {
            parts[unit] = parts[unit] + parts[unit + half];
        }
        half /= 2;
    }
    sync_cube();
    parts[unit % TILE]
}

/// Writes a sum of kind `kind` of a unit's block and column. Only the first unit of a column
/// writes.
#[cube]
pub(super) fn write_partial(
    partials: &mut Array<f32>,
    blocks: &ColumnBlocks,
    own: &UnitColumn,
    #[comptime] kind: usize,
    sum: f32,
) {
    if (UNIT_POS as usize) < TILE && own.block < blocks.count && own.column < blocks.width {
        partials[(kind * blocks.count + own.block) * blocks.width + own.column] = sum;
    }
}

/// Writes the sum of each column of a block.
#[cube(launch_unchecked)]
fn block_kernel<V: Float>(values: &Array<V>, partials: &mut Array<f32>, blocks: &ColumnBlocks) {
    let mut parts = SharedMemory::<f32>::new(256usize);
    let own = unit_column(blocks);
    let mut sum = f32::new(0.0);
    let mut row = own.first;
    while row < own.end {
        sum += f32::cast_from(values[row * blocks.width + own.column]);
        row += LANES;
    }
    let sum = column_sum(&mut parts, sum);
    write_partial(partials, blocks, &own, 0usize, sum);
}

/// Writes the total of each column of a kind, which is a block here, to the array of the kind.
#[cube(launch_unchecked)]
fn total_kernel<T: Float>(
    partials: &Array<f32>,
    totals: &mut Sequence<Array<T>>,
    blocks: &ColumnBlocks,
) {
    let mut parts = SharedMemory::<f32>::new(256usize);
    let own = unit_column(blocks);
    let mut sum = f32::new(0.0);
    let mut row = own.first;
    while row < own.end {
        sum += partials[row * blocks.width + own.column];
        row += LANES;
    }
    let sum = column_sum(&mut parts, sum);
    if (UNIT_POS as usize) < TILE && own.column < blocks.width {
        #[unroll]
        for kind in 0..totals.len() {
            if own.block == kind {
                write::<T>(totals, kind, own.column, T::cast_from(sum));
            }
        }
    }
}
