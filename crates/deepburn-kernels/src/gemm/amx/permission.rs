//! The request to the operating system to use AMX.

/// Requests permission to use a dynamically enabled state component (`asm/prctl.h`).
const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
/// The state component of the tile registers' contents.
const XFEATURE_XTILEDATA: libc::c_long = 18;

/// Requests permission to use AMX. Returns true if all current and future threads of this process
/// can execute the AMX instructions that the processor supports.
///
/// Since version 5.16, Linux requires that a process requests this permission. The function returns
/// false if the kernel is older or refuses the request, or if the alternative signal stack of a
/// thread is too small for 8 KiB of tiles.
pub(super) fn request() -> bool {
    // SAFETY: the call takes two integers and changes no memory of this process.
    let result =
        unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) };
    // Without this permission, the first tile instruction would end the process by SIGILL.
    result == 0
}
