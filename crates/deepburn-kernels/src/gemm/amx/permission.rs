//! Detection of AMX, and the request to the operating system to use it.

use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};

/// Requests permission to use a dynamically enabled state component (`asm/prctl.h`).
const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
/// The state component of the tile registers' contents.
const XFEATURE_XTILEDATA: libc::c_long = 18;

/// Bits of CPUID leaf 7, subleaf 0, EDX.
const AMX_BF16: u32 = 1 << 22;
const AMX_TILE: u32 = 1 << 24;
/// Bit of CPUID leaf 1, ECX.
const OSXSAVE: u32 = 1 << 27;
/// Bits of XCR0: tile configuration and tile data.
const XTILE: u64 = 1 << 17 | 1 << 18;

/// Requests permission to use AMX. Returns true if all current and future threads of this process
/// can execute AMX-BF16 instructions.
///
/// Since version 5.16, Linux requires that a process requests this permission. The function returns
/// false if the processor does not support AMX-BF16, if the kernel is older or refuses the request,
/// or if the alternative signal stack of a thread is too small for 8 KiB of tiles.
pub(super) fn request() -> bool {
    has_amx() && {
        // SAFETY: the call takes two integers and changes no memory of this process.
        let result =
            unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) };
        // Without this permission, the first tile instruction would end the process by SIGILL.
        result == 0
    }
}

/// Returns true if the processor supports AMX-BF16 and the operating system saves the tile
/// registers.
fn has_amx() -> bool {
    // These functions are safe in newer versions of Rust than the oldest that is supported.
    #[allow(unused_unsafe)]
    // SAFETY: every x86-64 processor has CPUID; leaf 7 is read only where leaf 0 reports it.
    let (basic, extended) = unsafe {
        if __cpuid(0).eax < 7 {
            return false;
        }
        (__cpuid(1).ecx, __cpuid_count(7, 0).edx)
    };
    if basic & OSXSAVE == 0 || extended & AMX_BF16 == 0 || extended & AMX_TILE == 0 {
        return false;
    }
    // SAFETY: the OSXSAVE bit is set, so XGETBV exists and is enabled.
    let xcr0 = unsafe { _xgetbv(0) };
    xcr0 & XTILE == XTILE
}
