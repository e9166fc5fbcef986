//! The allocator of both programs: the system's for small blocks, and a heap of huge pages for large
//! ones.
//!
//! ```text
//!  size of a block        comes from                 after it is freed
//!  below LARGE_BLOCK      a heap of the C library    `finetune` keeps its memory
//!  LARGE_BLOCK or more    the page heap              its pages serve other large blocks, of any
//!                                                    size, or are returned to the system
//! ```
//!
//! Every training step allocates and frees the same arrays, in an order that leaves gaps. A heap
//! that keeps all freed memory for the next step keeps the gaps too: one fifth of the peak of GPT-2
//! 124M. Returning all large blocks to the system costs time instead: a sixth of the step of GPT-2
//! 124M at stage 3 was clearing pages. The page heap keeps pages only as far as the peak of its used
//! blocks; see [`page_heap`].
//!
//! The page heap needs Linux. Elsewhere, and where its addresses cannot be reserved, blocks of all
//! sizes come from the system's allocator. Huge pages are Linux's transparent ones; where they are
//! off, the heap has ordinary pages. Thresholds for smaller blocks are glibc's.

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
/// The system's allocator, because other systems have no page heap.
#[cfg(not(target_os = "linux"))]
pub use std::alloc::System as HugePageAllocator;

/// glibc gives blocks of this size or more a mapping of their own, which ends with the block: those
/// that the page heap cannot have, and C libraries' own. LibTorch's are kept up to the largest
/// threshold that glibc accepts.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const MMAP_THRESHOLD: libc::c_int = if cfg!(feature = "tch") { 32 << 20 } else { 4 << 20 };

/// glibc returns free memory at the end of a heap once it exceeds this many bytes. A step frees
/// less, so that nothing is returned between two steps.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const TRIM_THRESHOLD: libc::c_int = 1 << 30;

/// Sets the size from which on glibc gives blocks mappings of their own, and keeps the memory of
/// smaller ones.
///
/// The variables `MALLOC_MMAP_THRESHOLD_` and `MALLOC_TRIM_THRESHOLD_` override it; `GLIBC_TUNABLES`
/// does not.
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
