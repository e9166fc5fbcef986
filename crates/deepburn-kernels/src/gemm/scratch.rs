//! Memory for packed panels and sums, which each thread keeps for its next product.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::cell::Cell;
use std::num::NonZero;
use std::ptr::NonNull;

/// Cache lines and the widest registers start at multiples of it.
const ALIGNMENT: NonZero<usize> = NonZero::new(64).unwrap();

/// What scratch memory is for. A thread keeps one piece of each kind.
#[derive(Debug, Clone, Copy)]
pub(super) enum ScratchKind {
    /// The left operand of a block, and sums from one block of depths to the next: at most 8 MiB, and about 4 MiB for
    /// each thread of the product. The calling thread has it.
    Block,
    /// A panel of the right operand and the sums of a task: at most 1 MiB.
    Panel,
}

/// A piece of memory that a thread keeps for its next product, as large as the largest of its kind so far. Without it the
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
    pub(super) fn with<R>(
        kind: ScratchKind,
        bytes: usize,
        work: impl FnOnce(NonNull<u8>) -> R,
    ) -> R {
        if bytes == 0 {
            // The pieces stay for products that `work` computes.
            return work(NonNull::without_provenance(ALIGNMENT));
        }
        // A piece that is too small is freed before a larger one is allocated.
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

    /// Keeps the piece, unless a product inside of this one has left a larger one.
    fn keep(self, kind: ScratchKind) {
        let mut kept = KEPT.take();
        let place = &mut kept[kind as usize];
        if place.as_ref().is_none_or(|other| other.layout.size() < self.layout.size()) {
            *place = Some(self);
        }
        KEPT.set(kept);
    }

    /// Allocates a piece of at least one byte.
    fn new(bytes: usize) -> Self {
        let layout =
            Layout::from_size_align(bytes, ALIGNMENT.get()).expect("sizes of products are checked");
        // SAFETY: the size is not 0, as `with` has seen.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Where scratch memory of a kind starts.
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
