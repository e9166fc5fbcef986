//! Products of pairs of bf16 numbers with Intel AMX, whose tile registers hold 16 x 16 pairs.
//!
//! # Numbers
//! For each element and each block of 32 depths, `tdpbf16ps` computes two sums, one of the even and
//! one of the odd depths. Both start at +0 and are accumulated by fused multiply-adds in ascending
//! order. The instruction then adds both sums to the element. Every operation rounds to the nearest
//! even number, reads subnormal numbers as 0 and replaces subnormal results by 0, independently of
//! the control register (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2).
//!
//! # State
//! This kernel has been tested in an emulator (Bochs) but not on a processor, and it has not been
//! timed. It is therefore checked before its first use: see [`Amx::with`].

use std::sync::OnceLock;

use half::bf16;

use super::avx512::{Avx512Bf16, finish};
use super::blocking::{self, Computation};
use super::kernel::{Kernel, LeftRows, Tile};
use super::pack::{Pair, Strip};
use super::result::{Epilogue, RowMut};
use super::{Arithmetic, Matrix, MatrixMut, Product};
use crate::Instructions;

pub(super) mod pack;
mod permission;
mod tiles;

use tiles::Tiles;

/// Rows and columns of a tile, which consists of two by two registers.
const ROWS: usize = 32;
const COLUMNS: usize = 32;
/// The number of depths that one instruction multiplies.
const DEPTH_STEP: usize = 2 * PAIRS;
/// The number of pairs in a row of a register.
const PAIRS: usize = 16;

/// The kernel for pairs of bf16 numbers with AMX. Created only if the processor and the operating
/// system support AMX, and the processor also supports AVX512-BF16, which is used for packing.
#[derive(Debug, Clone, Copy)]
pub(super) struct Amx(());

impl Amx {
    /// Returns the kernel if `instructions`, which this processor supports, include it.
    ///
    /// The first call requests AMX and computes a small product with it. AMX is not used if the
    /// result differs from the AVX512-BF16 result, in case a processor or a hypervisor reports AMX
    /// although it does not work.
    pub(super) fn with(instructions: Instructions) -> Option<Self> {
        static USABLE: OnceLock<bool> = OnceLock::new();
        if instructions < Instructions::Amx {
            return None;
        }
        let usable = USABLE.get_or_init(|| {
            Avx512Bf16::with(instructions)
                .is_some_and(|other| permission::request() && agree(Self(()), other))
        });
        usable.then_some(Self(()))
    }
}

/// Returns true if two kernels give the same product. The operands are integers whose sums stay
/// below 2^24, so the result is exact for any order of summation.
pub(super) fn agree(kernel: impl Kernel, other: impl Kernel) -> bool {
    // The shape covers partial tiles and two panels of depths, the second of which is not full.
    let (rows, depth, columns) = (40, 545, 50);
    let numbers = |len: usize| {
        (0..len).map(|i| bf16::from_f32((i * 7919 % 257) as f32 - 128.0)).collect::<Vec<_>>()
    };
    let (left, right) = (numbers(rows * depth), numbers(depth * columns));
    let left = Matrix::new(&left[..], rows, depth, depth);
    let right = Matrix::new(&right[..], depth, columns, columns);
    let product = Product::new(left, right, Arithmetic::Bf16);
    let mut results = [vec![f32::NAN; rows * columns], vec![f32::NAN; rows * columns]];
    let [result, expected] =
        results.each_mut().map(|out| MatrixMut::new(out, rows, columns, columns));
    let epilogue = Epilogue { factor: 1.0, bias: None, accumulate: false };
    let product = &product;
    blocking::multiply(Computation { kernel, product, out: &result, epilogue }, 1);
    blocking::multiply(Computation { kernel: other, product, out: &expected, epilogue }, 1);
    results[0] == results[1]
}

impl Kernel for Amx {
    type Packed = Pair;

    const DEPTH: usize = 2;
    const DEPTH_STEP: usize = DEPTH_STEP;
    /// A right panel of 32 KiB, which leaves a third of the first-level cache for left panels and
    /// sums.
    const PANEL_DEPTH: usize = 512;
    const LEFT_LANES: usize = ROWS;
    const ROWS: usize = ROWS;
    const COLUMNS: usize = COLUMNS;

    unsafe fn pack_left(self, strip: Strip<'_>, panel: *mut Pair) {
        // SAFETY: the kernel exists only where the processor can run it; the rest as the caller
        // promises.
        unsafe { pack::pack_left(strip, panel) }
    }

    unsafe fn pack_right(self, strip: Strip<'_>, panel: *mut Pair) {
        // SAFETY: as above.
        unsafe { pack::pack_right(strip, panel) }
    }

    unsafe fn tile(self, depth: usize, left: LeftRows<Pair>, right: *const Pair, tile: Tile) {
        // SAFETY: tiles are configured inside of `run`; the rest as above. A left panel has the
        // rows of one tile.
        unsafe { tiles::multiply(depth / DEPTH_STEP, left.first, right, tile) }
    }

    fn finish(self, sums: &[f32], row: RowMut<'_>) {
        // SAFETY: the kernel exists only where the processor can run it.
        unsafe { finish(sums, row) }
    }

    fn run(self, work: impl FnOnce()) {
        let _tiles = Tiles::configure(self);
        work();
    }
}
