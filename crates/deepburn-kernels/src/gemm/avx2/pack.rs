//! Packing with AVX2, which widens eight numbers at a time to single precision.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::LANES;
use crate::element::Element;
use crate::float_slice::with_elements;
use crate::gemm::pack::{Strip, pack};

/// Reads a register of numbers.
trait Load256: Element {
    /// Returns eight numbers, widened.
    ///
    /// # Safety
    /// The processor has AVX2 and F16C.
    unsafe fn load(numbers: &[Self; LANES]) -> __m256;
}

macro_rules! load {
    ($Element:ty, $read:expr) => {
        impl Load256 for $Element {
            #[inline]
            #[target_feature(enable = "avx2,f16c")]
            unsafe fn load(numbers: &[Self; LANES]) -> __m256 {
                // SAFETY: the reference points to eight numbers.
                unsafe { $read(numbers.as_ptr()) }
            }
        }
    };
}
load!(f32, |at: *const f32| _mm256_loadu_ps(at));
load!(f16, |at: *const f16| _mm256_cvtph_ps(_mm_loadu_si128(at.cast())));
load!(bf16, |at: *const bf16| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(
    _mm_loadu_si128(at.cast())
))));

/// Packs a strip as consecutive micro-panels `[depth][WIDTH]`.
///
/// # Safety
/// The processor has AVX2 and F16C, and `panels` is aligned for `f32` and valid for writes of
/// `lanes.div_ceil(WIDTH)` complete micro-panels of the strip's depth.
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn pack_singles<const WIDTH: usize>(strip: Strip<'_>, panels: *mut f32) {
    // SAFETY: as the caller promises.
    unsafe {
        with_elements!(strip.elements, elements => pack_strip::<_, WIDTH>(elements, strip, panels))
    }
}

/// Packs a strip with the method for its strides. Lanes that do not fill a micro-panel, and
/// elements that are contiguous in neither direction, are packed one by one.
///
/// # Safety
/// The same conditions as for [`pack_singles`].
#[inline(always)]
unsafe fn pack_strip<E: Load256, const WIDTH: usize>(
    elements: &[E],
    strip: Strip<'_>,
    panels: *mut f32,
) {
    const { assert!(WIDTH == 6 || WIDTH.is_multiple_of(LANES), "`store` has no other width") };
    let Strip { lanes, depth, lane_stride, depth_stride, .. } = strip;
    let is_dense = lane_stride == 1 || depth_stride == 1;
    let whole = if is_dense { lanes / WIDTH } else { 0 };
    // `eight` would return zeros for elements beyond the end.
    assert!(
        whole == 0 || (lanes - 1) * lane_stride + (depth - 1) * depth_stride < elements.len(),
        "a strip is inside of its operand"
    );
    // SAFETY: as the caller promises.
    unsafe {
        if lane_stride == 1 {
            pack_across::<E, WIDTH>(elements, whole, [depth, depth_stride], panels);
        } else {
            for panel in 0..whole {
                let elements = &elements[panel * WIDTH * lane_stride..];
                let panel = panels.add(panel * WIDTH * depth);
                pack_along::<E, WIDTH>(elements, [depth, lane_stride], panel);
            }
        }
        for lane in (whole * WIDTH..lanes).step_by(WIDTH) {
            let part = strip.lanes_from(lane, (lanes - lane).min(WIDTH));
            pack(part, WIDTH, depth, panels.add(lane * depth));
        }
    }
}

/// Packs micro-panels of lanes that are adjacent in memory.
///
/// # Safety
/// The processor has AVX2 and F16C, and `panels` is valid for writes of `count` micro-panels of
/// this depth.
#[inline(always)]
unsafe fn pack_across<E: Load256, const WIDTH: usize>(
    elements: &[E],
    count: usize,
    [depth, depth_stride]: [usize; 2],
    panels: *mut f32,
) {
    for at in 0..depth {
        for panel in 0..count {
            for lane in (0..WIDTH).step_by(LANES) {
                // SAFETY: as the caller promises; these lanes are in the panel.
                unsafe {
                    let from = at * depth_stride + panel * WIDTH + lane;
                    let numbers = E::load(&eight(elements, from));
                    let out = panels.add((panel * depth + at) * WIDTH + lane);
                    store(out, numbers, (WIDTH - lane).min(LANES));
                }
            }
        }
    }
}

