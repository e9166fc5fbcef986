//! Products with AVX-512: of pairs of bf16 numbers by `vdpbf16ps`, and of single precision.
//!
//! `vdpbf16ps` takes subnormal inputs as 0, replaces subnormal sums by 0 and rounds to the nearest even number,
//! whatever the control register says (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2).

use std::arch::x86_64::*;

use super::kernel::{Kernel, Tile};
use super::pack::{Pair, Strip};
use super::result::RowMut;

pub(super) mod pack;

use pack::{pack_pairs, pack_singles};

/// Rows and columns of a tile: 24 registers hold sums, three a row of the right panel, one a number of the left.
const ROWS: usize = 8;
const VECTORS: usize = 3;
const COLUMNS: usize = VECTORS * LANES;

/// 32-bit lanes of a register.
const LANES: usize = 16;

/// Pairs of bf16 numbers. Made only where the processor has AVX512-BF16.
#[derive(Debug, Clone, Copy)]
pub(super) struct Avx512Bf16(());

impl Avx512Bf16 {
    pub(super) fn detect() -> Option<Self> {
        Avx512::detect()?;
        is_x86_feature_detected!("avx512bf16").then_some(Self(()))
    }
}

/// Single precision. Made only where the processor has AVX-512.
#[derive(Debug, Clone, Copy)]
pub(super) struct Avx512(());

impl Avx512 {
    pub(super) fn detect() -> Option<Self> {
        (is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512dq"))
        .then_some(Self(()))
    }
}

macro_rules! kernel {
    ($kernel:ident, $packed:ty, $features:literal, $depth:literal, $block:literal, $pack:ident, $tile:ident) => {
        impl Kernel for $kernel {
            type Packed = $packed;

            const DEPTH: usize = $depth;
            const DEPTH_STEP: usize = $depth;
            const DEPTH_BLOCK: usize = $block;
            const LEFT_LANES: usize = LANES;
            const ROWS: usize = ROWS;
            const COLUMNS: usize = COLUMNS;

            unsafe fn pack_left(self, strip: Strip<'_>, panel: *mut $packed) {
                // SAFETY: the kernel exists only where the processor can run it; the rest as the caller promises.
                unsafe { $pack(strip, LANES, panel) }
            }

            unsafe fn pack_right(self, strip: Strip<'_>, panel: *mut $packed) {
                // SAFETY: as above.
                unsafe { $pack(strip, COLUMNS, panel) }
            }

            unsafe fn tile(
                self,
                depth: usize,
                left: *const $packed,
                row: usize,
                right: *const $packed,
                tile: Tile,
            ) {
                // SAFETY: as above.
                unsafe { $tile(depth / $depth, left.add(row), right, tile) }
            }

            fn finish(self, sums: &[f32], row: RowMut<'_>) {
                #[target_feature(enable = $features)]
                fn compiled(sums: &[f32], row: RowMut<'_>) {
                    row.write(sums);
                }
                // SAFETY: the kernel exists only where the processor can run it.
                unsafe { compiled(sums, row) }
            }
        }
    };
}

kernel!(
    Avx512Bf16,
    Pair,
    "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16",
    2,
    256,
    pack_pairs,
    tile_bf16
);
kernel!(Avx512, f32, "avx512f,avx512bw,avx512vl,avx512dq", 1, 192, pack_singles, tile_f32);

macro_rules! tile {
    ($name:ident, $packed:ty, $features:literal, $broadcast:expr, $multiply:expr) => {
        #[target_feature(enable = $features)]
        #[allow(clippy::needless_range_loop)]
        unsafe fn $name(
            depth: usize,
            mut left: *const $packed,
            mut right: *const $packed,
            tile: Tile,
        ) {
            // Loops over numbers, which the compiler unrolls: through iterators it keeps the sums in memory, at half the
            // speed.
            let mut sums = [[_mm512_setzero_ps(); VECTORS]; ROWS];
            // SAFETY: the panels have these depths and the tile these rows, as the caller promises.
            unsafe {
                for _ in 0..depth {
                    let vectors =
                        [0, 1, 2].map(|v| _mm512_loadu_si512(right.add(v * LANES).cast()));
                    for row in 0..ROWS {
                        let number = $broadcast(left.add(row));
                        for v in 0..VECTORS {
                            sums[row][v] = $multiply(sums[row][v], number, vectors[v]);
                        }
                    }
                    left = left.add(LANES);
                    right = right.add(COLUMNS);
                }
                for row in 0..ROWS {
                    for v in 0..VECTORS {
                        let out = tile.values.add(row * COLUMNS + v * LANES);
                        let before = if tile.accumulate {
                            _mm512_loadu_ps(out)
                        } else {
                            _mm512_setzero_ps()
                        };
                        _mm512_storeu_ps(out, _mm512_add_ps(before, sums[row][v]));
                    }
                }
            }
        }
    };
}

tile!(
    tile_bf16,
    Pair,
    "avx512f,avx512bw,avx512bf16",
    |pair: *const Pair| _mm512_set1_epi32((*pair).0 as i32),
    |sum, left: __m512i, right: __m512i| _mm512_dpbf16_ps(
        sum,
        std::mem::transmute::<__m512i, __m512bh>(left),
        std::mem::transmute::<__m512i, __m512bh>(right)
    )
);
tile!(
    tile_f32,
    f32,
    "avx512f,avx512bw",
    |number: *const f32| _mm512_set1_ps(*number),
    |sum, left, right| _mm512_fmadd_ps(left, _mm512_castsi512_ps(right), sum)
);
