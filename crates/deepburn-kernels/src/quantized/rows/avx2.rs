//! Vectors of 8 numbers with AVX2, fused multiply-add and conversions of f16, and products of
//! signed bytes.

use std::arch::x86_64::*;

use super::block_vector::BlockVector;
use super::lanes::{Lanes, instructions};
use super::nibbles::{LANES, Numbers};
use super::{BLOCK, EncodedRows, SCALE};

impl Lanes for __m256 {
    const COUNT: usize = 8;

    instructions! {
        fn zero() -> Self { _mm256_setzero_ps() }
        fn load(from: *const f32) -> Self { _mm256_loadu_ps(from) }
        fn load_f16(from: *const u8) -> Self { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) }
        fn load_bf16(from: *const u8) -> Self {
            let halves = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(halves))
        }
        fn times_plus(self, other: Self, sum: Self) -> Self { _mm256_fmadd_ps(self, other, sum) }
        fn total(self) -> f32 {
            let four = _mm_add_ps(_mm256_castps256_ps128(self), _mm256_extractf128_ps::<1>(self));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        }
    }
}

/// Sums of products of 16-bit integers.
pub(super) trait Multiply {
    /// Adds the products of adjacent 16-bit integers to the 32-bit integers of `sum`.
    ///
    /// # Safety
    /// The processor has the instructions.
    unsafe fn add_products(sum: __m256i, left: __m256i, right: __m256i) -> __m256i;
}

/// AVX2 alone: products of pairs, which are then added.
pub(super) struct Madd;

impl Multiply for Madd {
    #[inline(always)]
    unsafe fn add_products(sum: __m256i, left: __m256i, right: __m256i) -> __m256i {
        // SAFETY: as the caller promises.
        unsafe { _mm256_add_epi32(sum, _mm256_madd_epi16(left, right)) }
    }
}

/// The number of blocks whose scales are multiplied at a time.
const SCALES: usize = 64;

/// Writes the dot products of consecutive rows of signed bytes and `x` to `out`; inlined, so that
/// it is compiled for the instruction set.
///
/// # Safety
/// The processor has AVX2, FMA, F16C and the instructions of `M`. The rows have as many blocks as
/// the vector.
#[inline(always)]
pub(super) unsafe fn multiply<M: Multiply>(
    rows: EncodedRows<'_>,
    x: &BlockVector,
    out: &mut [f32],
) {
    let blocks = x.blocks();
    for (row, out) in out.iter_mut().enumerate() {
        let codes = rows.codes[row * blocks * BLOCK..].as_ptr();
        let scales = &rows.scales[row * blocks..][..blocks];
        // SAFETY: as the caller promises.
        *out = unsafe { dot::<M>(codes, scales, x) };
    }
}

/// Returns the dot product of a row and a vector.
#[inline(always)]
unsafe fn dot<M: Multiply>(codes: *const u8, scales: &[[u8; SCALE]], x: &BlockVector) -> f32 {
    // SAFETY: as the caller of `multiply` promises.
    unsafe {
        // Two sums, so that an addition need not wait for the one before.
        let (mut even, mut odd) = (_mm256_setzero_ps(), _mm256_setzero_ps());
        for (part, scales) in scales.chunks(SCALES).enumerate() {
            let start = part * SCALES;
            let products = products(scales, &x.scales()[start..]);
            let (pairs, rest) = products[..scales.len()].as_chunks::<2>();
            for (i, [first, second]) in pairs.iter().enumerate() {
                let at = start + 2 * i;
                let sums = _mm256_cvtepi32_ps(block_sums::<M>(codes, x, at));
                even = _mm256_fmadd_ps(sums, _mm256_set1_ps(*first), even);
                let sums = _mm256_cvtepi32_ps(block_sums::<M>(codes, x, at + 1));
                odd = _mm256_fmadd_ps(sums, _mm256_set1_ps(*second), odd);
            }
            if let [last] = rest {
                let sums = block_sums::<M>(codes, x, start + scales.len() - 1);
                even = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums), _mm256_set1_ps(*last), even);
            }
        }
        _mm256_add_ps(even, odd).total()
    }
}

