//! A range of addresses for large blocks, whose pages get memory when they are first written.
//!
//! Main type: [`AddressRange`]. Its addresses are reserved once and stay. Memory comes in huge
//! pages (2 MiB), for which the kernel needs one page fault instead of 512.

use std::ops::Range;
use std::ptr::{NonNull, null_mut};

/// Bytes of a page of the heap: a multiple of the pages of all Linux kernels (4, 16 or 64 KiB), so
/// that a page can be returned alone.
pub(super) const PAGE: usize = 64 << 10;

/// Reserved addresses, divided into pages of [`PAGE`] bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct AddressRange {
    start: NonNull<u8>,
    pages: usize,
}

// SAFETY: it is an address and a length. Who may access which page is decided by its user.
unsafe impl Send for AddressRange {}
// SAFETY: as above.
unsafe impl Sync for AddressRange {}

/// Returns the number of pages that the memory of the machine has.
pub(super) fn memory_pages() -> Option<usize> {
    // SAFETY: it returns a number.
    let read = |name| usize::try_from(unsafe { libc::sysconf(name) }).ok();
    Some(read(libc::_SC_PHYS_PAGES)?.checked_mul(read(libc::_SC_PAGESIZE)?)? / PAGE)
}

impl AddressRange {
    /// Reserves the addresses of `pages` pages.
    ///
    /// Returns `None` where the system does not grant so many: under `ulimit -v`, or if it promises
    /// no more memory than it has (`vm.overcommit_memory=2`).
    pub(super) fn reserve(pages: usize) -> Option<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses touches no other memory.
        let start = unsafe { libc::mmap(null_mut(), (pages + 1) * PAGE, access, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return None;
        }
        let start = start.cast::<u8>();
        let start = start.wrapping_add(start.align_offset(PAGE));
        // SAFETY: the range lies within the mapping, which has room for one page more. The advice
        // changes the size of pages only; where it is refused, they stay small.
        unsafe { libc::madvise(start.cast(), pages * PAGE, libc::MADV_HUGEPAGE) };
        Some(Self { start: NonNull::new(start)?, pages })
    }

    /// Returns the number of pages.
    pub(super) fn pages(&self) -> usize {
        self.pages
    }

    /// Returns the address of page `index`.
    pub(super) fn address(&self, index: usize) -> *mut u8 {
        self.start.as_ptr().wrapping_add(index * PAGE)
    }

    /// Returns the page that begins at `address`, or `None` for an address outside of the range.
    pub(super) fn page(&self, address: *mut u8) -> Option<usize> {
        let offset = address.addr().checked_sub(self.start.addr().get())?;
        (offset < self.pages * PAGE).then_some(offset / PAGE)
    }

    /// Returns the memory of pages to the system. Returns whether they have none any more; then they
    /// are zero.
    ///
    /// # Safety
    ///
    /// Nobody uses the pages.
    pub(super) unsafe fn discard(&self, pages: Range<usize>) -> bool {
        let start = self.address(pages.start);
        // SAFETY: the pages are part of the mapping, and by the caller's promise nobody's.
        unsafe { libc::madvise(start.cast(), pages.len() * PAGE, libc::MADV_DONTNEED) == 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_begin_at_their_addresses_and_discarded_ones_are_zero() {
        let range = AddressRange::reserve(16).expect("a machine that grants addresses");
        assert!(range.address(0).addr().is_multiple_of(PAGE));
        assert_eq!(range.page(range.address(3)), Some(3));
        assert_eq!(range.page(range.address(range.pages())), None);
        assert_eq!(range.page(range.address(0).wrapping_sub(1)), None);
        // SAFETY: the range was reserved here, so nobody else uses its pages.
        unsafe {
            range.address(1).write_bytes(7, 3 * PAGE);
            assert!(range.discard(2..3));
            let read = |page| range.address(page).read();
            assert_eq!([1, 2, 3].map(read), [7, 0, 7]);
        }
    }
}
