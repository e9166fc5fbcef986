//! Products of rows of blocks with a vector in 16 bits.
//!
//! A sum of the products of a block is exact: 32 products of at most 128 * 32767 are less than
//! 2^27.

use half::f16;

use super::block_vector::BlockVector;
use super::instructions::Instructions;
use super::{BLOCK, RowEncoding, SCALE, nibbles, signed_bytes};
use crate::element::Element;

/// Writes the dot products of consecutive rows and `x` to `out`. `codes` and `scales` have the
/// blocks of these rows.
///
/// # Panics
/// Panics if a length is not the one of these rows.
pub(super) fn dot_blocks(
    instructions: Instructions,
    format: RowEncoding,
    codes: &[u8],
    scales: &[[u8; SCALE]],
    x: &BlockVector,
    out: &mut [f32],
) {
    let blocks = out.len() * x.blocks();
    assert_eq!([codes.len(), scales.len()], [blocks * format.code_bytes(BLOCK), blocks]);
    match instructions {
        // SAFETY: the processor has the instructions, and the lengths were checked.
        #[cfg(target_arch = "x86_64")]
        Instructions::Avx512Vnni => unsafe { with_vnni(format, codes, scales, x, out) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Instructions::Avx2 => unsafe { with_avx2(format, codes, scales, x, out) },
        Instructions::Portable => portable(format, codes, scales, x, out),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn with_vnni(
    format: RowEncoding,
    codes: &[u8],
    scales: &[[u8; SCALE]],
    x: &BlockVector,
    out: &mut [f32],
) {
    // SAFETY: as the caller promises.
    unsafe {
        match format {
            RowEncoding::Q4_0 => {
                super::nibbles::rows::<std::arch::x86_64::__m512i>(codes, scales, x, out);
            }
            _ => super::avx2::rows::<super::avx512::Vnni>(codes, scales, x, out),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn with_avx2(
    format: RowEncoding,
    codes: &[u8],
    scales: &[[u8; SCALE]],
    x: &BlockVector,
    out: &mut [f32],
) {
    // SAFETY: as the caller promises.
    unsafe {
        match format {
            RowEncoding::Q4_0 => {
                super::nibbles::rows::<std::arch::x86_64::__m256i>(codes, scales, x, out);
            }
            _ => super::avx2::rows::<super::avx2::Madd>(codes, scales, x, out),
        }
    }
}

/// For all processors.
fn portable(
    format: RowEncoding,
    codes: &[u8],
    scales: &[[u8; SCALE]],
    x: &BlockVector,
    out: &mut [f32],
) {
    let (blocks, size) = (x.blocks(), format.code_bytes(BLOCK));
    for (row, out) in out.iter_mut().enumerate() {
        *out = 0.0;
        for block in 0..blocks {
            let at = row * blocks + block;
            let codes = &codes[at * size..][..size];
            let numbers = match format {
                RowEncoding::Q4_0 => nibbles(codes),
                _ => signed_bytes(codes),
            };
            let both = numbers.iter().zip(x.block(block));
            let sum: i32 = both.map(|(number, x)| i32::from(*number) * i32::from(x)).sum();
            *out += sum as f32 * (scale(scales[at]) * x.scales()[block]);
        }
    }
}

/// Returns a scale as f32.
#[inline(always)]
pub(super) fn scale(bytes: [u8; SCALE]) -> f32 {
    f16::from_le_bytes(bytes).widen()
}
