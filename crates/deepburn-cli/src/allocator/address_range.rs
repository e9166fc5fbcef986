//! A range of addresses for large blocks, whose pages get memory when they are first written.
//!
//! Main type: [`AddressRange`]. Its addresses are reserved once and stay. Where the kernel's pages
//! have 4 KiB, memory comes in huge pages of 2 MiB, for which it needs one page fault instead of 512.

use std::ops::Range;
use std::ptr::{NonNull, null_mut};

/// Bytes of a page of the heap: a multiple of the pages that kernels usually have (4, 16 or 64 KiB),
/// so that a page can be returned alone.
pub(super) const PAGE: usize = 64 << 10;

/// Bytes of a huge page beside kernel pages of 4 KiB.
const HUGE_PAGE: usize = 2 << 20;

/// Returns how many pages of the heap a huge page has, and 1 without huge pages.
pub(super) fn pages_per_huge_page() -> usize {
    if has_huge_pages() { HUGE_PAGE / PAGE } else { 1 }
}

/// Returns whether the heap uses huge pages. Beside larger kernel pages they have up to 512 MiB,
/// which one byte would fill.
fn has_huge_pages() -> bool {
    kernel_page() == Some(4096)
}

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
    let pages = usize::try_from(unsafe { libc::sysconf(libc::_SC_PHYS_PAGES) }).ok()?;
    Some(pages.checked_mul(kernel_page()?)? / PAGE)
}

/// Returns the bytes of a page of the kernel.
fn kernel_page() -> Option<usize> {
    // SAFETY: it returns a number.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).ok().filter(|bytes| *bytes > 0)
}

/// Returns whether `ulimit -v` limits the addresses of the process.
fn address_space_is_limited() -> bool {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: it writes the limit.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_AS, &raw mut limit) } == 0;
    known && limit.rlim_cur != libc::RLIM_INFINITY
}

impl AddressRange {
    /// Reserves the addresses of `pages` pages.
    ///
    /// Returns `None` under `ulimit -v`, where unused addresses would count, where the system
    /// promises no more memory than it has (`vm.overcommit_memory=2`), and if the kernel's pages are
    /// larger than the heap's.
    pub(super) fn reserve(pages: usize) -> Option<Self> {
        if address_space_is_limited() || !PAGE.is_multiple_of(kernel_page()?) {
            return None;
        }
        let bytes = pages.checked_mul(PAGE)?.checked_add(HUGE_PAGE)?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address that the kernel chooses touches no other memory.
        let start = unsafe { libc::mmap(null_mut(), bytes, access, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return None;
        }
        let start = start.cast::<u8>();
        let start = start.wrapping_add(start.align_offset(HUGE_PAGE));
        if has_huge_pages() {
            // SAFETY: the range lies within the mapping, which has room for one huge page more. The
            // advice changes the size of pages only; where it is refused, they stay small.
            unsafe { libc::madvise(start.cast(), pages * PAGE, libc::MADV_HUGEPAGE) };
        }
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

    /// Returns whether `address` lies in the range.
    pub(super) fn contains(&self, address: *mut u8) -> bool {
        let start = self.start.addr().get();
        (start..start + self.pages * PAGE).contains(&address.addr())
    }

    /// Returns the page that has `address`, which lies in the range.
    pub(super) fn page(&self, address: *mut u8) -> usize {
        (address.addr() - self.start.addr().get()) / PAGE
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
        assert_eq!(range.page(range.address(3)), 3);
        let ends = [range.address(0), range.address(range.pages()).wrapping_sub(1)];
        assert!(ends.iter().all(|address| range.contains(*address)));
        let outside = [ends[0].wrapping_sub(1), ends[1].wrapping_add(1)];
        assert!(!outside.iter().any(|address| range.contains(*address)));
        // SAFETY: the range was reserved here, so nobody else uses its pages.
        unsafe {
            range.address(1).write_bytes(7, 3 * PAGE);
            assert!(range.discard(2..3));
            let read = |page| range.address(page).read();
            assert_eq!([1, 2, 3].map(read), [7, 0, 7]);
        }
    }
}
