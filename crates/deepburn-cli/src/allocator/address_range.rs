//! A reserved range of addresses for large blocks. The kernel allocates memory for a page when it
//! is first written.
//!
//! Main type: [`AddressRange`]. Its addresses are reserved once and never released. If the kernel
//! has pages of 4 KiB, the range uses huge pages of 2 MiB, which need one page fault instead of
//! 512.

use std::ops::Range;
use std::ptr::{NonNull, null_mut};

/// Bytes of a page of the heap. It is a multiple of the usual page sizes of kernels (4, 16 or 64
/// KiB), so that single pages can be returned.
pub(super) const PAGE: usize = 64 << 10;

/// Bytes of a huge page on kernels with pages of 4 KiB.
const HUGE_PAGE: usize = 2 << 20;

/// Returns the number of heap pages in a huge page, or 1 if the heap does not use huge pages.
pub(super) fn pages_per_huge_page() -> usize {
    if has_huge_pages() { HUGE_PAGE / PAGE } else { 1 }
}

/// Returns whether the heap uses huge pages. On kernels with larger pages, a huge page has up to
/// 512 MiB, all of which would be allocated for a single byte.
fn has_huge_pages() -> bool {
    kernel_page() == Some(4096)
}

/// Reserved addresses, divided into pages of [`PAGE`] bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct AddressRange {
    start: NonNull<u8>,
    pages: usize,
}

// SAFETY: the value is only an address and a length, and gives no safe access to the pages. Its
// user has to ensure that a page is not accessed by two threads at a time.
unsafe impl Send for AddressRange {}
// SAFETY: as above.
unsafe impl Sync for AddressRange {}

/// Returns the physical memory of the machine, in pages of the heap.
pub(super) fn memory_pages() -> Option<usize> {
    // SAFETY: `sysconf` only returns a number.
    let pages = usize::try_from(unsafe { libc::sysconf(libc::_SC_PHYS_PAGES) }).ok()?;
    Some(pages.checked_mul(kernel_page()?)? / PAGE)
}

/// Returns the page size of the kernel in bytes.
fn kernel_page() -> Option<usize> {
    // SAFETY: `sysconf` only returns a number.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).ok().filter(|bytes| *bytes > 0)
}

/// Returns whether `ulimit -v` limits the address space of the process.
fn address_space_is_limited() -> bool {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `getrlimit` only writes to `limit`, which outlives the call.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_AS, &raw mut limit) } == 0;
    known && limit.rlim_cur != libc::RLIM_INFINITY
}

impl AddressRange {
    /// Reserves the addresses of `pages` pages.
    ///
    /// Returns `None` in three cases: under `ulimit -v`, because unused addresses count towards the
    /// limit; if the system does not overcommit memory (`vm.overcommit_memory=2`); and if the pages
    /// of the kernel are larger than the pages of the heap.
    pub(super) fn reserve(pages: usize) -> Option<Self> {
        if address_space_is_limited() || !PAGE.is_multiple_of(kernel_page()?) {
            return None;
        }
        // One huge page more, so that the start can be aligned to one.
        let bytes = pages.checked_mul(PAGE)?.checked_add(HUGE_PAGE)?;
        // Without a reservation of swap space, the range may be larger than the memory.
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
            // SAFETY: the range is within the mapping, which is larger by one huge page. The advice
            // only changes the size of pages. If it is refused, they stay small.
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

    /// Returns whether `address` is in the range.
    pub(super) fn contains(&self, address: *mut u8) -> bool {
        let start = self.start.addr().get();
        (start..start + self.pages * PAGE).contains(&address.addr())
    }

    /// Returns the index of the page that contains `address`, which has to be in the range.
    pub(super) fn page(&self, address: *mut u8) -> usize {
        (address.addr() - self.start.addr().get()) / PAGE
    }

    /// Returns the memory of pages to the system. The result is whether that succeeded. The pages
    /// are zero then.
    ///
    /// # Safety
    /// The pages must not be in use.
    pub(super) unsafe fn discard(&self, pages: Range<usize>) -> bool {
        let start = self.address(pages.start);
        // SAFETY: the pages are part of the mapping, and the caller ensures that they are not in
        // use.
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
