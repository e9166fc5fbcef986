//! The heap of large blocks: a reserved range of addresses with a page allocator.

use std::alloc::Layout;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use super::address_range::{AddressRange, PAGE, memory_pages, pages_per_huge_page};
use super::page_heap::{Allocated, Memory, PageHeap};

/// The reserved range has this many times the memory of the machine. Gaps between blocks take
/// addresses but no memory.
const RANGE_PER_MEMORY: usize = 4;

/// The heap of large blocks of the process.
pub(super) struct LargeBlocks {
    addresses: AddressRange,
    pages: Mutex<PageHeap>,
}

impl LargeBlocks {
    /// Returns the heap, which is created by the first call. Returns `None` if the addresses could
    /// not be reserved.
    pub(super) fn get() -> Option<&'static Self> {
        static HEAP: OnceLock<Option<LargeBlocks>> = OnceLock::new();
        HEAP.get_or_init(Self::new).as_ref()
    }

    fn new() -> Option<Self> {
        // Blocks beyond the memory of the machine are allocated by the system, which may return an
        // error. The reserved range would accept them, and the kernel would kill the process when
        // they are written.
        let limit = memory_pages()?;
        let addresses = AddressRange::reserve(limit.checked_mul(RANGE_PER_MEMORY)?)?;
        let pages = PageHeap::new(addresses.pages(), limit, pages_per_huge_page());
        Some(Self { addresses, pages: Mutex::new(pages) })
    }

    /// Locks the page heap. The lock is held while gaps are searched, but never while pages are
    /// returned to the system.
    fn pages(&self) -> MutexGuard<'_, PageHeap> {
        self.pages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Allocates a block. Also returns whether it is zero. Returns `None` if the heap cannot
    /// allocate it.
    pub(super) fn allocate(&self, layout: Layout) -> Option<(*mut u8, bool)> {
        if layout.align() > PAGE {
            return None;
        }
        let Allocated { start, is_zero } = self.pages().allocate(layout.size().div_ceil(PAGE))?;
        // Clean pages may have been taken while dirty ones are left elsewhere.
        self.discard_excess();
        Some((self.addresses.address(start), is_zero))
    }

    /// Returns whether this heap has allocated `block`.
    pub(super) fn owns(&self, block: *mut u8) -> bool {
        self.addresses.contains(block)
    }

    /// Frees a block of `size` bytes.
    ///
    /// # Safety
    /// The block must have been allocated by this heap with this size, and must not be used after
    /// the call.
    pub(super) unsafe fn free(&self, block: *mut u8, size: usize) {
        let freed = self.pages_of(block, size);
        self.pages().free(freed);
        self.discard_excess();
    }

    /// Returns all free pages to the system, in whole huge pages.
    pub(super) fn release(&self) {
        self.pages().forget_peak();
        self.discard_excess();
    }

    /// Changes the size of a block in place. Returns whether that was possible.
    ///
    /// # Safety
    /// The block must have been allocated by this heap with `old` bytes. If it shrinks, the bytes
    /// beyond `new` must not be used after the call.
    pub(super) unsafe fn resize(&self, block: *mut u8, old: usize, new: usize) -> bool {
        // The last page has room beyond `old`, so small changes need no page at all.
        let held = self.pages_of(block, old);
        let end = held.start + new.div_ceil(PAGE);
        if end > held.end && !self.pages().allocate_at(held.end, end - held.end) {
            return false;
        }
        if end < held.end {
            self.pages().free(end..held.end);
        }
        self.discard_excess();
        true
    }

    /// Returns the pages of a block of this heap that has `size` bytes.
    fn pages_of(&self, block: *mut u8, size: usize) -> Range<usize> {
        let start = self.addresses.page(block);
        start..start + size.div_ceil(PAGE)
    }

    /// Returns free pages to the system, as far as used and dirty pages exceed the peak of used
    /// pages.
    fn discard_excess(&self) {
        loop {
            let Some(excess) = self.pages().take_excess() else { return };
            // SAFETY: the pages are free, and nobody can allocate them while they are taken out.
            let is_clean = unsafe { self.addresses.discard(excess.clone()) };
            self.pages().add(excess, if is_clean { Memory::Clean } else { Memory::Dirty });
            // If the system does not take these pages now, it would not take them in another try.
            if !is_clean {
                return;
            }
        }
    }
}
