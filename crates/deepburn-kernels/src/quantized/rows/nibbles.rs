//! Products of blocks of 4 bits.
//!
//! ```text
//! register     | 4 blocks, or 2 | as numbers of 16 bits, each with 4 codes
//! code 0       numbers & 15             * plane 0 of the vector
//! code 1       numbers >> 4 & 15        * plane 1         pairs are added in lanes of 32 bits,
//! ...                                                     so that no code changes its place
//! sum          + lanes in f32 * (scale of codes * scale of x), repeated for all lanes of a block
//! ```

use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};

use super::block_vector::{BlockVector, CORRECTIONS};
use super::lanes::Lanes;
use super::{BLOCK, EncodedRows, SCALE};

/// The number of bytes of the codes of a block.
const BYTES: usize = BLOCK / 2;
/// The number of lanes of 32 bits that have the codes of a block.
pub(super) const LANES: usize = CORRECTIONS;

/// A register of 16-bit numbers.
///
/// The methods are inlined into a function that is compiled for the instruction set of the
/// register.
///
/// # Safety
/// All methods need a processor with this instruction set, and pointers to as many elements as they
/// load.
pub(super) trait Numbers: Copy {
    /// As many f32 numbers as pairs of 16-bit numbers.
    type Floats: Lanes;

    unsafe fn load(from: *const u8) -> Self;
    /// Loads fewer bytes than a register has. The others are 0.
    unsafe fn load_first(from: *const u8, bytes: usize) -> Self;
    unsafe fn and(self, mask: i16) -> Self;
    /// Shifts in zeros.
    unsafe fn shift_right<const BITS: i32>(self) -> Self;
    /// Adds the products of adjacent 16-bit integers to the 32-bit integers of `sum`.
    unsafe fn add_products(sum: Self, left: Self, right: Self) -> Self;
    /// Converts 32-bit integers.
    unsafe fn floats(self) -> Self::Floats;
    /// Returns the products of `count` scales in f16 and as many of `x` as there are lanes. Those
    /// after `count` are 0.
    unsafe fn scales(from: *const u8, count: usize, x: *const f32) -> Self::Floats;
    /// Returns the number of the block of each lane, if `first` is the first block of the register.
    unsafe fn places(first: usize) -> Self;
    /// Returns the lanes at `places`.
    unsafe fn spread(floats: Self::Floats, places: Self) -> Self::Floats;
}

/// The number of bytes that are asked for before they are read. Rows are read one after the other,
/// faster than the processor foresees.
const AHEAD: usize = 4096;

/// Writes the dot products of consecutive rows of 4-bit codes and `x` to `out`; inlined, so that it
/// is compiled for the instruction set.
///
/// # Safety
/// The processor has the instructions of `N`. The rows have as many blocks as the vector.
#[inline(always)]
pub(super) unsafe fn multiply<N: Numbers>(rows: EncodedRows<'_>, x: &BlockVector, out: &mut [f32]) {
    let blocks = x.blocks();
    for (row, out) in out.iter_mut().enumerate() {
        let codes = rows.codes[row * blocks * BYTES..].as_ptr();
        let scales = rows.scales[row * blocks..].as_ptr().cast();
        // SAFETY: as the caller promises.
        *out = unsafe { dot::<N>(codes, scales, x) };
    }
}

/// Returns the dot product of a row and a vector.
#[inline(always)]
unsafe fn dot<N: Numbers>(codes: *const u8, scales: *const u8, x: &BlockVector) -> f32 {
    let (blocks, lanes) = (x.blocks(), N::Floats::COUNT);
    let whole = blocks / lanes * lanes;
    // SAFETY: as the caller of `multiply` promises.
    unsafe {
        let mut sum = N::Floats::zero();
        // The number of blocks of all but the last part is a constant, so that the loop over them
        // has no branches.
        for start in (0..whole).step_by(lanes) {
            sum = add::<N>(codes, scales, x, [start, lanes], sum);
        }
        if whole < blocks {
            sum = add::<N>(codes, scales, x, [whole, blocks - whole], sum);
        }
        sum.total()
    }
}

/// Adds the products of `count` blocks from `start` on to `sum`. They are at most as many as a
/// register has lanes.
#[inline(always)]
unsafe fn add<N: Numbers>(
    codes: *const u8,
    scales: *const u8,
    x: &BlockVector,
    [start, count]: [usize; 2],
    mut sum: N::Floats,
) -> N::Floats {
    let per_register = N::Floats::COUNT / LANES;
    // SAFETY: as the caller of `multiply` promises. The vector has whole registers.
    unsafe {
        let products = N::scales(scales.add(start * SCALE), count, x.scales().as_ptr().add(start));
        for first in (0..count).step_by(per_register) {
            let codes = codes.add((start + first) * BYTES);
            _mm_prefetch::<_MM_HINT_T0>(codes.wrapping_add(AHEAD).cast());
            let codes = match count - first >= per_register {
                true => N::load(codes),
                false => N::load_first(codes, (count - first) * BYTES),
            };
            let products = N::spread(products, N::places(first));
            sum = sums(codes, x, start + first).floats().times_plus(products, sum);
        }
    }
    sum
}

/// Returns the sums of products of the codes of a register and of the vector from `block` on.
#[inline(always)]
unsafe fn sums<N: Numbers>(codes: N, x: &BlockVector, block: usize) -> N {
    // SAFETY: as the caller of `multiply` promises.
    unsafe {
        let plane = |plane| N::load(x.plane(plane).as_ptr().add(block * BLOCK / 4).cast());
        let sum = N::load(x.corrections().as_ptr().add(block).cast());
        let sum = N::add_products(sum, codes.and(15), plane(0));
        let sum = N::add_products(sum, codes.shift_right::<4>().and(15), plane(1));
        let sum = N::add_products(sum, codes.shift_right::<8>().and(15), plane(2));
        N::add_products(sum, codes.shift_right::<12>(), plane(3))
    }
}
