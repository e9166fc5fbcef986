//! Vectors of f32 numbers, and how rows are loaded into them.

use half::{bf16, f16};

use crate::element::Element;

/// A vector of [`COUNT`](Self::COUNT) numbers.
///
/// The methods are inlined into a function that is compiled for the instruction set of the vector.
///
/// # Safety
/// All methods need a processor with this instruction set, and pointers to as many elements as they
/// load.
pub(super) trait Lanes: Copy {
    const COUNT: usize;

    unsafe fn zero() -> Self;
    unsafe fn load(from: *const f32) -> Self;
    unsafe fn load_f16(from: *const u8) -> Self;
    unsafe fn load_bf16(from: *const u8) -> Self;
    /// Returns `self * other + sum`.
    unsafe fn times_plus(self, other: Self, sum: Self) -> Self;
    /// Returns the sum of all lanes.
    unsafe fn total(self) -> f32;
}

/// Implements methods of a vector by instructions of its set: inlined, and with the conditions of
/// the trait.
macro_rules! instructions {
    ($(fn $name:ident$(<const $bits:ident: i32>)?($($args:tt)*) -> $result:ty { $($body:tt)* })*) => {$(
        #[inline(always)]
        unsafe fn $name$(<const $bits: i32>)?($($args)*) -> $result {
            // SAFETY: as the caller promises.
            unsafe { $($body)* }
        }
    )*};
}
pub(super) use instructions;

/// The number of lanes of the portable vector, which compilers map to the registers of most
/// processors.
const PORTABLE: usize = 8;

/// For processors without a vector of their own.
impl Lanes for [f32; PORTABLE] {
    const COUNT: usize = PORTABLE;

    #[inline(always)]
    unsafe fn zero() -> Self {
        [0.0; PORTABLE]
    }

    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: as the caller promises.
        unsafe { from.cast::<Self>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn load_f16(from: *const u8) -> Self {
        // SAFETY: as the caller promises.
        let bytes = unsafe { from.cast::<[[u8; 2]; PORTABLE]>().read_unaligned() };
        bytes.map(|bytes| f16::from_le_bytes(bytes).widen())
    }

    #[inline(always)]
    unsafe fn load_bf16(from: *const u8) -> Self {
        // SAFETY: as the caller promises.
        let bytes = unsafe { from.cast::<[[u8; 2]; PORTABLE]>().read_unaligned() };
        bytes.map(|bytes| bf16::from_le_bytes(bytes).widen())
    }

    #[inline(always)]
    unsafe fn times_plus(self, other: Self, sum: Self) -> Self {
        std::array::from_fn(|lane| self[lane] * other[lane] + sum[lane])
    }

    #[inline(always)]
    unsafe fn total(self) -> f32 {
        let [a, b, c, d, e, f, g, h] = self;
        ((a + e) + (c + g)) + ((b + f) + (d + h))
    }
}
