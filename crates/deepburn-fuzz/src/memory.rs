//! The memory of an input, counted by the allocator.
//!
//! The resident set of the process is not suitable: a zeroed allocation has no
//! pages until it is written, and the peak of the process hides every input
//! except the largest.

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use crate::current::with_current;

/// The largest number of bytes that an input may hold. Valid inputs need some
/// kilobytes.
pub const MEMORY_LIMIT: usize = 256 << 20;

/// Whether inputs are running. Other tests of the process are not limited.
///
/// The counters are relaxed atomics: they do not order other memory, and tests
/// of one process run their inputs one at a time.
static RUNNING: AtomicBool = AtomicBool::new(false);
/// The bytes that are allocated now, by all threads.
static LIVE: AtomicUsize = AtomicUsize::new(0);
/// The largest value of [`LIVE`] since it was last reset.
static PEAK: AtomicUsize = AtomicUsize::new(0);

/// Counts allocated bytes and rejects single requests beyond the limit.
///
/// It is the global allocator of every test binary that links this crate. The
/// bytes are those requested, without the overhead of the system's allocator.
struct CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

impl CountingAllocator {
    /// Counts a request of `bytes` and returns true, or returns false if it
    /// must be rejected: an input asks for more than [`MEMORY_LIMIT`] at once.
    fn admit(bytes: usize) -> bool {
        if bytes > MEMORY_LIMIT && RUNNING.load(Relaxed) {
            // A null pointer ends the process unless the caller handles it, so
            // the input is named first.
            with_current(|input| {
                _ = writeln!(std::io::stderr(), "{input} asks for {bytes} bytes");
            });
            return false;
        }
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

    /// Counts the new size as a request of its own and then forgets the old
    /// one, so a growing vector briefly counts twice, like its memory.
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

/// Applies the limit while it is alive.
pub(crate) struct LimitGuard;

impl LimitGuard {
    /// Starts to apply the limit.
    pub(crate) fn new() -> Self {
        RUNNING.store(true, Relaxed);
        Self
    }
}

impl Drop for LimitGuard {
    fn drop(&mut self) {
        RUNNING.store(false, Relaxed);
    }
}

/// Calls `action` and returns the peak of the bytes that it held, beyond what
/// was allocated before.
///
/// Allocations of other threads count too.
pub(crate) fn peak_of(action: impl FnOnce()) -> usize {
    let before = LIVE.load(Relaxed);
    PEAK.store(before, Relaxed);
    action();
    PEAK.load(Relaxed).saturating_sub(before)
}
