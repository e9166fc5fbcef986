//! Vectors of 16 numbers with AVX-512, and sums of products of 16-bit integers with VNNI.

use std::arch::x86_64::*;

use super::avx2::Multiply;
use super::lanes::Lanes;

impl Lanes for __m512 {
    const COUNT: usize = 16;

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: as the caller promises.
        unsafe { _mm512_setzero_ps() }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: as the caller promises.
        unsafe { _mm512_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const u8) -> Self {
        // SAFETY: as the caller promises.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u8) -> Self {
        // SAFETY: as the caller promises.
        unsafe {
            let halves = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(halves))
        }
    }

    #[inline(always)]
    unsafe fn times_plus(self, other: Self, sum: Self) -> Self {
        // SAFETY: as the caller promises.
        unsafe { _mm512_fmadd_ps(self, other, sum) }
    }

    #[inline(always)]
    unsafe fn total(self) -> f32 {
        // SAFETY: as the caller promises.
        unsafe { _mm512_reduce_add_ps(self) }
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
