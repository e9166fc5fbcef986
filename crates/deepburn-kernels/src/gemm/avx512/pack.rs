//! Packing with AVX-512: sixteen packed elements at a time.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::LANES;
use crate::FloatSlice;
use crate::gemm::pack::{Pair, Strip, pack};

/// Reads sixteen packed elements at a time.
pub(in crate::gemm) trait Load: Copy {
    /// What the operand consists of.
    type Element: Copy;
    /// Numbers in a packed element.
    const DEPTH: usize;

    /// The first `count` numbers of one lane, which lie side by side; the rest is zero.
    ///
    /// # Safety
    /// They are readable. `count` is at most `16 * DEPTH`.
    unsafe fn along(first: *const Self::Element, count: usize) -> __m512i;

    /// The numbers of `lanes` lanes, which lie side by side, at one depth, or at two where the second is there.
    ///
    /// # Safety
    /// They are readable. `lanes` is at most 16.
    unsafe fn across(
        first: *const Self::Element,
        second: Option<*const Self::Element>,
        lanes: usize,
    ) -> __m512i;
}

fn mask16(count: usize) -> u16 {
    ((1_u32 << count.min(16)) - 1) as u16
}

fn mask32(count: usize) -> u32 {
    ((1_u64 << count.min(32)) - 1) as u32
}

/// bf16 as it is, in pairs.
#[derive(Clone, Copy)]
pub(in crate::gemm) struct Bf16Pairs;
/// Single precision rounded to pairs of bf16.
#[derive(Clone, Copy)]
pub(in crate::gemm) struct F32Pairs;
/// Single precision as it is.
#[derive(Clone, Copy)]
struct F32Singles;
/// bf16 widened.
#[derive(Clone, Copy)]
struct Bf16Singles;
/// fp16 widened.
#[derive(Clone, Copy)]
struct F16Singles;

/// Lanes of halves to lanes of pairs: the first in the lower half.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn interleave(first: __m256i, second: __m256i) -> __m512i {
    let second = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(second));
    _mm512_or_si512(_mm512_cvtepu16_epi32(first), second)
}

