//! The allocator of the programs.

use std::ffi::c_long;

/// How long freed memory stays with the process, in milliseconds: longer than most training steps. Within a step the
/// same large arrays are freed and allocated again. The system clears the pages of each anew, and a virtual machine may
/// have to ask its host for them: with the default of one second that took a third of a step.
const PURGE_DELAY: c_long = 10_000;

/// `mi_option_purge_delay` of mimalloc.h, which the bindings lack. The number is the same in versions 2 and 3.
const PURGE_DELAY_OPTION: libmimalloc_sys::mi_option_t = 15;

/// Lets freed memory stay for the next step. mimalloc's own variables, such as `MIMALLOC_PURGE_DELAY`, override it.
pub fn keep_freed_memory() {
    // SAFETY: sets a number that the allocator reads whenever it frees memory; no other thread runs yet.
    unsafe { libmimalloc_sys::mi_option_set_default(PURGE_DELAY_OPTION, PURGE_DELAY) };
}
