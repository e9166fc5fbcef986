//! Memory for packed panels and sums. Each thread keeps this memory for its next product.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::cell::Cell;
use std::num::NonZero;
use std::ptr::NonNull;

/// The alignment in bytes: the size of a cache line and of the widest registers.
const ALIGNMENT: NonZero<usize> = NonZero::new(64).unwrap();

/// The use of scratch memory. A thread keeps one allocation of each kind.
#[derive(Debug, Clone, Copy)]
pub(super) enum ScratchKind {
    /// The packed left operand of a block, and the sums that are carried from one block of depths
    /// to the next: at most 8 MiB, plus about 4 MiB for each thread of the product. Allocated by
    /// the calling thread.
    Block,
    /// A panel of the right operand and the sums of a task: at most 1 MiB.
    Panel,
}

/// An allocation that a thread keeps for its next product. It has the size of the largest
/// allocation of its kind so far. Without this reuse, the operating system would map and clear the
/// pages again for every product.
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
    /// While a thread waits for others, it may compute another product. The nested product gets a
    /// separate allocation.
    pub(super) fn with<R>(
        kind: ScratchKind,
        bytes: usize,
        work: impl FnOnce(NonNull<u8>) -> R,
    ) -> R {
        if bytes == 0 {
            // The kept allocations remain available to products that `work` computes.
            return work(NonNull::without_provenance(ALIGNMENT));
        }
        // An allocation that is too small is freed before a larger one is made.
        let kept = Self::take(kind).filter(|kept| kept.layout.size() >= bytes);
        let scratch = kept.unwrap_or_else(|| Self::new(bytes));
        let result = work(scratch.start);
        scratch.keep(kind);
        result
    }

    fn take(kind: ScratchKind) -> Option<Self> {
        let mut kept = KEPT.take();
        let scratch = kept[kind as usize].take();
        KEPT.set(kept);
        scratch
    }

    /// Keeps the allocation for the next product, unless a nested product has already stored a
    /// larger one.
    fn keep(self, kind: ScratchKind) {
        let mut kept = KEPT.take();
        let place = &mut kept[kind as usize];
        if place.as_ref().is_none_or(|other| other.layout.size() < self.layout.size()) {
            *place = Some(self);
        }
        KEPT.set(kept);
    }

    /// Allocates `bytes` bytes, which must not be 0.
    fn new(bytes: usize) -> Self {
        let layout =
            Layout::from_size_align(bytes, ALIGNMENT.get()).expect("sizes of products are checked");
        // SAFETY: the size is not 0, as `with` has checked.
        let start = NonNull::new(unsafe { alloc(layout) });
        Self { start: start.unwrap_or_else(|| handle_alloc_error(layout)), layout }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // SAFETY: the memory was allocated with this layout, and no other code has a pointer to it
        // any more.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the start of scratch memory of a kind.
    fn start(kind: ScratchKind, bytes: usize) -> NonNull<u8> {
        Scratch::with(kind, bytes, |start| start)
    }

    fn kept_bytes(kind: ScratchKind) -> usize {
        let kept = KEPT.take();
        let bytes = kept[kind as usize].as_ref().map_or(0, |piece| piece.layout.size());
        KEPT.set(kept);
        bytes
    }

    #[test]
    fn a_piece_of_each_kind_is_kept_and_grows() {
        for (bytes, kept) in [(100, 100), (60, 100), (0, 100), (5000, 5000), (100, 5000)] {
            let address = start(ScratchKind::Block, bytes).addr().get();
            assert!(address.is_multiple_of(64), "{bytes}: {address:x}");
            assert_eq!(kept_bytes(ScratchKind::Block), kept);
            assert_eq!(kept_bytes(ScratchKind::Panel), 0);
        }
    }

    #[test]
    fn a_product_inside_of_another_has_memory_of_its_own() {
        for [outside, inside] in [[300, 300], [300, 5000], [9000, 300]] {
            Scratch::with(ScratchKind::Panel, outside, |one| {
                assert_ne!(start(ScratchKind::Panel, inside), one);
                assert_eq!(start(ScratchKind::Panel, 0), start(ScratchKind::Block, 0));
            });
            assert!(kept_bytes(ScratchKind::Panel) >= outside.max(inside), "the larger is kept");
        }
    }
}
