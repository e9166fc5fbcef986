//! The allocator of both programs: the system's, with huge pages for large blocks. In `finetune`, large blocks also have
//! mappings of their own; `deepburn` keeps the system's thresholds.
//!
//! ```text
//!  size of a block        comes from                  after it is freed
//!  below LARGE_BLOCK      a heap of the C library     its memory stays with the process
//!  LARGE_BLOCK or more    a mapping in huge pages     its memory returns to the system at once
//! ```
//!
//! Every training step allocates and frees the same arrays, in an order that leaves gaps. A heap that keeps all freed
//! blocks for the next step keeps the gaps too: one fifth of the peak of GPT-2 124M. Returning all blocks at once
//! costs more, because each step then maps and clears their memory again. Few blocks are large, and they make most of
//! the gaps. Huge pages make mapping them cheap: the kernel clears 2 MiB for each page fault instead of 4 KiB.
//!
//! Thresholds are glibc's, so on other C libraries blocks of all sizes come from the system's allocator as it is.
//! Huge pages are Linux's transparent ones. Where they are off, large blocks have ordinary pages.

use std::alloc::{GlobalAlloc, Layout, System};

/// Bytes of the smallest large block.
///
/// LibTorch allocates without this module and so without huge pages. Its blocks are therefore kept up to the largest
/// threshold that glibc accepts.
const LARGE_BLOCK: usize = if cfg!(feature = "tch") { 32 << 20 } else { 4 << 20 };

/// glibc returns free memory at the end of a heap once it exceeds this many bytes. A step frees less, so that nothing
/// is returned between two steps.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const TRIM_THRESHOLD: libc::c_int = 1 << 30;

/// The system's allocator, which asks for huge pages for large blocks.
#[derive(Debug, Clone, Copy)]
pub struct HugePageAllocator;

// SAFETY: all methods are the system allocator's. Advice on its blocks changes how the kernel maps them, not what they
// hold.
unsafe impl GlobalAlloc for HugePageAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promises are those that `System` needs.
        advised(unsafe { System.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promises are those that `System` needs.
        advised(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // SAFETY: the caller's promises are those that `System` needs, which has allocated the block.
        advised(unsafe { System.realloc(block, layout, new_size) }, new_size)
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises are those that `System` needs, which has allocated the block.
        unsafe { System.dealloc(block, layout) }
    }
}

/// Asks for huge pages for a block of `size` bytes if it is large, and returns the block. A block that could not be
/// allocated is null.
fn advised(block: *mut u8, size: usize) -> *mut u8 {
    if size < LARGE_BLOCK || block.is_null() {
        return block;
    }
    #[cfg(target_os = "linux")]
    {
        // A mapping starts with a few bytes of the C library before the block, so its first page is part of it.
        const PAGE: usize = 4096;
        let before = block.addr() % PAGE;
        // SAFETY: the advice changes the size of pages only, and the range is mapped: the block and the beginning of
        // its first page. Refused advice, as without support for huge pages, changes nothing.
        unsafe {
            libc::madvise(block.wrapping_sub(before).cast(), before + size, libc::MADV_HUGEPAGE)
        };
    }
    block
}

/// Sets the size from which on blocks have mappings of their own, and keeps the memory of smaller ones.
///
/// The variables `MALLOC_MMAP_THRESHOLD_` and `MALLOC_TRIM_THRESHOLD_` override it; `GLIBC_TUNABLES` does not.
pub fn set_block_thresholds() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    for (parameter, variable, value) in [
        (libc::M_MMAP_THRESHOLD, "MALLOC_MMAP_THRESHOLD_", LARGE_BLOCK as libc::c_int),
        (libc::M_TRIM_THRESHOLD, "MALLOC_TRIM_THRESHOLD_", TRIM_THRESHOLD),
    ] {
        if std::env::var_os(variable).is_none() {
            // SAFETY: it sets a number under the lock of the allocator, which reads it at the next allocation. A
            // refused value leaves glibc's default.
            unsafe { libc::mallopt(parameter, value) };
        }
    }
}
