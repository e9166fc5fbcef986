//! The heap of large blocks: a reserved range of addresses, and which of its pages are free.

use std::alloc::Layout;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use super::address_range::{AddressRange, PAGE, memory_pages, pages_per_huge_page};
use super::page_heap::{Allocated, Memory, PageHeap};

/// Addresses are reserved for this many times the memory of the machine. Gaps between blocks need
/// addresses but no memory.
const RANGE_PER_MEMORY: usize = 4;

/// The heap of large blocks of the process.
pub(super) struct LargeBlocks {
    addresses: AddressRange,
    pages: Mutex<PageHeap>,
}

impl LargeBlocks {
    /// Returns the heap, which is created by the first call; `None` if the system did not grant the
    /// addresses.
    pub(super) fn get() -> Option<&'static Self> {
        static HEAP: OnceLock<Option<LargeBlocks>> = OnceLock::new();
        HEAP.get_or_init(Self::new).as_ref()
    }

    fn new() -> Option<Self> {
        // What exceeds the memory of the machine is left to the system, which may refuse it. A
        // reserved range would accept it, and the kernel would end the process when it is written.
        let limit = memory_pages()?;
        let addresses = AddressRange::reserve(limit.checked_mul(RANGE_PER_MEMORY)?)?;
        let pages = PageHeap::new(addresses.pages(), limit, pages_per_huge_page());
        Some(Self { addresses, pages: Mutex::new(pages) })
    }

    /// The lock is held for a search among the gaps, and never while the system takes pages back.
    fn pages(&self) -> MutexGuard<'_, PageHeap> {
        self.pages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Allocates a block, and says whether it is zero. Returns `None` if the heap cannot have it.
    pub(super) fn allocate(&self, layout: Layout) -> Option<(*mut u8, bool)> {
        if layout.align() > PAGE {
            return None;
        }
        let Allocated { start, is_zero } = self.pages().allocate(layout.size().div_ceil(PAGE))?;
        self.discard_excess();
        Some((self.addresses.address(start), is_zero))
    }

    /// Returns whether a block is of this heap.
    pub(super) fn owns(&self, block: *mut u8) -> bool {
        self.addresses.contains(block)
    }

    /// Frees a block of `size` bytes.
    ///
    /// # Safety
    ///
    /// The block is of this heap and has this size, and nobody uses it.
    pub(super) unsafe fn free(&self, block: *mut u8, size: usize) {
        let freed = self.pages_of(block, size);
        self.pages().free(freed);
        self.discard_excess();
    }

    /// Changes the size of a block where it is, and says whether that was possible.
    ///
    /// # Safety
    ///
    /// The block is of this heap and has `old` bytes. If it shrinks, nobody uses what is cut off.
    pub(super) unsafe fn resize(&self, block: *mut u8, old: usize, new: usize) -> bool {
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

    /// Returns pages to the system that exceed the peak of used ones.
    fn discard_excess(&self) {
        loop {
            let Some(excess) = self.pages().take_excess() else { return };
            // SAFETY: the pages are free, and nobody can allocate them while they are taken out.
            let is_clean = unsafe { self.addresses.discard(excess.clone()) };
            self.pages().add(excess, if is_clean { Memory::Clean } else { Memory::Dirty });
            // What the system does not take now, it would not take again.
            if !is_clean {
                return;
            }
        }
    }
}
