//! Memory for packed panels and sums, which each thread keeps for its next product.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::cell::Cell;
use std::ptr::NonNull;

/// Cache lines and the widest registers start at multiples of it.
const ALIGNMENT: usize = 64;

/// Bytes that a thread keeps: those of the last use, if it asked for more than there were. At most 8 MiB and a panel.
/// Without it the system would hand out, and clear, the pages of every product anew.
pub(super) struct Scratch {
    start: NonNull<u8>,
    layout: Layout,
}

thread_local! {
    static KEPT: Cell<Option<Scratch>> = const { Cell::new(None) };
}

impl Scratch {
    /// Calls `work` with at least `bytes` bytes of scratch memory with any content, aligned to 64.
    ///
    /// A thread that waits for others may compute another product meanwhile. Its scratch memory is in use then, and
    /// the other product gets its own.
    pub(super) fn with<R>(bytes: usize, work: impl FnOnce(NonNull<u8>) -> R) -> R {
        let scratch = match KEPT.take() {
            Some(kept) if kept.layout.size() >= bytes => kept,
            _ => Self::new(bytes),
        };
        let result = work(scratch.start);
        let larger = KEPT.take().filter(|kept| kept.layout.size() > scratch.layout.size());
        KEPT.set(Some(larger.unwrap_or(scratch)));
        result
    }

    fn new(bytes: usize) -> Self {
        let layout = Layout::from_size_align(bytes.max(ALIGNMENT), ALIGNMENT)
            .expect("sizes of products are checked");
        // SAFETY: the size is not 0.
        let start = NonNull::new(unsafe { alloc(layout) });
        Self { start: start.unwrap_or_else(|| handle_alloc_error(layout)), layout }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and nobody has the pointer any more.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}
