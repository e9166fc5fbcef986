//! Products with AVX-512: of pairs of bf16 numbers by `vdpbf16ps`, and of single precision.
//!
//! `vdpbf16ps` takes subnormal inputs as 0, replaces subnormal sums by 0 and rounds to the nearest
//! even number, independently of the control register (Intel 64 and IA-32 Architectures Software
//! Developer's Manual, volume 2).

use std::arch::x86_64::*;

use super::kernel::{Kernel, Left, LeftRows, Tile};
use super::matrix::Matrix;
use super::one_row::add_product;
use super::pack::{Pair, Strip, lines, prefetch};
use super::result::RowMut;
use crate::{FloatSlice, Instructions};

pub(super) mod pack;

use pack::{pack_pair_rows, pack_pairs, pack_singles};

/// The number of 32-bit lanes of a register.
const LANES: usize = 16;

/// The kernel for pairs of bf16 numbers. Created only if the processor supports AVX512-BF16.
#[derive(Debug, Clone, Copy)]
pub(super) struct Avx512Bf16(());

impl Avx512Bf16 {
    /// Returns the kernel if `instructions`, which this processor supports, include it.
    pub(super) fn with(instructions: Instructions) -> Option<Self> {
        (instructions >= Instructions::Avx512Bf16).then_some(Self(()))
    }
}

/// The kernel for single precision. Created only if the processor supports AVX-512.
#[derive(Debug, Clone, Copy)]
pub(super) struct Avx512(());

impl Avx512 {
    /// Returns the kernel if `instructions`, which this processor supports, include it.
    pub(super) fn with(instructions: Instructions) -> Option<Self> {
        (instructions >= Instructions::Avx512).then_some(Self(()))
    }
}

/// Writes finished sums to a row of the result.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
pub(super) fn finish(sums: &[f32], row: RowMut<'_>) {
    row.write(sums);
}

/// Rows and columns of a tile of pairs: 24 registers hold sums, four hold a row of the right panel,
/// and one holds a pair of the left operand. A row of a right panel consists of 128 bytes from each
/// of two rows of the operand, which are complete cache lines.
const PAIR_ROWS: usize = 6;
const PAIR_VECTORS: usize = 4;
const PAIR_COLUMNS: usize = PAIR_VECTORS * LANES;

impl Kernel for Avx512Bf16 {
    type Packed = Pair;

    const DEPTH: usize = 2;
    const DEPTH_STEP: usize = 2;
    /// A right panel of 512 KiB, half of the second-level cache. This cache is fast enough: a step
    /// of a tile reads 256 bytes of the panel in twelve cycles. With more depths per panel, sums
    /// are stored and loaded less often.
    const PANEL_DEPTH: usize = 4096;
    const LEFT_LANES: usize = 32;
    const ROWS: usize = PAIR_ROWS;
    const COLUMNS: usize = PAIR_COLUMNS;

    /// Two adjacent depths already form a pair in memory. An odd number of depths is packed,
    /// because the last depth has no partner.
    fn in_place(self, left: Matrix<'_>) -> Option<Left<Pair>> {
        match left.elements {
            FloatSlice::Bf16(elements)
                if left.column_stride == 1 && left.columns.is_multiple_of(2) =>
            {
                Some(Left {
                    first: elements.as_ptr().cast(),
                    row_bytes: left.row_stride.wrapping_mul(2),
                })
            }
            _ => None,
        }
    }

    /// Returns an odd number of cache lines, so that the rows do not all start in the same cache
    /// set.
    fn left_row_bytes(depth: usize) -> usize {
        const LINE: usize = 64;
        let lines = depth
            .checked_mul(size_of::<u16>())
            .expect("a packed row fits into memory")
            .div_ceil(LINE);
        (lines | 1) * LINE
    }

    /// Packed rows have the same layout as the rows that `in_place` uses.
    fn left_at(left: Left<Pair>, row: usize, depth: usize) -> *const Pair {
        left.row(row).wrapping_add(depth / 2)
    }

