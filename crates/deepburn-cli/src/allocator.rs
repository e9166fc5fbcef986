//! The allocator of both programs: the system's, with huge pages for large blocks, which are kept for the next step. In
//! `finetune`, large blocks also have mappings of their own; `deepburn` keeps the system's thresholds.
//!
//! ```text
//!  size of a block        comes from                  after it is freed
//!  below LARGE_BLOCK      a heap of the C library     its memory stays with the process
//!  LARGE_BLOCK or more    a mapping in huge pages     kept for the next block of its size, if it has room
//! ```
//!
//! Every training step allocates and frees the same arrays, in an order that leaves gaps. A heap that keeps all freed
//! blocks for the next step keeps the gaps too: one fifth of the peak of GPT-2 124M. Returning large blocks to the system
//! costs time instead: a sixth of the step of GPT-2 124M at stage 3 was clearing pages. A large block is therefore kept,
//! whole, for a block of the same size. Kept blocks have only memory that blocks in use had before, so the peak stays;
//! see [`KeptBlocks`]. Huge pages make the mappings that remain cheap: the kernel clears 2 MiB for each page fault
//! instead of 4 KiB.
//!
//! Thresholds are glibc's, so on other C libraries blocks of all sizes come from the system's allocator as it is.
//! Huge pages are Linux's transparent ones. Where they are off, large blocks have ordinary pages.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::{Mutex, MutexGuard, PoisonError};

mod kept_blocks;

use kept_blocks::{KeptBlock, KeptBlocks};

/// Bytes of the smallest large block.
///
/// LibTorch allocates without this module and so without huge pages. Its blocks are therefore kept up to the largest
/// threshold that glibc accepts.
const LARGE_BLOCK: usize = if cfg!(feature = "tch") { 32 << 20 } else { 4 << 20 };

/// glibc returns free memory at the end of a heap once it exceeds this many bytes. A step frees less, so that nothing
/// is returned between two steps.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const TRIM_THRESHOLD: libc::c_int = 1 << 30;

/// The system's allocator, which asks for huge pages for large blocks and keeps them for the next block of their size.
#[derive(Debug, Clone, Copy)]
pub struct HugePageAllocator;

static KEPT_BLOCKS: Mutex<KeptBlocks> = Mutex::new(KeptBlocks::new());

/// The lock is held for a search in few slots. Nothing panics or allocates meanwhile.
fn kept_blocks() -> MutexGuard<'static, KeptBlocks> {
    KEPT_BLOCKS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Frees kept blocks that have more than their share of the peak.
fn free_excess() {
    loop {
        // The lock is not held while the system unmaps a block.
        let Some(KeptBlock { start, layout }) = kept_blocks().excess() else { return };
        // SAFETY: the block was allocated with this layout, and nobody uses it.
        unsafe { System.dealloc(start, layout) };
    }
}

/// Returns a kept block of a large layout, or else a new one by `allocate`, which is counted if the system has it.
fn kept_or_new(layout: Layout, allocate: impl FnOnce() -> *mut u8) -> (*mut u8, bool) {
    if let Some(block) = kept_blocks().allocate(layout) {
        return (block, true);
    }
    free_excess();
    let block = advised(allocate(), layout.size());
    if block.is_null() {
        kept_blocks().count_freed(layout.size());
    }
    (block, false)
}

// SAFETY: blocks are the system allocator's. A kept block has the layout that is asked for, and was freed by its last
// user. Advice on blocks changes how the kernel maps them, not what they hold.
unsafe impl GlobalAlloc for HugePageAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promises are those that `System` needs.
        let allocate = || unsafe { System.alloc(layout) };
        if layout.size() < LARGE_BLOCK {
            return allocate();
        }
        kept_or_new(layout, allocate).0
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promises are those that `System` needs.
        let allocate = || unsafe { System.alloc_zeroed(layout) };
        if layout.size() < LARGE_BLOCK {
            return allocate();
        }
        let (block, was_kept) = kept_or_new(layout, allocate);
        if was_kept {
            // SAFETY: a kept block has this size.
            unsafe { block.write_bytes(0, layout.size()) };
        }
        block
    }

    /// Large blocks grow and shrink where they are, or by moving their pages, which copies nothing.
    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        let large = |size: usize| if size < LARGE_BLOCK { 0 } else { size };
        let (old, new) = (large(layout.size()), large(new_size));
        let grown = new.saturating_sub(old);
        if grown > 0 {
            kept_blocks().count_used(grown);
            free_excess();
        }
        // SAFETY: the caller's promises are those that `System` needs, which has allocated the block.
        let moved = unsafe { System.realloc(block, layout, new_size) };
        let freed = if moved.is_null() { grown } else { old.saturating_sub(new) };
        if freed > 0 {
            kept_blocks().count_freed(freed);
        }
        if new > 0 { advised(moved, new_size) } else { moved }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        if layout.size() < LARGE_BLOCK {
            // SAFETY: the caller's promises are those that `System` needs, which has allocated the block.
            return unsafe { System.dealloc(block, layout) };
        }
        if let Some(oldest) = kept_blocks().keep(KeptBlock { start: block, layout }) {
            // SAFETY: the block was allocated with this layout, and nobody uses it.
            unsafe { System.dealloc(oldest.start, oldest.layout) };
        }
        free_excess();
    }
}

/// Asks for huge pages for a large block of `size` bytes, and returns the block. A block that could not be allocated is
/// null.
fn advised(block: *mut u8, size: usize) -> *mut u8 {
    if block.is_null() {
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