/// Packs lanes whose depths are adjacent in memory, by transposing blocks of eight lanes and eight
/// depths.
///
/// # Safety
/// The processor has AVX2 and F16C, and `panel` is aligned for `f32` and valid for writes of a
/// micro-panel of this depth.
#[inline(always)]
#[allow(clippy::needless_range_loop)]
unsafe fn pack_along<E: Load256, const WIDTH: usize>(
    elements: &[E],
    [depth, lane_stride]: [usize; 2],
    panel: *mut f32,
) {
    let whole = depth / LANES * LANES;
    for first in (0..WIDTH).step_by(LANES) {
        let lanes = (WIDTH - first).min(LANES);
        for start in (0..whole).step_by(LANES) {
            // SAFETY: as the caller promises; these lanes and depths are in the panel.
            unsafe {
                let mut rows = [_mm256_setzero_ps(); LANES];
                for lane in 0..lanes {
                    let from = (first + lane) * lane_stride + start;
                    rows[lane] = E::load(&eight(elements, from));
                }
                let rows = transposed(rows);
                for row in 0..LANES {
                    store(panel.add((start + row) * WIDTH + first), rows[row], lanes);
                }
            }
        }
    }
    for at in whole..depth {
        for lane in 0..WIDTH {
            let number = elements[lane * lane_stride + at].widen();
            // SAFETY: as above.
            unsafe { panel.add(at * WIDTH + lane).write(number) };
        }
    }
}

/// Returns the eight elements from `from` on. Elements beyond the end are zero.
#[inline(always)]
fn eight<E: Load256>(elements: &[E], from: usize) -> [E; LANES] {
    let rest = elements.get(from..).unwrap_or_default();
    match rest.first_chunk() {
        Some(numbers) => *numbers,
        None => std::array::from_fn(|i| rest.get(i).copied().unwrap_or(E::narrow(0.0))),
    }
}

/// Stores the first `count` of eight numbers, where `count` is 8 or 6.
///
/// # Safety
/// `out` is valid for writes of `count` numbers, and the processor has AVX2.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn store(out: *mut f32, numbers: __m256, count: usize) {
    // SAFETY: as the caller promises.
    unsafe {
        if count == LANES {
            return _mm256_storeu_ps(out, numbers);
        }
        debug_assert_eq!(count, 6);
        _mm_storeu_ps(out, _mm256_castps256_ps128(numbers));
        let high = _mm_castps_si128(_mm256_extractf128_ps::<1>(numbers));
        _mm_storel_epi64(out.add(4).cast(), high);
    }
}

/// Transposes a matrix of 8 x 8 numbers.
#[inline]
#[target_feature(enable = "avx2")]
fn transposed(rows: [__m256; LANES]) -> [__m256; LANES] {
    let [r0, r1, r2, r3, r4, r5, r6, r7] = rows;
    // Interleaves pairs of rows, then pairs of the results, and finally exchanges halves.
    let halves = |a, b, c, d| {
        let [ab_low, ab_high] = [_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b)];
        let [cd_low, cd_high] = [_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d)];
        [
            _mm256_shuffle_ps::<0b01_00_01_00>(ab_low, cd_low),
            _mm256_shuffle_ps::<0b11_10_11_10>(ab_low, cd_low),
            _mm256_shuffle_ps::<0b01_00_01_00>(ab_high, cd_high),
            _mm256_shuffle_ps::<0b11_10_11_10>(ab_high, cd_high),
        ]
    };
    let (upper, lower) = (halves(r0, r1, r2, r3), halves(r4, r5, r6, r7));
    std::array::from_fn(|i| match i < 4 {
        true => _mm256_permute2f128_ps::<0x20>(upper[i], lower[i]),
        false => _mm256_permute2f128_ps::<0x31>(upper[i - 4], lower[i - 4]),
    })
}