/// Returns the products of at most [`SCALES`] scales of a row and of the vector.
#[inline(always)]
unsafe fn products(row: &[[u8; SCALE]], x: &[f32]) -> [f32; SCALES] {
    let mut products = [0.0; SCALES];
    let (eights, rest) = row.as_chunks::<8>();
    for (i, scales) in eights.iter().enumerate() {
        // SAFETY: `x` has at least as many elements as the row, and the processor has F16C.
        unsafe {
            let scales = _mm256_cvtph_ps(_mm_loadu_si128(scales.as_ptr().cast()));
            let both = _mm256_mul_ps(scales, _mm256_loadu_ps(x[8 * i..8 * i + 8].as_ptr()));
            _mm256_storeu_ps(products[8 * i..8 * i + 8].as_mut_ptr(), both);
        }
    }
    let start = 8 * eights.len();
    for ((product, scale), x) in products[start..].iter_mut().zip(rest).zip(&x[start..]) {
        *product = super::dot_blocks::scale(*scale) * x;
    }
    products
}

/// Returns the sums of products of block number `block` of a row and of the vector.
///
/// # Safety
/// Both have this block, and the processor has the instructions of `M`.
#[inline(always)]
unsafe fn block_sums<M: Multiply>(codes: *const u8, x: &BlockVector, block: usize) -> __m256i {
    // SAFETY: the block has 32 codes.
    unsafe {
        let codes = codes.add(block * BLOCK);
        let x = x.codes().as_ptr().add(block * BLOCK);
        let first = _mm256_cvtepi8_epi16(_mm_loadu_si128(codes.cast()));
        let second = _mm256_cvtepi8_epi16(_mm_loadu_si128(codes.add(BLOCK / 2).cast()));
        let sum = _mm256_setzero_si256();
        let sum = M::add_products(sum, first, _mm256_loadu_si256(x.cast()));
        M::add_products(sum, second, _mm256_loadu_si256(x.add(BLOCK / 2).cast()))
    }
}

impl Numbers for __m256i {
    type Floats = __m256;

    instructions! {
        fn load(from: *const u8) -> Self { _mm256_loadu_si256(from.cast()) }
        fn load_first(from: *const u8, bytes: usize) -> Self {
            let mut all = [0; 32];
            // AVX2 has no masked load of bytes, and a whole register may reach beyond the end.
            all[..bytes].copy_from_slice(std::slice::from_raw_parts(from, bytes));
            Self::load(all.as_ptr())
        }
        fn and(self, mask: i16) -> Self { _mm256_and_si256(self, _mm256_set1_epi16(mask)) }
        fn shift_right<const BITS: i32>(self) -> Self { _mm256_srli_epi16::<BITS>(self) }
        fn add_products(sum: Self, left: Self, right: Self) -> Self {
            _mm256_add_epi32(sum, _mm256_madd_epi16(left, right))
        }
        fn floats(self) -> __m256 { _mm256_cvtepi32_ps(self) }
        fn scales(from: *const u8, count: usize, x: *const f32) -> __m256 {
            let halves = match count {
                8.. => _mm_loadu_si128(from.cast()),
                _ => _mm256_castsi256_si128(Self::load_first(from, 2 * count)),
            };
            _mm256_mul_ps(_mm256_cvtph_ps(halves), _mm256_loadu_ps(x))
        }
        fn places(first: usize) -> Self {
            let lanes: [i32; 8] = std::array::from_fn(|lane| (lane / LANES) as i32);
            _mm256_add_epi32(Self::load(lanes.as_ptr().cast()), _mm256_set1_epi32(first as i32))
        }
        fn spread(floats: __m256, places: Self) -> __m256 {
            _mm256_permutevar8x32_ps(floats, places)
        }
    }
}
