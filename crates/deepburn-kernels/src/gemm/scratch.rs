//! Memory for packed panels and sums, which each thread keeps for its next product.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::cell::Cell;
use std::ptr::NonNull;

/// Cache lines and the widest registers start at multiples of it.
const ALIGNMENT: usize = 64;

/// Pieces that a thread keeps: while it has the packed left operand, it multiplies with panels of the right one.
const PIECES: usize = 2;

/// A piece of memory that a thread keeps for its next product. All of a thread are as large as the largest block of the
/// left operand with sums, and right panel, so far: at most about 16 MiB each. Without them the system would hand out, and clear, the
/// pages of every product anew.
pub(super) struct Scratch {
    start: NonNull<u8>,
    layout: Layout,
}

thread_local! {
    static KEPT: Cell<[Option<Scratch>; PIECES]> = const { Cell::new([const { None }; PIECES]) };
}

impl Scratch {
    /// Calls `work` with at least `bytes` bytes of scratch memory with any content, aligned to 64.
    ///
    /// A thread that waits for others may compute another product meanwhile. If all of its pieces are in use, the other
    /// product gets its own.
    pub(super) fn with<R>(bytes: usize, work: impl FnOnce(NonNull<u8>) -> R) -> R {
        let scratch = Self::take(bytes).unwrap_or_else(|| Self::new(bytes));
        let result = work(scratch.start);
        scratch.keep();
        result
    }

    /// The smallest piece that is large enough.
    fn take(bytes: usize) -> Option<Self> {
        let mut kept = KEPT.take();
        let fits =
            |piece: &&mut Option<Self>| piece.as_ref().is_some_and(|piece| piece.size() >= bytes);
        let piece = kept.iter_mut().filter(fits).min_by_key(|piece| piece.as_ref().map(Self::size));
        let piece = piece.and_then(Option::take);
        KEPT.set(kept);
        piece
    }

    /// Keeps the piece in the place of the smallest one, unless that is larger.
    fn keep(self) {
        let mut kept = KEPT.take();
        let smallest = kept.iter_mut().min_by_key(|piece| piece.as_ref().map_or(0, Self::size));
        if let Some(place) =
            smallest.filter(|place| place.as_ref().map_or(0, Self::size) < self.size())
        {
            *place = Some(self);
        }
        KEPT.set(kept);
    }

    fn size(&self) -> usize {
        self.layout.size()
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
