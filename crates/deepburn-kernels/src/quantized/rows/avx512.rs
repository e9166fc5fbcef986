//! Vectors of 16 numbers with AVX-512, and sums of products of 16-bit integers with VNNI.

use std::arch::x86_64::*;

use super::avx2::Multiply;
use super::lanes::{Lanes, instructions};
use super::nibbles::{LANES, Numbers};

impl Lanes for __m512 {
    const COUNT: usize = 16;

    instructions! {
        fn zero() -> Self { _mm512_setzero_ps() }
        fn load(from: *const f32) -> Self { _mm512_loadu_ps(from) }
        fn load_f16(from: *const u8) -> Self { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
        fn load_bf16(from: *const u8) -> Self {
            let halves = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(halves))
        }
        fn times_plus(self, other: Self, sum: Self) -> Self { _mm512_fmadd_ps(self, other, sum) }
        fn total(self) -> f32 { _mm512_reduce_add_ps(self) }
    }
}

/// VNNI on vectors of AVX2.
pub(super) struct Vnni;

impl Multiply for Vnni {
    #[inline(always)]
    unsafe fn add_products(sum: __m256i, left: __m256i, right: __m256i) -> __m256i {
        // SAFETY: as the caller promises.
        unsafe { _mm256_dpwssd_epi32(sum, left, right) }
    }
}

impl Numbers for __m512i {
    type Floats = __m512;

    instructions! {
        fn load(from: *const u8) -> Self { _mm512_loadu_si512(from.cast()) }
        fn load_first(from: *const u8, bytes: usize) -> Self {
            _mm512_maskz_loadu_epi8((1 << bytes) - 1, from.cast())
        }
        fn and(self, mask: i16) -> Self { _mm512_and_si512(self, _mm512_set1_epi16(mask)) }
        fn shift_right<const BITS: i32>(self) -> Self {
            _mm512_srlv_epi16(self, _mm512_set1_epi16(BITS as i16))
        }
        fn add_products(sum: Self, left: Self, right: Self) -> Self {
            _mm512_dpwssd_epi32(sum, left, right)
        }
        fn floats(self) -> __m512 { _mm512_cvtepi32_ps(self) }
        fn scales(from: *const u8, count: usize, x: *const f32) -> __m512 {
            let halves = match count {
                16.. => _mm256_loadu_si256(from.cast()),
                _ => _mm256_maskz_loadu_epi16((1 << count) - 1, from.cast()),
            };
            _mm512_mul_ps(_mm512_cvtph_ps(halves), _mm512_loadu_ps(x))
        }
        fn places(first: usize) -> Self {
            let lanes: [i32; 16] = std::array::from_fn(|lane| (lane / LANES) as i32);
            _mm512_add_epi32(Self::load(lanes.as_ptr().cast()), _mm512_set1_epi32(first as i32))
        }
        fn spread(floats: __m512, places: Self) -> __m512 { _mm512_permutexvar_ps(places, floats) }
    }
}
