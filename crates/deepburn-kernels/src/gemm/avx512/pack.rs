//! Packing with AVX-512, sixteen packed elements at a time.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::LANES;
use crate::FloatSlice;
use crate::gemm::pack::{Pair, Strip, pack};

/// Reads a register of numbers.
pub(in crate::gemm) trait Load512: Copy {
    /// The element type of the operand.
    type Element: Copy;
    /// The number of elements in a packed element of 32 bits.
    const DEPTH: usize;

    /// Loads `count` consecutive numbers; the rest of the register is zero.
    ///
    /// # Safety
    /// `first` is valid for reads of `count` numbers, `count` is at most `16 * DEPTH`, and the
    /// processor has the features of the implementation.
    unsafe fn load(first: *const Self::Element, count: usize) -> __m512i;
}

fn mask16(count: usize) -> u16 {
    ((1_u32 << count.min(16)) - 1) as u16
}

fn mask32(count: usize) -> u32 {
    ((1_u64 << count.min(32)) - 1) as u32
}

/// Loads bf16 numbers unchanged, in pairs.
#[derive(Clone, Copy)]
pub(in crate::gemm) struct Bf16Pairs;
/// Loads single-precision numbers, rounded to pairs of bf16 numbers.
#[derive(Clone, Copy)]
pub(in crate::gemm) struct F32Pairs;
/// Loads single-precision numbers unchanged.
#[derive(Clone, Copy)]
struct F32Singles;
/// Loads bf16 numbers, widened to single precision.
#[derive(Clone, Copy)]
struct Bf16Singles;
/// Loads fp16 numbers, widened to single precision.
#[derive(Clone, Copy)]
struct F16Singles;

impl Load512 for Bf16Pairs {
    type Element = bf16;
    const DEPTH: usize = 2;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn load(first: *const bf16, count: usize) -> __m512i {
        // SAFETY: the caller has `count` elements there, and the mask loads no more.
        unsafe { _mm512_maskz_loadu_epi16(mask32(count), first.cast()) }
    }
}

impl Load512 for F32Pairs {
    type Element = f32;
    const DEPTH: usize = 2;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn load(first: *const f32, count: usize) -> __m512i {
        // SAFETY: the caller has `count` elements there, and the masks load no more.
        unsafe {
            let low = _mm512_maskz_loadu_ps(mask16(count), first);
            let high =
                _mm512_maskz_loadu_ps(mask16(count.saturating_sub(16)), first.wrapping_add(16));
            std::mem::transmute(_mm512_cvtne2ps_pbh(high, low))
        }
    }
}

