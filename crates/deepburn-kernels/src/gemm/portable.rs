//! Products in single precision by code that the compiler vectorizes.

use super::kernel::{Kernel, LeftRows, Tile};
use super::matrix::Matrix;
use super::one_row;
use super::pack::{Strip, pack};
use super::result::RowMut;

/// Rows and columns of a tile. With NEON's registers of four numbers, 24 registers hold sums, six
/// hold a row of the right panel, and one holds a number of the left panel.
const ROWS: usize = 4;
const COLUMNS: usize = 24;

/// The kernel for any processor, with vector multiplications and additions.
#[derive(Debug, Clone, Copy)]
pub(super) struct Portable;

/// Multiplies a tile. Its sums stay in registers on processors with 32 vector registers.
///
/// # Safety
/// `left` is valid for reads of `depth * ROWS` numbers and `right` for reads of `depth * COLUMNS`
/// numbers. `tile.values` is valid for reads and writes of `ROWS * COLUMNS` numbers, which are
/// initialized if `tile.accumulate` is true. All pointers are aligned for `f32`. No other thread
/// accesses the tile during the call.
unsafe fn tile(depth: usize, left: *const f32, right: *const f32, tile: Tile) {
    let mut sums = [[0.0_f32; COLUMNS]; ROWS];
    for at in 0..depth {
        // SAFETY: the panels have these depths, as the caller promises.
        let (left, right) = unsafe {
            (
                &*left.add(at * ROWS).cast::<[f32; ROWS]>(),
                &*right.add(at * COLUMNS).cast::<[f32; COLUMNS]>(),
            )
        };
        for (sums, left) in sums.iter_mut().zip(left) {
            for (sum, right) in sums.iter_mut().zip(right) {
                *sum = add_product(*left, *right, *sum);
            }
        }
    }
    for (row, sums) in sums.iter().enumerate() {
        // SAFETY: the tile has these elements, as the caller promises.
        let row = unsafe { &mut *tile.values.add(row * COLUMNS).cast::<[f32; COLUMNS]>() };
        for (value, sum) in row.iter_mut().zip(sums) {
            *value = if tile.accumulate { *value + sum } else { *sum };
        }
    }
}

/// Returns `left * right + sum`. The operation is fused if every processor of the architecture
/// supports this.
#[inline(always)]
fn add_product(left: f32, right: f32, sum: f32) -> f32 {
    match cfg!(target_arch = "aarch64") {
        true => left.mul_add(right, sum),
        false => left * right + sum,
    }
}

impl Kernel for Portable {
    type Packed = f32;

    const DEPTH: usize = 1;
    const DEPTH_STEP: usize = 1;
    const PANEL_DEPTH: usize = 256;
    const LEFT_LANES: usize = ROWS;
    const ROWS: usize = ROWS;
    const COLUMNS: usize = COLUMNS;
    const MULTIPLIES_ROWS: bool = true;

    unsafe fn pack_left(self, strip: Strip<'_>, panel: *mut f32) {
        // SAFETY: as the caller promises.
        unsafe { pack(strip, ROWS, strip.depth, panel) }
    }

    unsafe fn pack_right(self, strip: Strip<'_>, panel: *mut f32) {
        // SAFETY: as the caller promises.
        unsafe { pack(strip, COLUMNS, strip.depth, panel) }
    }

    unsafe fn tile(self, depth: usize, left: LeftRows<f32>, right: *const f32, out: Tile) {
        // SAFETY: as the caller promises.
        unsafe { tile(depth, left.first, right, out) }
    }

    fn multiply_row(self, left: &[f32], right: Matrix<'_>, sums: &mut [f32]) {
        one_row::add_product(left, right, sums, Self::PANEL_DEPTH, add_product);
    }

    fn finish(self, sums: &[f32], row: RowMut<'_>) {
        row.write(sums);
    }
}
