//! The memory use of an input, counted by the allocator.
//!
//! The resident set size of the process is not suitable: zeroed allocations have no pages until
//! they are written, and the peak of the process only shows the largest input.

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use crate::current::with_current;

/// The maximum number of bytes that an input may allocate at any one time. Valid inputs need a few
/// kilobytes.
pub const MEMORY_LIMIT: usize = 256 << 20;

/// Whether inputs are running. Other tests in the process are not limited.
///
/// The counters use relaxed ordering, because they do not synchronize other memory and each process
/// runs one input at a time.
static RUNNING: AtomicBool = AtomicBool::new(false);
/// The number of bytes that are currently allocated by all threads.
static LIVE: AtomicUsize = AtomicUsize::new(0);
/// The largest value of [`LIVE`] since it was last reset.
static PEAK: AtomicUsize = AtomicUsize::new(0);

/// Counts allocated bytes and rejects single requests beyond the limit.
///
/// This is the global allocator of every test binary that links this crate. It counts requested
/// bytes, without the overhead of the system allocator.
struct CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

impl CountingAllocator {
    /// Counts a request of `bytes` and returns true. Returns false if the request must be rejected,
    /// because an input requests more than [`MEMORY_LIMIT`] at once.
    fn admit(bytes: usize) -> bool {
        if bytes > MEMORY_LIMIT && RUNNING.load(Relaxed) {
            // A null pointer may end the process, so the input is printed first.
            with_current(|input| {
                _ = writeln!(std::io::stderr(), "{input} asks for {bytes} bytes");
            });
            return false;
        }
        // Many small requests are not refused here. The loop compares their peak with the limit
        // after the input, when it can still name the input in a panic.
        let live = LIVE.fetch_add(bytes, Relaxed) + bytes;
        PEAK.fetch_max(live, Relaxed);
        true
    }
}

// SAFETY: all memory comes from the system's allocator. A refused request returns a null pointer.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if !Self::admit(layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if !Self::admit(layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: as the caller promises.
        unsafe { System.alloc_zeroed(layout) }
    }

    /// Counts the new size as a separate request and then subtracts the old size. A growing vector
    /// is thus briefly counted twice, because both allocations can exist at the same time.
    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        if !Self::admit(new_size) {
            return std::ptr::null_mut();
        }
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.realloc(pointer, layout, new_size) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(pointer, layout) }
    }
}

/// Calls `action`, to which the limit applies, and returns the peak number of allocated bytes
/// during the call, minus the number before the call. `action` must not panic.
///
/// Allocations of other threads are included.
pub(crate) fn peak_of(action: impl FnOnce()) -> usize {
    let before = LIVE.load(Relaxed);
    PEAK.store(before, Relaxed);
    RUNNING.store(true, Relaxed);
    action();
    RUNNING.store(false, Relaxed);
    PEAK.load(Relaxed).saturating_sub(before)
}
