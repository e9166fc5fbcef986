//! Products of rows of 16-bit floats with a vector.

use half::{bf16, f16};

use super::lanes::Lanes;
use super::{EncodedRows, RowEncoding};
use crate::Instructions;
use crate::element::Element;

/// Writes the dot products of rows in f16 or bf16 and `x` to `out`.
pub(super) fn dot_floats(
    instructions: Instructions,
    rows: EncodedRows<'_>,
    x: &[f32],
    out: &mut [f32],
) {
    match instructions {
        // SAFETY: the processor has the instructions.
        #[cfg(target_arch = "x86_64")]
        Instructions::Avx512Vnni | Instructions::Avx512Bf16 | Instructions::Amx => unsafe {
            with_avx512(rows, x, out)
        },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Instructions::Avx2 | Instructions::Avx512 => unsafe { with_avx2(rows, x, out) },
        // SAFETY: the portable vector needs no instructions.
        _ => unsafe { multiply::<[f32; 8]>(rows, x, out) },
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma,f16c")]
unsafe fn with_avx512(rows: EncodedRows<'_>, x: &[f32], out: &mut [f32]) {
    // SAFETY: as the caller promises.
    unsafe { multiply::<std::arch::x86_64::__m512>(rows, x, out) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn with_avx2(rows: EncodedRows<'_>, x: &[f32], out: &mut [f32]) {
    // SAFETY: as the caller promises.
    unsafe { multiply::<std::arch::x86_64::__m256>(rows, x, out) }
}

/// Multiplies the rows; inlined, so that it is compiled for the instruction set.
///
/// # Safety
/// The processor has the instruction set of `L`.
#[inline(always)]
unsafe fn multiply<L: Lanes>(rows: EncodedRows<'_>, x: &[f32], out: &mut [f32]) {
    let codes = rows.codes.chunks_exact((2 * x.len()).max(1));
    for (row, out) in codes.zip(out) {
        let (pairs, _) = row.as_chunks::<2>();
        // SAFETY: the row is as long as the vector, and the caller promises the instructions.
        *out = unsafe {
            match rows.format {
                RowEncoding::F16 => dot(
                    pairs,
                    x,
                    #[inline(always)]
                    |from| L::load_f16(from),
                    |bytes| f16::from_le_bytes(bytes).widen(),
                ),
                _ => dot(
                    pairs,
                    x,
                    #[inline(always)]
                    |from| L::load_bf16(from),
                    |bytes| bf16::from_le_bytes(bytes).widen(),
                ),
            }
        };
    }
}

/// Returns the dot product of a row and a vector of the same length. `load` loads some elements of
/// the row, and `number` one.
///
/// # Safety
/// The processor has the instruction set of `L`.
#[inline(always)]
unsafe fn dot<L: Lanes>(
    row: &[[u8; 2]],
    x: &[f32],
    load: impl Fn(*const u8) -> L,
    number: impl Fn([u8; 2]) -> f32,
) -> f32 {
    let whole = x.len() / (2 * L::COUNT) * 2 * L::COUNT;
    // SAFETY: the row has as many elements as the vector.
    let sum = unsafe {
        // Two sums, so that an addition need not wait for the one before.
        let (mut even, mut odd) = (L::zero(), L::zero());
        for start in (0..whole).step_by(2 * L::COUNT) {
            let (row, x) = (row.as_ptr().add(start), x.as_ptr().add(start));
            even = load(row.cast()).times_plus(L::load(x), even);
            odd = load(row.add(L::COUNT).cast()).times_plus(L::load(x.add(L::COUNT)), odd);
        }
        even.total() + odd.total()
    };
    let rest = row[whole..].iter().zip(&x[whole..]);
    rest.fold(sum, |sum, (pair, x)| number(*pair) * x + sum)
}
