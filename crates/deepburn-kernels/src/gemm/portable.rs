//! Products in single precision by code that the compiler vectorises.

use super::kernel::{Kernel, LeftRows, Tile};
use super::pack::{Strip, pack};
use super::result::RowMut;

/// Rows and columns of a tile: twelve registers of eight numbers for the sums, three for a row of the right panel and
/// one for an element of the left.
const ROWS: usize = 4;
const COLUMNS: usize = 24;

/// Any processor, by multiplication and addition of vectors.
#[derive(Debug, Clone, Copy)]
pub(super) struct Portable;

/// x86 with AVX2 and fused multiply-add. Made only where the processor has them.
#[cfg(target_arch = "x86_64")]
#[derive(Debug, Clone, Copy)]
pub(super) struct Avx2(());

#[cfg(target_arch = "x86_64")]
impl Avx2 {
    pub(super) fn detect() -> Option<Self> {
        (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")).then_some(Self(()))
    }
}

/// Multiplies a tile, whose sums stay in registers.
#[inline(always)]
unsafe fn tile(
    depth: usize,
    left: *const f32,
    right: *const f32,
    tile: Tile,
    add_product: impl Fn(f32, f32, f32) -> f32,
) {
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

macro_rules! kernel {
    ($kernel:ident, [$(#[$attribute:meta])*], $add_product:expr) => {
        impl Kernel for $kernel {
            type Packed = f32;

            const DEPTH: usize = 1;
            const DEPTH_STEP: usize = 1;
            const DEPTH_BLOCK: usize = 256;
            const LEFT_LANES: usize = ROWS;
            const ROWS: usize = ROWS;
            const COLUMNS: usize = COLUMNS;

            unsafe fn pack_left(self, strip: Strip<'_>, panel: *mut f32) {
                $(#[$attribute])*
                unsafe fn compiled(strip: Strip<'_>, panel: *mut f32) {
                    // SAFETY: as the caller promises.
                    unsafe { pack(strip, ROWS, strip.depth, panel) }
                }
                // SAFETY: as the caller promises; the kernel exists only where the processor can run it.
                unsafe { compiled(strip, panel) }
            }

            unsafe fn pack_right(self, strip: Strip<'_>, panel: *mut f32) {
                $(#[$attribute])*
                unsafe fn compiled(strip: Strip<'_>, panel: *mut f32) {
                    // SAFETY: as the caller promises.
                    unsafe { pack(strip, COLUMNS, strip.depth, panel) }
                }
                // SAFETY: as above.
                unsafe { compiled(strip, panel) }
            }

            unsafe fn tile(self, depth: usize, left: LeftRows<f32>, right: *const f32, out: Tile) {
                $(#[$attribute])*
                unsafe fn compiled(depth: usize, left: *const f32, right: *const f32, out: Tile) {
                    // SAFETY: as the caller promises.
                    unsafe { tile(depth, left, right, out, $add_product) }
                }
                // SAFETY: as above.
                unsafe { compiled(depth, left.first, right, out) }
            }

            fn finish(self, sums: &[f32], row: RowMut<'_>) {
                $(#[$attribute])*
                unsafe fn compiled(sums: &[f32], row: RowMut<'_>) {
                    row.write(sums);
                }
                // SAFETY: the kernel exists only where the processor can run it.
                unsafe { compiled(sums, row) }
            }
        }
    };
}

// On this architecture every processor has fused multiply-add.
#[cfg(target_arch = "aarch64")]
kernel!(Portable, [], f32::mul_add);
#[cfg(not(target_arch = "aarch64"))]
kernel!(Portable, [], |left, right, sum| left * right + sum);
#[cfg(target_arch = "x86_64")]
kernel!(Avx2, [#[target_feature(enable = "avx2,fma")]], f32::mul_add);
