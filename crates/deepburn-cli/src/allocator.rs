//! Settings of mimalloc, the allocator of both programs.

use std::ffi::c_long;

/// Milliseconds that freed memory stays with the process: longer than most training steps.
///
/// Every step frees and allocates the same large arrays. Memory that goes back to the system has to be mapped and
/// cleared again, and a virtual machine may have to ask its host for it. With the default of one second that took a
/// third of a step.
const PURGE_DELAY: c_long = 10_000;

/// `mi_option_purge_delay` of mimalloc.h, which the bindings lack. Versions 2 and 3 have the same number.
const PURGE_DELAY_OPTION: libmimalloc_sys::mi_option_t = 15;

/// Keeps freed memory for the next step. Environment variables of mimalloc, such as `MIMALLOC_PURGE_DELAY`, override
/// it.
pub fn keep_freed_memory() {
    // SAFETY: it sets a number that the allocator reads when it frees memory, and no other thread runs yet.
    unsafe { libmimalloc_sys::mi_option_set_default(PURGE_DELAY_OPTION, PURGE_DELAY) };
}
