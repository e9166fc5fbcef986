//! Packing for AMX, with the loads of AVX-512.

use std::arch::x86_64::*;

use super::{COLUMNS, DEPTH_STEP, PAIRS, ROWS};
use crate::FloatSlice;
use crate::gemm::avx512::pack::{Bf16Pairs, F32Pairs, Load512, pack_pairs, transposed};
use crate::gemm::pack::{Pair, Strip};

/// Packs a right panel, as `[pair][32 columns]`.
///
/// # Safety
/// The same conditions as for [`Kernel::pack_right`](crate::gemm::kernel::Kernel::pack_right). The
/// processor supports AVX512-BF16.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(in crate::gemm) unsafe fn pack_right(strip: Strip<'_>, panel: *mut Pair) {
    let packed = strip.depth.div_ceil(2);
    let padded = strip.depth.next_multiple_of(DEPTH_STEP) / 2;
    // SAFETY: as the caller promises; zero bits are a pair of zeros.
    unsafe {
        pack_pairs(strip, COLUMNS, panel);
        panel.add(packed * COLUMNS).write_bytes(0, (padded - packed) * COLUMNS);
    }
}

/// Packs a left panel, as `[block of 32 depths][32 rows][16 pairs]`.
///
/// # Safety
/// The same conditions as for [`Kernel::pack_left`](crate::gemm::kernel::Kernel::pack_left). The
/// processor supports AVX512-BF16.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(in crate::gemm) unsafe fn pack_left(strip: Strip<'_>, panel: *mut Pair) {
    for (block, start) in (0..strip.depth).step_by(DEPTH_STEP).enumerate() {
        let part = Strip {
            elements: strip.elements.starting_at(start * strip.depth_stride),
            depth: DEPTH_STEP.min(strip.depth - start),
            ..strip
        };
        // SAFETY: as the caller promises.
        unsafe {
            let out = panel.add(block * ROWS * PAIRS);
            match part.elements {
                FloatSlice::Bf16(elements) if part.depth_stride == 1 => {
                    pack_along::<Bf16Pairs>(elements, part, out);
                }
                FloatSlice::F32(elements) if part.depth_stride == 1 => {
                    pack_along::<F32Pairs>(elements, part, out);
                }
                _ => pack_transposed(part, out),
            }
        }
    }
}

/// Packs a block of the left panel whose depths are adjacent in memory. Each row is one load.
///
/// # Safety
/// The processor has the features of [`pack_pairs`]. The strip has at most `ROWS` lanes and
/// `2 * PAIRS` depths, and `out` is valid for writes of `ROWS * PAIRS` pairs.
#[inline(always)]
unsafe fn pack_along<L: Load512>(elements: &[L::Element], strip: Strip<'_>, out: *mut Pair) {
    let Strip { lanes, depth, lane_stride, .. } = strip;
    assert!(lanes > 0 && (lanes - 1) * lane_stride + depth <= elements.len());
    for lane in 0..ROWS {
        // SAFETY: the lanes and depths of the strip are in the elements, as just checked; the
        // caller promises the size of `out`.
        unsafe {
            let count = if lane < lanes { depth } else { 0 };
            let row = L::load(elements.as_ptr().wrapping_add(lane * lane_stride), count);
            _mm512_storeu_si512(out.add(lane * PAIRS).cast(), row);
        }
    }
}

/// Packs a block of the left panel for any other strides: first in the layout of a right panel,
/// which is then transposed.
///
/// # Safety
/// The same conditions as for [`pack_along`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn pack_transposed(strip: Strip<'_>, out: *mut Pair) {
    let mut pairs = [Pair(0); PAIRS * ROWS];
    // SAFETY: `pairs` has the size of all lanes and depths of a block; the caller promises the size
    // of `out`.
    unsafe {
        pack_pairs(strip, ROWS, pairs.as_mut_ptr());
        for first in (0..ROWS).step_by(PAIRS) {
            let mut rows = [_mm512_setzero_si512(); PAIRS];
            for (pair, row) in rows.iter_mut().enumerate() {
                *row = _mm512_loadu_si512(pairs.as_ptr().add(pair * ROWS + first).cast());
            }
            for (lane, row) in transposed(rows).into_iter().enumerate() {
                _mm512_storeu_si512(out.add((first + lane) * PAIRS).cast(), row);
            }
        }
    }
}
