//! The global allocator of both programs: the system allocator for small blocks, and a page heap
//! with huge pages for large blocks.
//!
//! ```text
//!  size of a block        allocated from             after it is freed
//!  below LARGE_BLOCK      the heap of the C library  `finetune` keeps the memory
//!  LARGE_BLOCK or more    the page heap              the pages are reused for large blocks of any
//!                                                    size, or returned to the system
//! ```
//!
//! Every training step allocates and frees the same arrays, in an order that fragments the heap. If
//! a heap keeps all freed memory for the next step, the gaps take a fifth of the peak memory of
//! GPT-2 124M. If all large blocks are returned to the system, the kernel has to clear their pages
//! in every step, which took a sixth of the step of GPT-2 124M at stage 3. The page heap keeps free
//! pages only up to the peak of its used pages; see [`page_heap`].
//!
//! Other allocators take more memory. These are peak resident sets, relative to this one, of
//! optimizer steps of GPT-2 124M with AdamW (`finetune` built with [`std::alloc::System`], the
//! library in `LD_PRELOAD`, medians of two runs):
//!
//! ```text
//!                                                  fp32, 4 x 128 tokens   bf16, stage 3, 2 ranks
//! glibc 2.36 with the thresholds below                     1.02                    1.03
//! mimalloc 3.3.2                                           1.08                    1.10
//! mimalloc 3.3.2, freed pages are kept                     1.12                    1.19
//! jemalloc 5.3.0, thp:always                               1.11                    1.08
//! jemalloc 5.3.0, thp:always, freed pages are kept         1.17                    1.25
//! ```
//!
//! The page heap needs Linux. On other systems, and if its addresses cannot be reserved, all blocks
//! are allocated by the system allocator. Huge pages are Linux's transparent huge pages. If they
//! are disabled, the heap has ordinary pages. The thresholds for smaller blocks need glibc.

#[cfg(target_os = "linux")]
mod address_range;
#[cfg(target_os = "linux")]
mod huge_page_allocator;
#[cfg(target_os = "linux")]
mod large_blocks;
#[cfg(target_os = "linux")]
mod page_heap;

#[cfg(target_os = "linux")]
pub use huge_page_allocator::HugePageAllocator;
/// The system allocator. The page heap is only available on Linux.
#[cfg(not(target_os = "linux"))]
pub use std::alloc::System as HugePageAllocator;

/// From this size on, glibc allocates a block with its own mapping, which is unmapped when the
/// block is freed. This applies to blocks that the page heap cannot allocate, and to blocks of C
/// libraries. With LibTorch it is the largest threshold that glibc accepts, so that its blocks are
/// kept.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const MMAP_THRESHOLD: libc::c_int = if cfg!(feature = "tch") { 32 << 20 } else { 4 << 20 };

/// glibc returns free memory at the top of a heap if it exceeds this number of bytes. A step frees
/// less, so that nothing is returned between two steps.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const TRIM_THRESHOLD: libc::c_int = 1 << 30;

/// Sets glibc's thresholds for separate mappings and for returning free memory, so that the memory
/// of smaller blocks is kept between steps.
///
/// The environment variables `MALLOC_MMAP_THRESHOLD_` and `MALLOC_TRIM_THRESHOLD_` override them.
/// `GLIBC_TUNABLES` does not.
pub fn set_block_thresholds() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    for (parameter, variable, value) in [
        (libc::M_MMAP_THRESHOLD, "MALLOC_MMAP_THRESHOLD_", MMAP_THRESHOLD),
        (libc::M_TRIM_THRESHOLD, "MALLOC_TRIM_THRESHOLD_", TRIM_THRESHOLD),
    ] {
        if std::env::var_os(variable).is_none() {
            // SAFETY: it sets a number under the lock of the allocator, which reads it at the next
            // allocation. A refused value leaves glibc's default.
            unsafe { libc::mallopt(parameter, value) };
        }
    }
}

/// Returns free memory to the system, which the allocator keeps for a next step. The next one may
/// be of another model.
pub(crate) fn release_free_memory() {
    #[cfg(target_os = "linux")]
    if let Some(blocks) = large_blocks::LargeBlocks::get() {
        blocks.release();
    }
    // SAFETY: it returns unused memory under the lock of the allocator.
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    unsafe {
        libc::malloc_trim(0);
    }
}