impl Load for Bf16Pairs {
    type Element = bf16;
    const DEPTH: usize = 2;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn along(first: *const bf16, count: usize) -> __m512i {
        unsafe { _mm512_maskz_loadu_epi16(mask32(count), first.cast()) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn across(first: *const bf16, second: Option<*const bf16>, lanes: usize) -> __m512i {
        unsafe {
            let load = |at: *const bf16| _mm256_maskz_loadu_epi16(mask16(lanes), at.cast());
            interleave(load(first), second.map_or(_mm256_setzero_si256(), load))
        }
    }
}

impl Load for F32Pairs {
    type Element = f32;
    const DEPTH: usize = 2;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn along(first: *const f32, count: usize) -> __m512i {
        unsafe {
            let low = _mm512_maskz_loadu_ps(mask16(count), first);
            let high =
                _mm512_maskz_loadu_ps(mask16(count.saturating_sub(16)), first.wrapping_add(16));
            std::mem::transmute(_mm512_cvtne2ps_pbh(high, low))
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn across(first: *const f32, second: Option<*const f32>, lanes: usize) -> __m512i {
        unsafe {
            let load = |at: *const f32| -> __m256i {
                std::mem::transmute(_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask16(lanes), at)))
            };
            interleave(load(first), second.map_or(_mm256_setzero_si256(), load))
        }
    }
}

macro_rules! singles {
    ($load:ident, $element:ty, $read:expr) => {
        impl Load for $load {
            type Element = $element;
            const DEPTH: usize = 1;

            #[inline]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
            unsafe fn along(first: *const $element, count: usize) -> __m512i {
                unsafe { $read(first, mask16(count)) }
            }

            #[inline]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
            unsafe fn across(
                first: *const $element,
                _: Option<*const $element>,
                lanes: usize,
            ) -> __m512i {
                unsafe { $read(first, mask16(lanes)) }
            }
        }
    };
}
singles!(F32Singles, f32, |at: *const f32, mask| _mm512_castps_si512(_mm512_maskz_loadu_ps(
    mask, at
)));
singles!(Bf16Singles, bf16, |at: *const bf16, mask| _mm512_slli_epi32::<16>(
    _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, at.cast()))
));
singles!(F16Singles, f16, |at: *const f16, mask| _mm512_castps_si512(_mm512_cvtph_ps(
    _mm256_maskz_loadu_epi16(mask, at.cast())
)));

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(in crate::gemm) unsafe fn pack_pairs(strip: Strip<'_>, width: usize, panel: *mut Pair) {
    // SAFETY: as the caller promises.
    unsafe {
        match strip.elements {
            FloatSlice::Bf16(elements) => pack_strip::<Bf16Pairs, _>(elements, strip, width, panel),
            FloatSlice::F32(elements) => pack_strip::<F32Pairs, _>(elements, strip, width, panel),
            FloatSlice::F16(_) => pack(strip, width, strip.depth.next_multiple_of(2), panel),
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(super) unsafe fn pack_singles(strip: Strip<'_>, width: usize, panel: *mut f32) {
    // SAFETY: as the caller promises.
    unsafe {
        match strip.elements {
            FloatSlice::F32(elements) => pack_strip::<F32Singles, _>(elements, strip, width, panel),
            FloatSlice::Bf16(elements) => {
                pack_strip::<Bf16Singles, _>(elements, strip, width, panel)
            }
            FloatSlice::F16(elements) => pack_strip::<F16Singles, _>(elements, strip, width, panel),
        }
    }
}

/// Packs a strip as `[depth][width]`, sixteen lanes at a time, by the way in which its elements lie.
#[inline(always)]
unsafe fn pack_strip<L: Load, P: crate::gemm::pack::Packed>(
    elements: &[L::Element],
    strip: Strip<'_>,
    width: usize,
    panel: *mut P,
) {
    let Strip { lanes, depth, lane_stride, depth_stride, .. } = strip;
    if depth_stride != 1 && lane_stride != 1 || lanes == 0 || depth == 0 {
        // SAFETY: as the caller promises.
        unsafe { pack(strip, width, depth.next_multiple_of(L::DEPTH), panel) };
        return;
    }
    assert!((lanes - 1) * lane_stride + (depth - 1) * depth_stride < elements.len());
    for start in (0..width).step_by(LANES) {
        let lanes = lanes.saturating_sub(start).min(LANES);
        let first = elements.as_ptr().wrapping_add(start * lane_stride);
        // SAFETY: these lanes and depths are in the elements, as just checked, and the panel has room.
        unsafe {
            let panel = panel.add(start);
            match lane_stride {
                1 => pack_across::<L>(first, [lanes, depth], depth_stride, panel.cast(), width),
                _ => pack_along::<L>(first, [lanes, depth], lane_stride, panel.cast(), width),
            }
        }
    }
}

/// Packs sixteen lanes that lie side by side.
#[inline(always)]
unsafe fn pack_across<L: Load>(
    first: *const L::Element,
    [lanes, depth]: [usize; 2],
    depth_stride: usize,
    panel: *mut u32,
    width: usize,
) {
    for index in 0..depth.div_ceil(L::DEPTH) {
        let at = index * L::DEPTH;
        let second = (at + 1 < depth).then(|| first.wrapping_add((at + 1) * depth_stride));
        // SAFETY: as the caller promises.
        unsafe {
            let packed = L::across(first.wrapping_add(at * depth_stride), second, lanes);
            _mm512_storeu_si512(panel.add(index * width).cast(), packed);
        }
    }
}

/// Packs sixteen lanes whose depths lie side by side.
#[inline(always)]
unsafe fn pack_along<L: Load>(
    first: *const L::Element,
    [lanes, depth]: [usize; 2],
    lane_stride: usize,
    panel: *mut u32,
    width: usize,
) {
    // SAFETY: as the caller promises.
    unsafe {
        for start in (0..depth).step_by(LANES * L::DEPTH) {
            let count = (depth - start).min(LANES * L::DEPTH);
            let mut rows = [_mm512_setzero_si512(); LANES];
            for (lane, row) in rows.iter_mut().enumerate().take(lanes) {
                *row = L::along(first.wrapping_add(lane * lane_stride + start), count);
            }
            let rows = transposed(rows);
            for (index, row) in rows.iter().enumerate().take(count.div_ceil(L::DEPTH)) {
                _mm512_storeu_si512(panel.add((start / L::DEPTH + index) * width).cast(), *row);
            }
        }
    }
}

/// Transposes a matrix of 16 x 16 numbers of 32 bits.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::gemm) fn transposed(rows: [__m512i; LANES]) -> [__m512i; LANES] {
    let mut a = rows;
    // 2 x 2 blocks of numbers, then 4 x 4, then of whole 128-bit parts.
    for i in (0..LANES).step_by(2) {
        a[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    let mut b = a;
    for i in (0..LANES).step_by(4) {
        b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    let mut c = b;
    for i in 0..4 {
        for half in [0, 8] {
            c[half + i] = _mm512_shuffle_i32x4::<0x88>(b[half + i], b[half + i + 4]);
            c[half + i + 4] = _mm512_shuffle_i32x4::<0xdd>(b[half + i], b[half + i + 4]);
        }
    }
    let mut d = c;
    for i in 0..8 {
        d[i] = _mm512_shuffle_i32x4::<0x88>(c[i], c[i + 8]);
        d[i + 8] = _mm512_shuffle_i32x4::<0xdd>(c[i], c[i + 8]);
    }
    d
}
