//! Memory for packed panels and sums, which each thread keeps for its next product.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::cell::Cell;
use std::ptr::NonNull;

/// Cache lines and the widest registers start at multiples of it.
const ALIGNMENT: usize = 64;

/// What scratch memory is for. A thread keeps one piece for each use.
#[derive(Debug, Clone, Copy)]
pub(super) enum Use {
    /// The left operand of a block, and sums from one block of depths to the next: at most 8 MiB, and 4 MiB for each
    /// thread of the product. The calling thread has it.
    Block,
    /// A panel of the right operand and the sums of a task: at most 1 MiB.
    Panel,
}

/// A piece of memory that a thread keeps for its next product, as large as the largest of its use so far. Without it the
/// system would hand out, and clear, the pages of every product anew.
pub(super) struct Scratch {
    start: NonNull<u8>,
    layout: Layout,
}

thread_local! {
    static KEPT: Cell<[Option<Scratch>; 2]> = const { Cell::new([const { None }; 2]) };
}

impl Scratch {
    /// Calls `work` with at least `bytes` bytes of scratch memory with any content, aligned to 64.
    ///
    /// A thread that waits for others may compute another product meanwhile, which gets a piece of its own.
    pub(super) fn with<R>(usage: Use, bytes: usize, work: impl FnOnce(NonNull<u8>) -> R) -> R {
        // A piece that is too small is freed before a larger one is allocated.
        let kept = Self::take(usage).filter(|kept| kept.layout.size() >= bytes);
        let scratch = kept.unwrap_or_else(|| Self::new(bytes));
        let result = work(scratch.start);
        scratch.keep(usage);
        result
    }

    fn take(usage: Use) -> Option<Self> {
        let mut kept = KEPT.take();
        let scratch = kept[usage as usize].take();
        KEPT.set(kept);
        scratch
    }

    /// Keeps the piece, unless a product inside of this one has left a larger one.
    fn keep(self, usage: Use) {
        let mut kept = KEPT.take();
        let place = &mut kept[usage as usize];
        if place.as_ref().is_none_or(|other| other.layout.size() < self.layout.size()) {
            *place = Some(self);
        }
        KEPT.set(kept);
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