macro_rules! singles {
    ($load:ident, $element:ty, $read:expr) => {
        impl Load512 for $load {
            type Element = $element;
            const DEPTH: usize = 1;

            #[inline]
            #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
            unsafe fn load(first: *const $element, count: usize) -> __m512i {
                // SAFETY: the caller has `count` elements there, and the mask loads no more.
                unsafe { $read(first, mask16(count)) }
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

/// Packs a strip as pairs, `[pair of depths][width]`. Lanes beyond the strip are zero.
///
/// # Safety
/// The processor has these features. `width` is a multiple of 32 and at least the number of the
/// strip's lanes, and `panel` is aligned for pairs and valid for writes of `depth.div_ceil(2)` rows
/// of `width` pairs.
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

/// Packs a strip as rows of pairs, with one lane every `row_bytes` bytes.
///
/// # Safety
/// The processor has these features. `row_bytes` is a multiple of 4 and large enough for all depths
/// of a lane, and `rows` is aligned for pairs and valid for writes of one row for each lane of the
/// strip.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn pack_pair_rows(strip: Strip<'_>, rows: *mut Pair, row_bytes: usize) {
    let row_pairs = row_bytes / size_of::<Pair>();
    // SAFETY: as the caller promises.
    unsafe {
        match strip.elements {
            FloatSlice::Bf16(elements) => pack_rows::<Bf16Pairs>(elements, strip, rows, row_pairs),
            FloatSlice::F32(elements) => pack_rows::<F32Pairs>(elements, strip, rows, row_pairs),
            FloatSlice::F16(_) => pack_each_row(strip, rows, row_pairs),
        }
    }
}

/// Packs rows with the method for their strides, 32 lanes and 32 depths at a time.
///
/// Full blocks use a copy of the code with constant counts, here and in the other functions. The
/// compiler then removes the masks and keeps the block in registers instead of in an array on the
/// stack.
///
/// # Safety
/// The same conditions as for [`pack_pair_rows`], with one lane every `row_pairs` pairs.
#[inline(always)]
unsafe fn pack_rows<L: Load512>(
    elements: &[L::Element],
    strip: Strip<'_>,
    rows: *mut Pair,
    row_pairs: usize,
) {
    const SIDE: usize = 2 * LANES;
    let Strip { lanes, depth, lane_stride, depth_stride, .. } = strip;
    if depth_stride != 1 && lane_stride != 1 || lanes == 0 || depth == 0 {
        // SAFETY: as the caller promises.
        unsafe { pack_each_row(strip, rows, row_pairs) };
        return;
    }
    assert!((lanes - 1) * lane_stride + (depth - 1) * depth_stride < elements.len());
    for lane in (0..lanes).step_by(SIDE) {
        for start in (0..depth).step_by(SIDE) {
            let counts = [(lanes - lane).min(SIDE), (depth - start).min(SIDE)];
            let first = elements.as_ptr().wrapping_add(lane * lane_stride + start * depth_stride);
            // SAFETY: these lanes and depths are in the elements, as just checked, and the caller
            // promises the size of `rows`.
            unsafe {
                let rows = rows.add(lane * row_pairs + start / 2).cast();
                match depth_stride {
                    1 => copy_rows::<L>(first, counts, lane_stride, rows, row_pairs),
                    _ if counts == [SIDE; 2] => {
                        transpose_rows::<L>(first, [SIDE; 2], depth_stride, rows, row_pairs);
                    }
                    _ => transpose_rows::<L>(first, counts, depth_stride, rows, row_pairs),
                }
            }
        }
    }
}

/// Packs rows one number at a time.
///
/// # Safety
/// `rows` is aligned for pairs and valid for writes of one row of `row_pairs` pairs for each lane,
/// and a row is large enough for all depths.
unsafe fn pack_each_row(strip: Strip<'_>, rows: *mut Pair, row_pairs: usize) {
    for lane in 0..strip.lanes {
        let elements = strip.elements.starting_at(lane * strip.lane_stride);
        // SAFETY: the caller promises that `rows` has the size of all rows.
        unsafe {
            let row = Strip { elements, lanes: 1, ..strip };
            pack(row, 1, strip.depth.next_multiple_of(2), rows.add(lane * row_pairs));
        }
    }
}

/// Packs a block of lanes whose depths are adjacent in memory as rows of pairs.
///
/// # Safety
/// The caller has the features of [`pack_pairs`]. A block has at most 32 depths. For each lane,
/// `depth` elements can be read from `first` on, every `lane_stride` elements, and
/// `depth.div_ceil(2)` pairs can be written from `rows` on, every `row_pairs` pairs.
#[inline(always)]
unsafe fn copy_rows<L: Load512>(
    first: *const L::Element,
    [lanes, depth]: [usize; 2],
    lane_stride: usize,
    rows: *mut i32,
    row_pairs: usize,
) {
    for lane in 0..lanes {
        // SAFETY: as the caller promises.
        unsafe {
            let row = L::load(first.wrapping_add(lane * lane_stride), depth);
            _mm512_mask_storeu_epi32(rows.add(lane * row_pairs), mask16(depth.div_ceil(2)), row);
        }
    }
}

/// Packs a block of lanes that are adjacent in memory as rows of pairs. The loops run over indices,
/// because the compiler does not unroll the iterators.
///
/// # Safety
/// The same conditions as for [`copy_rows`], but `lanes` elements, at most 32, can be read every
/// `depth_stride` elements, for each depth.
#[inline(always)]
#[allow(clippy::needless_range_loop)]
unsafe fn transpose_rows<L: Load512>(
    first: *const L::Element,
    [lanes, depth]: [usize; 2],
    depth_stride: usize,
    rows: *mut i32,
    row_pairs: usize,
) {
    // SAFETY: as the caller promises.
    unsafe {
        let pairs = depth.div_ceil(2);
        let mut halves = [[_mm512_setzero_si512(); LANES]; 2];
        for pair in 0..pairs {
            [halves[0][pair], halves[1][pair]] =
                load_pairs::<L>(first, [lanes, depth], 2 * pair, depth_stride);
        }
        for half in 0..2 {
            let start = half * LANES;
            let half = transposed(halves[half]);
            for lane in 0..lanes.saturating_sub(start).min(LANES) {
                let row = rows.add((start + lane) * row_pairs);
                _mm512_mask_storeu_epi32(row, mask16(pairs), half[lane]);
            }
        }
    }
}

/// Loads depths `at` and `at + 1` of at most 32 lanes that are adjacent in memory, in pairs. A
/// depth that does not exist is zero.
///
/// # Safety
/// The caller has the features of [`pack_pairs`]. From `first` on, `lanes` elements can be read
/// every `depth_stride` elements, for each depth.
#[inline(always)]
unsafe fn load_pairs<L: Load512>(
    first: *const L::Element,
    [lanes, depth]: [usize; 2],
    at: usize,
    depth_stride: usize,
) -> [__m512i; 2] {
    // SAFETY: as the caller promises.
    unsafe {
        let [even, odd] = [at, at + 1].map(|at| match at < depth {
            true => L::load(first.wrapping_add(at * depth_stride), lanes),
            false => _mm512_setzero_si512(),
        });
        interleaved(even, odd)
    }
}

/// Interleaves the numbers of two registers. In each pair, the number from `even` is the lower
/// half.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn interleaved(even: __m512i, odd: __m512i) -> [__m512i; 2] {
    const ORDER: [[u16; 32]; 2] = {
        let mut order = [[0; 32]; 2];
        let mut at = 0;
        while at < 64 {
            order[at / 32][at % 32] = (at % 2 * 32 + at / 2) as u16;
            at += 1;
        }
        order
    };
    // SAFETY: an array has the size of a register.
    let order: [__m512i; 2] = unsafe { std::mem::transmute(ORDER) };
    order.map(|order| _mm512_permutex2var_epi16(even, order, odd))
}

/// Packs a strip in single precision, `[depth][width]`. Lanes beyond the strip are zero.
///
/// # Safety
/// The processor has these features. `width` is a multiple of 16 and at least the number of the
/// strip's lanes, and `panel` is aligned for `f32` and valid for writes of `width` numbers for each
/// depth.
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

/// Packs a strip as `[depth][width]` with the method for its strides.
///
/// # Safety
/// The same conditions as for [`pack_pairs`] (pairs) or [`pack_singles`] (single precision).
#[inline(always)]
unsafe fn pack_strip<L: Load512, P: crate::gemm::pack::Packed>(
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
    // SAFETY: these lanes and depths are in the elements, as just checked, and the caller promises
    // the size of the panel.
    unsafe {
        let (first, panel) = (elements.as_ptr(), panel.cast());
        match (lane_stride, L::DEPTH) {
            (1, 1) => pack_across::<L>(first, [lanes, depth], depth_stride, panel, width),
            (1, _) => pack_pairs_across::<L>(first, [lanes, depth], depth_stride, panel, width),
            _ => {
                for start in (0..width).step_by(LANES) {
                    let lanes = lanes.saturating_sub(start).min(LANES);
                    let first = first.wrapping_add(start * lane_stride);
                    let panel = panel.add(start);
                    pack_along::<L>(first, [lanes, depth], lane_stride, panel, width);
                }
            }
        }
    }
}

/// Packs lanes that are adjacent in memory, in single precision.
///
/// # Safety
/// The caller has the features of [`pack_singles`]. From `first` on, `lanes` elements can be read
/// every `depth_stride` elements, for each depth. `width` is a multiple of 16, and `panel` is valid
/// for writes of `width` numbers for each depth.
#[inline(always)]
unsafe fn pack_across<L: Load512>(
    first: *const L::Element,
    [lanes, depth]: [usize; 2],
    depth_stride: usize,
    panel: *mut u32,
    width: usize,
) {
    for at in 0..depth {
        for start in (0..width).step_by(LANES) {
            let lanes = lanes.saturating_sub(start).min(LANES);
            // SAFETY: as the caller promises.
            unsafe {
                let row = L::load(first.wrapping_add(at * depth_stride + start), lanes);
                _mm512_storeu_si512(panel.add(at * width + start).cast(), row);
            }
        }
    }
}

/// Packs lanes that are adjacent in memory, in pairs. Each row of the panel is completed before the
/// next, so only the cache lines of two depths are read at a time.
///
/// # Safety
/// The caller has the features of [`pack_pairs`]. From `first` on, `lanes` elements can be read
/// every `depth_stride` elements, for each depth. `width` is a multiple of 32, and `panel` is valid
/// for writes of `depth.div_ceil(2)` rows of `width` pairs.
#[inline(always)]
unsafe fn pack_pairs_across<L: Load512>(
    first: *const L::Element,
    [lanes, depth]: [usize; 2],
    depth_stride: usize,
    panel: *mut u32,
    width: usize,
) {
    const WIDTH: usize = 2 * LANES;
    for at in (0..depth).step_by(2) {
        for start in (0..width).step_by(WIDTH) {
            let lanes = lanes.saturating_sub(start).min(WIDTH);
            // SAFETY: as the caller promises.
            unsafe {
                let first = first.wrapping_add(start + at * depth_stride);
                let [low, high] = match [lanes, (depth - at).min(2)] {
                    [WIDTH, 2] => load_pairs::<L>(first, [WIDTH, 2], 0, depth_stride),
                    counts => load_pairs::<L>(first, counts, 0, depth_stride),
                };
                let row = panel.add(at / 2 * width + start);
                _mm512_storeu_si512(row.cast(), low);
                _mm512_storeu_si512(row.add(LANES).cast(), high);
            }
        }
    }
}

/// Packs sixteen lanes whose depths are adjacent in memory. Lanes from `lanes` on are zero.
///
/// # Safety
/// The caller has the features of [`pack_pairs`] (pairs) or [`pack_singles`] (single precision).
/// From `first` on, `depth` elements can be read every `lane_stride` elements, for each of at most
/// sixteen `lanes`. `panel` is valid for writes of sixteen packed elements every `width` elements,
/// for each packed depth.
#[inline(always)]
unsafe fn pack_along<L: Load512>(
    first: *const L::Element,
    [lanes, depth]: [usize; 2],
    lane_stride: usize,
    panel: *mut u32,
    width: usize,
) {
    for start in (0..depth).step_by(LANES * L::DEPTH) {
        let counts = [lanes, (depth - start).min(LANES * L::DEPTH)];
        let first = first.wrapping_add(start);
        // SAFETY: as the caller promises.
        unsafe {
            let panel = panel.add(start / L::DEPTH * width);
            if lanes == LANES && counts[1] == LANES * L::DEPTH {
                let counts = [LANES, LANES * L::DEPTH];
                transpose_panel::<L>(first, counts, lane_stride, panel, width);
            } else {
                transpose_panel::<L>(first, counts, lane_stride, panel, width);
            }
        }
    }
}

/// Packs a block of at most sixteen lanes, whose depths are adjacent in memory, with at most
/// sixteen packed elements per lane.
///
/// # Safety
/// The same conditions as for [`pack_along`].
#[inline(always)]
#[allow(clippy::needless_range_loop)]
unsafe fn transpose_panel<L: Load512>(
    first: *const L::Element,
    [lanes, depth]: [usize; 2],
    lane_stride: usize,
    panel: *mut u32,
    width: usize,
) {
    // SAFETY: as the caller promises.
    unsafe {
        let mut rows = [_mm512_setzero_si512(); LANES];
        for lane in 0..lanes {
            rows[lane] = L::load(first.wrapping_add(lane * lane_stride), depth);
        }
        let rows = transposed(rows);
        for index in 0..depth.div_ceil(L::DEPTH) {
            _mm512_storeu_si512(panel.add(index * width).cast(), rows[index]);
        }
    }
}

/// Transposes a matrix of 16 x 16 numbers of 32 bits.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in crate::gemm) fn transposed(rows: [__m512i; LANES]) -> [__m512i; LANES] {
    let mut a = rows;
    // Transposes 2 x 2 blocks of numbers, then 4 x 4 blocks, and finally the matrix of 128-bit
    // parts.
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
