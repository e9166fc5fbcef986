//! Products in single precision with AVX2 and fused multiply-add.

use std::arch::x86_64::*;

use super::kernel::{Kernel, Left, LeftRows, Tile};
use super::matrix::Matrix;
use super::one_row::add_product;
use super::pack::{Strip, lines, prefetch};
use super::result::RowMut;
use crate::Instructions;

mod pack;

use pack::pack_singles;

/// The number of 32-bit lanes of a register.
const LANES: usize = 8;

/// Rows and columns of a tile. Of the sixteen registers, twelve hold sums, two hold a row of the
/// right panel, and two hold alternating numbers of the left panel. A tile of 4 x 24 has the same
/// number of sums but needs all registers, so the compiler keeps one sum in memory, which halves
/// the speed.
const ROWS: usize = 6;
const VECTORS: usize = 2;
const TILE_COLUMNS: usize = VECTORS * LANES;

/// Micro-panels of `TILE_COLUMNS` lanes in a right panel, packed together from two cache lines of
/// each depth. They and six rows of the left operand fit into a first-level cache of 32 KiB.
const RIGHT_MICRO_PANELS: usize = 2;

/// Micro-panels of `ROWS` lanes in a left panel. If the rows of the operand are adjacent in memory,
/// as in a weight gradient, one depth of a panel is three cache lines, and each line is read once.
const LEFT_MICRO_PANELS: usize = 8;

/// The kernel for AVX2 with fused multiply-add and fp16 conversions. Created only if the processor
/// supports them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Avx2(());

impl Avx2 {
    /// Returns the kernel if `instructions`, which this processor supports, include it.
    pub(super) fn with(instructions: Instructions) -> Option<Self> {
        (instructions >= Instructions::Avx2).then_some(Self(()))
    }
}

impl Kernel for Avx2 {
    type Packed = f32;

    const DEPTH: usize = 1;
    const DEPTH_STEP: usize = 1;
    /// The two micro-panels of a right panel have 12 KiB each.
    const PANEL_DEPTH: usize = 192;
    const LEFT_LANES: usize = LEFT_MICRO_PANELS * ROWS;
    const ROWS: usize = ROWS;
    const COLUMNS: usize = RIGHT_MICRO_PANELS * TILE_COLUMNS;
    const MULTIPLIES_ROWS: bool = true;
    /// 512 rows with the depth of a panel, which stay in a second-level cache of 512 KiB. Two
    /// threads are equally fast with twice this size. All threads wait at the end of a block, so a
    /// block needs more work if there are more threads.
    const LEFT_BYTES: usize = 512 << 10;

    /// A left panel consists of consecutive micro-panels of `ROWS` lanes.
    fn left_at(left: Left<f32>, row: usize, depth: usize) -> *const f32 {
        left.row(row).wrapping_add(depth * ROWS)
    }

    unsafe fn pack_left(self, strip: Strip<'_>, panel: *mut f32) {
        // SAFETY: the kernel exists only where the processor can run it; the rest as the caller
        // promises.
        unsafe { pack_singles::<ROWS>(strip, panel) }
    }

    unsafe fn pack_right(self, strip: Strip<'_>, panel: *mut f32) {
        // SAFETY: as above.
        unsafe { pack_singles::<TILE_COLUMNS>(strip, panel) }
    }

    unsafe fn tile(self, depth: usize, left: LeftRows<f32>, right: *const f32, tile: Tile) {
        // SAFETY: as above.
        unsafe {
            for panel in 0..tile.columns.div_ceil(TILE_COLUMNS) {
                let values = tile.values.add(panel * TILE_COLUMNS);
                let right = right.add(panel * TILE_COLUMNS * depth);
                tile_f32(depth, left.first, right, Tile { values, ..tile });
            }
        }
    }

    /// Each row of a tile is a few cache lines, and consecutive rows are one row of the result
    /// apart, so the hardware prefetcher does not recognize them as a sequence.
    fn prefetch_result(self, row: RowMut<'_>, columns: usize) {
        lines(row.addresses(columns)).for_each(prefetch);
    }

    fn multiply_row(self, left: &[f32], right: Matrix<'_>, sums: &mut [f32]) {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn compiled(left: &[f32], right: Matrix<'_>, sums: &mut [f32], panel: usize) {
            add_product(left, right, sums, panel, f32::mul_add);
        }
        // SAFETY: the kernel exists only where the processor can run it.
        unsafe { compiled(left, right, sums, Self::PANEL_DEPTH) }
    }

    fn finish(self, sums: &[f32], row: RowMut<'_>) {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn compiled(sums: &[f32], row: RowMut<'_>) {
            row.write(sums);
        }
        // SAFETY: the kernel exists only where the processor can run it.
        unsafe { compiled(sums, row) }
    }
}

/// Multiplies rows of the left operand with one micro-panel of the right operand. If the tile
/// accumulates, the sums are added to the sums of earlier depths at the end.
///
/// # Safety
/// The processor supports AVX2 and FMA. `left` is valid for reads of `depth * ROWS` numbers and
/// `right` for reads of `depth * TILE_COLUMNS` numbers. `tile.values` is valid for reads and writes
/// of `TILE_COLUMNS` numbers in each of `ROWS` rows, which start every
/// `RIGHT_MICRO_PANELS * TILE_COLUMNS` numbers. These numbers are initialized if `tile.accumulate`
/// is true, and no other thread accesses them during the call. All pointers are aligned for `f32`.
#[target_feature(enable = "avx2,fma")]
#[allow(clippy::needless_range_loop)]
unsafe fn tile_f32(depth: usize, mut left: *const f32, mut right: *const f32, tile: Tile) {
    // The loops run over indices, because the compiler unrolls them. With iterators it keeps the
    // sums in memory.
    let mut sums = [[_mm256_setzero_ps(); VECTORS]; ROWS];
    // SAFETY: the panels have these depths and the tile these rows, as the caller promises.
    unsafe {
        for _ in 0..depth {
            let vectors = [0, 1].map(|v| _mm256_loadu_ps(right.add(v * LANES)));
            for row in 0..ROWS {
                let number = _mm256_broadcast_ss(&*left.add(row));
                for v in 0..VECTORS {
                    sums[row][v] = _mm256_fmadd_ps(number, vectors[v], sums[row][v]);
                }
            }
            left = left.add(ROWS);
            right = right.add(TILE_COLUMNS);
        }
        for row in 0..ROWS {
            for v in 0..VECTORS {
                let out = tile.values.add(row * RIGHT_MICRO_PANELS * TILE_COLUMNS + v * LANES);
                let before =
                    if tile.accumulate { _mm256_loadu_ps(out) } else { _mm256_setzero_ps() };
                _mm256_storeu_ps(out, _mm256_add_ps(before, sums[row][v]));
            }
        }
    }
}
