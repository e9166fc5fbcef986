//! The tile registers: their configuration and the loop that multiplies.

use std::arch::asm;
use std::cell::Cell;
use std::marker::PhantomData;

use super::Amx;
use crate::gemm::kernel::Tile;
use crate::gemm::pack::Pair;

/// The memory operand of `ldtilecfg`.
#[repr(C, align(64))]
struct TileConfig {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    /// Bytes per row of each tile register.
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// All eight tile registers at their full size: 16 rows of 64 bytes.
static FULL_TILES: TileConfig = TileConfig {
    palette: 1,
    start_row: 0,
    reserved: [0; 14],
    row_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
    rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
};

thread_local! {
    /// The number of [`Tiles`] that are alive on this thread.
    static HOLDERS: Cell<usize> = const { Cell::new(0) };
}

/// The configured tile registers of a thread.
///
/// Values may be nested. Dropping the last value releases the registers, so that context switches
/// no longer save them. Other code that configures tiles (oneDNN, MKL) must not run on the thread
/// while a value exists.
pub(super) struct Tiles {
    /// The configuration is a state of the thread, so the value must not be sent to another thread.
    thread: PhantomData<*const ()>,
}

impl Tiles {
    /// Configures the tile registers of this thread.
    pub(super) fn configure(_: Amx) -> Self {
        let holders = HOLDERS.get();
        if holders == 0 {
            // SAFETY: the kernel exists only where the processor can run it; the configuration is
            // one of palette 1.
            unsafe {
                asm!(
                    "ldtilecfg [{config}]",
                    config = in(reg) &raw const FULL_TILES,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack, preserves_flags, readonly),
                );
            }
        }
        HOLDERS.set(holders + 1);
        Self { thread: PhantomData }
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        let holders = HOLDERS.get() - 1;
        HOLDERS.set(holders);
        if holders == 0 {
            // SAFETY: the processor has AMX, since `self` exists, and no other code on this thread
            // uses tiles.
            unsafe {
                asm!(
                    "tilerelease",
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack, preserves_flags),
                );
            }
        }
    }
}

/// Multiplies `blocks` blocks of 32 depths of a left and a right panel into a tile `[32, 32]`.
///
/// Registers 0 to 3 each hold the sums of a quarter of the tile, in row-major order. Registers 4
/// and 5 hold rows 0 to 15 and 16 to 31 of the left panel, 6 and 7 columns 0 to 15 and 16 to 31 of
/// the right one. Four independent sums cover the latency of `tdpbf16ps`: 52 cycles, while one can
/// start every 16 (Intel 64 and IA-32 Architectures Optimization Reference Manual, chapter on AMX).
///
/// # Safety
/// The [`Tiles`] of this thread are configured. `left` and `right` are valid for reads of 32 lanes
/// of `blocks * 32` depths. `values` is valid for reads and writes of 32 x 32 numbers, which are
/// initialized if `accumulate` is true.
pub(super) unsafe fn multiply(
    blocks: usize,
    left: *const Pair,
    right: *const Pair,
    Tile { values, accumulate, .. }: Tile,
) {
    // All instructions are in one assembly block, because the compiler does not know that tiles
    // keep their contents between two blocks.
    //
    // SAFETY: as the caller promises.
    unsafe {
        asm!(
            "test {accumulate:e}, {accumulate:e}",
            "jz 20f",
            "tileloadd tmm0, [{sums} + {row}*2]",
            "tileloadd tmm1, [{sums} + {row}*2 + 64]",
            "tileloadd tmm2, [{sums} + {row}*2 + 2048]",
            "tileloadd tmm3, [{sums} + {row}*2 + 2112]",
            "jmp 30f",
            "20:",
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "30:",
            "test {blocks}, {blocks}",
            "jz 50f",
            "40:",
            "tileloadd tmm4, [{left} + {row}*1]",
            "tileloadd tmm6, [{right} + {row}*2]",
            "tileloadd tmm7, [{right} + {row}*2 + 64]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{left} + {row}*1 + 1024]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add {left}, 2048",
            "add {right}, 2048",
            "dec {blocks}",
            "jnz 40b",
            "50:",
            "tilestored [{sums} + {row}*2], tmm0",
            "tilestored [{sums} + {row}*2 + 64], tmm1",
            "tilestored [{sums} + {row}*2 + 2048], tmm2",
            "tilestored [{sums} + {row}*2 + 2112], tmm3",
            accumulate = in(reg) u32::from(accumulate),
            blocks = inout(reg) blocks => _,
            left = inout(reg) left => _,
            right = inout(reg) right => _,
            sums = in(reg) values,
            // The number of bytes from one row of the left panel to the next. Rows of the right
            // panel and of the tile have twice this size.
            row = in(reg) 64_usize,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}
