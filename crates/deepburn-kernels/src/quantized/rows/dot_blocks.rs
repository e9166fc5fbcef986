//! Products of rows of blocks with a vector in 16 bits.
//!
//! A sum of the products of a block is exact: 32 products of at most 128 * 32767 are less than
//! 2^27.

use half::f16;

use super::block_vector::BlockVector;
use super::{BLOCK, EncodedRows, SCALE};
#[cfg(target_arch = "x86_64")]
use super::{RowEncoding, avx2, nibbles};
use crate::Instructions;
use crate::element::Element;

/// Writes the dot products of rows of blocks and `x` to `out`.
///
/// # Panics
/// Panics if a length is not the one of these rows.
pub(super) fn dot_blocks(
    instructions: Instructions,
    rows: EncodedRows<'_>,
    x: &BlockVector,
    out: &mut [f32],
) {
    let (blocks, size) = (out.len() * x.blocks(), rows.format.code_bytes(BLOCK));
    assert_eq!([rows.codes.len(), rows.scales.len()], [blocks * size, blocks]);
    match instructions {
        // SAFETY: the processor has the instructions, and the lengths were checked.
        #[cfg(target_arch = "x86_64")]
        Instructions::Avx512Vnni | Instructions::Avx512Bf16 | Instructions::Amx => unsafe {
            with_vnni(rows, x, out)
        },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Instructions::Avx2 | Instructions::Avx512 => unsafe { with_avx2(rows, x, out) },
        _ => portable(rows, x, out),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn with_vnni(rows: EncodedRows<'_>, x: &BlockVector, out: &mut [f32]) {
    // SAFETY: as the caller promises.
    unsafe {
        match rows.format {
            RowEncoding::Q4_0 => nibbles::multiply::<std::arch::x86_64::__m512i>(rows, x, out),
            _ => avx2::multiply::<super::avx512::Vnni>(rows, x, out),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn with_avx2(rows: EncodedRows<'_>, x: &BlockVector, out: &mut [f32]) {
    // SAFETY: as the caller promises.
    unsafe {
        match rows.format {
            RowEncoding::Q4_0 => nibbles::multiply::<std::arch::x86_64::__m256i>(rows, x, out),
            _ => avx2::multiply::<avx2::Madd>(rows, x, out),
        }
    }
}

/// For all processors.
fn portable(rows: EncodedRows<'_>, x: &BlockVector, out: &mut [f32]) {
    for (row, out) in out.iter_mut().enumerate() {
        *out = 0.0;
        for block in 0..x.blocks() {
            let at = row * x.blocks() + block;
            let both = rows.numbers(at).into_iter().zip(x.block(block));
            let sum: i32 = both.map(|(number, x)| i32::from(number) * i32::from(x)).sum();
            *out += sum as f32 * (scale(rows.scales[at]) * x.scales()[block]);
        }
    }
}

/// Returns a scale as f32.
#[inline(always)]
pub(super) fn scale(bytes: [u8; SCALE]) -> f32 {
    f16::from_le_bytes(bytes).widen()
}