    unsafe fn pack_left(self, strip: Strip<'_>, panel: *mut Pair) {
        // SAFETY: the kernel exists only where the processor can run it; the rest as the caller
        // promises.
        unsafe { pack_pair_rows(strip, panel, Self::left_row_bytes(strip.depth)) }
    }

    unsafe fn pack_right(self, strip: Strip<'_>, panel: *mut Pair) {
        // SAFETY: as above.
        unsafe { pack_pairs(strip, PAIR_COLUMNS, panel) }
    }

    unsafe fn tile(self, depth: usize, left: LeftRows<Pair>, right: *const Pair, tile: Tile) {
        let tile_of_rows = match left.count {
            1 => tile_bf16::<1>,
            2 => tile_bf16::<2>,
            3 => tile_bf16::<3>,
            4 => tile_bf16::<4>,
            5 => tile_bf16::<5>,
            _ => tile_bf16::<PAIR_ROWS>,
        };
        // SAFETY: as above.
        unsafe { tile_of_rows(depth / 2, left, right, tile) }
    }

    fn finish(self, sums: &[f32], row: RowMut<'_>) {
        // SAFETY: the kernel exists only where the processor can run it.
        unsafe { finish(sums, row) }
    }
}

/// Multiplies a tile of `ROWS` rows. If the tile accumulates, its sums start from the sums of
/// earlier depths. Each element is therefore one sum over all pairs in order, regardless of how the
/// depths are divided into blocks.
///
/// # Safety
/// The processor supports AVX-512 F and BW and AVX512-BF16. For each of `ROWS` rows, which start
/// every `left.row_bytes` bytes, `left` is valid for reads of `pairs` pairs, which need not be
/// aligned. `right` is valid for reads of `pairs * PAIR_COLUMNS` pairs. `tile.values` is aligned to
/// 64 bytes and valid for reads and writes of `ROWS * PAIR_COLUMNS` numbers, which are initialized
/// if `tile.accumulate` is true. No other thread accesses the tile during the call.
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
#[allow(clippy::needless_range_loop)]
unsafe fn tile_bf16<const ROWS: usize>(
    pairs: usize,
    left: LeftRows<Pair>,
    mut right: *const Pair,
    tile: Tile,
) {
    // The loops run over indices, because the compiler unrolls them. With iterators it keeps the
    // sums in memory, which halves the speed.
    let mut sums = [[_mm512_setzero_ps(); PAIR_VECTORS]; ROWS];
    let mut first = left.first;
    // SAFETY: the operands have these depths and the tile these rows, as the caller promises. Rows
    // of 16-bit numbers may start at any 16-bit boundary.
    unsafe {
        if tile.accumulate {
            for row in 0..ROWS {
                for v in 0..PAIR_VECTORS {
                    sums[row][v] = _mm512_load_ps(tile.values.add(row * PAIR_COLUMNS + v * LANES));
                }
            }
        }
        for _ in 0..pairs {
            let vectors = [0, 1, 2, 3].map(|v| _mm512_loadu_si512(right.add(v * LANES).cast()));
            for row in 0..ROWS {
                let pair = first.wrapping_byte_add(row * left.row_bytes).cast::<i32>();
                let pair = _mm512_set1_epi32(pair.read_unaligned());
                for v in 0..PAIR_VECTORS {
                    sums[row][v] = _mm512_dpbf16_ps(
                        sums[row][v],
                        std::mem::transmute::<__m512i, __m512bh>(pair),
                        std::mem::transmute::<__m512i, __m512bh>(vectors[v]),
                    );
                }
            }
            first = first.wrapping_add(1);
            right = right.add(PAIR_COLUMNS);
        }
        for row in 0..ROWS {
            for v in 0..PAIR_VECTORS {
                _mm512_store_ps(tile.values.add(row * PAIR_COLUMNS + v * LANES), sums[row][v]);
            }
        }
    }
}

/// Rows and columns of a tile in single precision: 24 registers hold sums, three hold a row of the
/// right panel, and one holds a number of the left panel.
const ROWS: usize = 8;
const VECTORS: usize = 3;
const COLUMNS: usize = VECTORS * LANES;

