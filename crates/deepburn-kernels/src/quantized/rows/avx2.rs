//! Vectors of 8 numbers with AVX2, fused multiply-add and conversions of f16, and products of blocks.

use std::arch::x86_64::*;

use super::block_vector::BlockVector;
use super::lanes::Lanes;
use super::{BLOCK, RowEncoding, SCALE};

impl Lanes for __m256 {
    const COUNT: usize = 8;

    #[inline(always)]
    unsafe fn zero() -> Self {
        // SAFETY: as the caller promises.
        unsafe { _mm256_setzero_ps() }
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: as the caller promises.
        unsafe { _mm256_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const u8) -> Self {
        // SAFETY: as the caller promises.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) }
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u8) -> Self {
        // SAFETY: as the caller promises.
        unsafe {
            let halves = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(halves))
        }
    }

    #[inline(always)]
    unsafe fn times_plus(self, other: Self, sum: Self) -> Self {
        // SAFETY: as the caller promises.
        unsafe { _mm256_fmadd_ps(self, other, sum) }
    }

    #[inline(always)]
    unsafe fn total(self) -> f32 {
        // SAFETY: as the caller promises.
        unsafe {
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

/// Writes the dot products of consecutive rows and `x` to `out`; inlined, so that it is compiled for the instruction set.
///
/// # Safety
/// The processor has AVX2, FMA, F16C and the instructions of `M`. The rows have as many blocks as the vector.
#[inline(always)]
pub(super) unsafe fn rows<M: Multiply>(
    format: RowEncoding,
    codes: &[u8],
    scales: &[[u8; SCALE]],
    x: &BlockVector,
    out: &mut [f32],
) {
    let (blocks, size) = (x.codes().len(), format.code_bytes(BLOCK));
    for (row, out) in out.iter_mut().enumerate() {
        let codes = codes[row * blocks * size..].as_ptr();
        let scales = &scales[row * blocks..][..blocks];
        // SAFETY: as the caller promises.
        *out = unsafe {
            match format {
                RowEncoding::Q4_0 => dot::<M, Nibbles>(codes, scales, x),
                _ => dot::<M, Bytes>(codes, scales, x),
            }
        };
    }
}

/// Returns the dot product of a row and a vector.
#[inline(always)]
unsafe fn dot<M: Multiply, C: Codes>(
    codes: *const u8,
    scales: &[[u8; SCALE]],
    x: &BlockVector,
) -> f32 {
    // SAFETY: as the caller of `rows` promises.
    unsafe {
        // Two sums, so that an addition need not wait for the one before.
        let (mut even, mut odd) = (_mm256_setzero_ps(), _mm256_setzero_ps());
        for (part, scales) in scales.chunks(SCALES).enumerate() {
            let start = part * SCALES;
            let products = products(scales, &x.scales()[start..]);
            let (pairs, rest) = products[..scales.len()].as_chunks::<2>();
            for (i, [first, second]) in pairs.iter().enumerate() {
                let at = start + 2 * i;
                let sums = _mm256_cvtepi32_ps(C::sums::<M>(codes, x, at));
                even = _mm256_fmadd_ps(sums, _mm256_set1_ps(*first), even);
                let sums = _mm256_cvtepi32_ps(C::sums::<M>(codes, x, at + 1));
                odd = _mm256_fmadd_ps(sums, _mm256_set1_ps(*second), odd);
            }
            if let [last] = rest {
                let sums = C::sums::<M>(codes, x, start + scales.len() - 1);
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

/// The codes of a format.
trait Codes {
    /// Returns the sums of products of block number `block` of a row and of the vector.
    ///
    /// # Safety
    /// Both have this block, and the processor has the instructions of `M`.
    unsafe fn sums<M: Multiply>(codes: *const u8, x: &BlockVector, block: usize) -> __m256i;
}

/// Signed bytes.
struct Bytes;

impl Codes for Bytes {
    #[inline(always)]
    unsafe fn sums<M: Multiply>(codes: *const u8, x: &BlockVector, block: usize) -> __m256i {
        // SAFETY: the block has 32 codes.
        unsafe {
            let codes = codes.add(block * BLOCK);
            let [low, high] = halves(x, block);
            let first = _mm256_cvtepi8_epi16(_mm_loadu_si128(codes.cast()));
            let second = _mm256_cvtepi8_epi16(_mm_loadu_si128(codes.add(BLOCK / 2).cast()));
            let sum = M::add_products(_mm256_setzero_si256(), first, low);
            M::add_products(sum, second, high)
        }
    }
}

/// Numbers of 4 bits, of which 8 stands for zero.
struct Nibbles;

impl Codes for Nibbles {
    #[inline(always)]
    unsafe fn sums<M: Multiply>(codes: *const u8, x: &BlockVector, block: usize) -> __m256i {
        // SAFETY: the block has 16 bytes of codes, and there are 8 corrections.
        unsafe {
            let codes = codes.add(block * BLOCK / 2);
            let [low, high] = halves(x, block);
            // A byte becomes a 16-bit number, whose lower and upper four bits are two codes.
            let both = _mm256_cvtepu8_epi16(_mm_loadu_si128(codes.cast()));
            let first = _mm256_and_si256(both, _mm256_set1_epi16(15));
            let second = _mm256_srli_epi16::<4>(both);
            let sum = _mm256_loadu_si256(x.corrections().as_ptr().add(block).cast());
            let sum = M::add_products(sum, first, low);
            M::add_products(sum, second, high)
        }
    }
}

/// Loads a block of the vector.
#[inline(always)]
unsafe fn halves(x: &BlockVector, block: usize) -> [__m256i; 2] {
    // SAFETY: the vector has this block, and a block has 32 codes.
    unsafe {
        let codes = x.codes().as_ptr().add(block).cast::<i16>();
        [_mm256_loadu_si256(codes.cast()), _mm256_loadu_si256(codes.add(16).cast())]
    }
}