impl Kernel for Avx512 {
    type Packed = f32;

    const DEPTH: usize = 1;
    const DEPTH_STEP: usize = 1;
    const PANEL_DEPTH: usize = 192;
    const LEFT_LANES: usize = LANES;
    const ROWS: usize = ROWS;
    const COLUMNS: usize = COLUMNS;
    const MULTIPLIES_ROWS: bool = true;
    /// The second-level cache of most cores with AVX-512, because the left rows are read from this
    /// cache again for every right panel. Half of this size causes more waits at the ends of blocks
    /// and is slower with two threads.
    const LEFT_BYTES: usize = 1 << 20;

    unsafe fn pack_left(self, strip: Strip<'_>, panel: *mut f32) {
        // SAFETY: the kernel exists only where the processor can run it; the rest as the caller
        // promises.
        unsafe { pack_singles(strip, LANES, panel) }
    }

    unsafe fn pack_right(self, strip: Strip<'_>, panel: *mut f32) {
        // SAFETY: as above.
        unsafe { pack_singles(strip, COLUMNS, panel) }
    }

    unsafe fn tile(self, depth: usize, left: LeftRows<f32>, right: *const f32, tile: Tile) {
        // SAFETY: as above.
        unsafe { tile_f32(depth, left.first, right, tile) }
    }

    /// Each row of a tile is three cache lines, and consecutive rows are one row of the result
    /// apart, so the hardware prefetcher does not recognize them as a sequence. Tiles of pairs take
    /// half the time and do not benefit from prefetching.
    fn prefetch_result(self, row: RowMut<'_>, columns: usize) {
        lines(row.addresses(columns)).for_each(prefetch);
    }

    fn multiply_row(self, left: &[f32], right: Matrix<'_>, sums: &mut [f32]) {
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
        fn compiled(left: &[f32], right: Matrix<'_>, sums: &mut [f32], panel: usize) {
            add_product(left, right, sums, panel, f32::mul_add);
        }
        // SAFETY: the kernel exists only where the processor can run it.
        unsafe { compiled(left, right, sums, Self::PANEL_DEPTH) }
    }

    fn finish(self, sums: &[f32], row: RowMut<'_>) {
        // SAFETY: the kernel exists only where the processor can run it.
        unsafe { finish(sums, row) }
    }
}

/// Multiplies a tile. If the tile accumulates, its sums are added to the sums of earlier depths at
/// the end.
///
/// # Safety
/// The processor supports AVX-512 F and BW. For each of `depth` depths, `left` is valid for reads
/// of the first `ROWS` of `LANES` numbers; `right` is valid for reads of `depth * COLUMNS` numbers.
/// All pointers are aligned for `f32`. `tile.values` is valid for reads and writes of
/// `ROWS * COLUMNS` numbers, which are initialized if `tile.accumulate` is true. No other thread
/// accesses the tile during the call.
#[target_feature(enable = "avx512f,avx512bw")]
#[allow(clippy::needless_range_loop)]
unsafe fn tile_f32(depth: usize, mut left: *const f32, mut right: *const f32, tile: Tile) {
    let mut sums = [[_mm512_setzero_ps(); VECTORS]; ROWS];
    // SAFETY: the panels have these depths and the tile these rows, as the caller promises.
    unsafe {
        for _ in 0..depth {
            let vectors = [0, 1, 2].map(|v| _mm512_loadu_ps(right.add(v * LANES)));
            for row in 0..ROWS {
                let number = _mm512_set1_ps(*left.add(row));
                for v in 0..VECTORS {
                    sums[row][v] = _mm512_fmadd_ps(number, vectors[v], sums[row][v]);
                }
            }
            left = left.add(LANES);
            right = right.add(COLUMNS);
        }
        for row in 0..ROWS {
            for v in 0..VECTORS {
                let out = tile.values.add(row * COLUMNS + v * LANES);
                let before =
                    if tile.accumulate { _mm512_loadu_ps(out) } else { _mm512_setzero_ps() };
                _mm512_storeu_ps(out, _mm512_add_ps(before, sums[row][v]));
            }
        }
    }
}
