//! The global allocator, which allocates small blocks from the system and large blocks from the
//! page heap.

use std::alloc::{GlobalAlloc, Layout, System};

use super::large_blocks::LargeBlocks;

/// Bytes of the smallest large block. It has several heap pages, so that on average less than a
/// tenth of a block is lost by rounding up to whole pages.
const LARGE_BLOCK: usize = 512 << 10;

/// The system allocator for small blocks, and a page heap with huge pages for large blocks.
#[derive(Debug, Clone, Copy)]
pub struct HugePageAllocator;

/// Returns the page heap if a block of `size` bytes is large. Returns `None` if there is no page
/// heap.
fn heap_for(size: usize) -> Option<&'static LargeBlocks> {
    if size < LARGE_BLOCK { None } else { LargeBlocks::get() }
}

/// Returns the page heap if it has allocated `block`.
fn heap_of(block: *mut u8, layout: Layout) -> Option<&'static LargeBlocks> {
    heap_for(layout.size()).filter(|heap| heap.owns(block))
}

// SAFETY: a block is allocated by the system allocator, or from pages of the heap that no other
// block has. Blocks below LARGE_BLOCK are never allocated by the heap. For larger blocks, the
// address determines the allocator that frees them.
unsafe impl GlobalAlloc for HugePageAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match heap_for(layout.size()).and_then(|heap| heap.allocate(layout)) {
            Some((block, _)) => block,
            // SAFETY: the caller fulfils the contract of `GlobalAlloc`, which `System` needs too.
            None => unsafe { System.alloc(layout) },
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let Some((block, is_zero)) = heap_for(layout.size()).and_then(|heap| heap.allocate(layout))
        else {
            // SAFETY: the caller fulfils the contract of `GlobalAlloc`, which `System` needs too.
            return unsafe { System.alloc_zeroed(layout) };
        };
        if !is_zero {
            // SAFETY: the block was just allocated with this size.
            unsafe { block.write_bytes(0, layout.size()) };
        }
        block
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        match heap_of(block, layout) {
            // SAFETY: the heap has allocated the block with this size, and the caller ensures that
            // it is not used any more.
            Some(heap) => unsafe { heap.free(block, layout.size()) },
            // SAFETY: the heap has not allocated the block, so `System` has.
            None => unsafe { System.dealloc(block, layout) },
        }
    }

    /// Resizes a block. A large block grows in place if the pages after it are free.
    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        let (old, new) = (layout.size(), new_size);
        match heap_of(block, layout) {
            // SAFETY: the heap has allocated the block with `old` bytes, and the caller ensures
            // that nobody else uses it.
            Some(heap) if new >= LARGE_BLOCK && unsafe { heap.resize(block, old, new) } => {
                return block;
            }
            // Large blocks that the page heap could not allocate are resized by the system
            // allocator, which may grow them without a copy.
            None if old >= LARGE_BLOCK || new < LARGE_BLOCK => {
                // SAFETY: `System` has allocated the block, and the caller fulfils the contract of
                // `GlobalAlloc`, which `System` needs too.
                return unsafe { System.realloc(block, layout, new) };
            }
            _ => {}
        }
        // SAFETY: the caller promises that the alignment is valid and the size fits.
        let moved = unsafe { self.alloc(Layout::from_size_align_unchecked(new, layout.align())) };
        if !moved.is_null() {
            // SAFETY: both blocks have at least this many bytes and do not overlap, because the new
            // one was just allocated. The old block has this layout and is not used afterwards.
            unsafe {
                moved.copy_from_nonoverlapping(block, old.min(new));
                self.dealloc(block, layout);
            }
        }
        moved
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use proptest::prelude::*;

    use super::*;

    /// A block of the allocator, filled with one byte.
    struct Filled {
        start: *mut u8,
        layout: Layout,
        byte: u8,
    }

    impl Filled {
        fn new(size: usize, byte: u8, zeroed: bool) -> Self {
            let layout = Layout::from_size_align(size, 64).unwrap();
            // SAFETY: the size is not zero.
            let start = unsafe {
                match zeroed {
                    true => HugePageAllocator.alloc_zeroed(layout),
                    false => HugePageAllocator.alloc(layout),
                }
            };
            assert!(!start.is_null() && start.addr().is_multiple_of(64));
            let mut filled = Self { start, layout, byte: 0 };
            if zeroed {
                filled.check(size);
            }
            filled.fill(byte);
            filled
        }

        fn bytes(&mut self) -> &mut [u8] {
            // SAFETY: the block has this size, only this value uses it, and all its bytes are
            // initialized.
            unsafe { std::slice::from_raw_parts_mut(self.start, self.layout.size()) }
        }

        fn fill(&mut self, byte: u8) {
            // SAFETY: the block has this size.
            unsafe { self.start.write_bytes(byte, self.layout.size()) };
            self.byte = byte;
        }

        /// Checks that the first `count` bytes still have the value that they were filled with.
        fn check(&mut self, count: usize) {
            let byte = self.byte;
            assert!(
                self.bytes()[..count].iter().all(|held| *held == byte),
                "a block was overwritten"
            );
        }

        fn resize(&mut self, size: usize) {
            let kept = self.layout.size().min(size);
            // SAFETY: the block has this layout, and the size is not zero.
            self.start = unsafe { HugePageAllocator.realloc(self.start, self.layout, size) };
            assert!(!self.start.is_null());
            self.layout = Layout::from_size_align(size, 64).unwrap();
            self.check(kept);
            self.fill(self.byte);
        }
    }

    impl Drop for Filled {
        fn drop(&mut self) {
            self.check(self.layout.size());
            // SAFETY: the block has this layout and is not used after this.
            unsafe { HugePageAllocator.dealloc(self.start, self.layout) };
        }
    }

    /// Sizes on both sides of the threshold and of a page.
    fn size() -> impl Strategy<Value = usize> {
        prop_oneof![
            1 => 1..LARGE_BLOCK,
            1 => LARGE_BLOCK - 2..LARGE_BLOCK + 3,
            3 => LARGE_BLOCK..5 * LARGE_BLOCK,
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        /// Blocks of four threads keep their content through allocations, frees and changes of size
        /// of all others, and zeroed blocks are zero.
        #[test]
        fn blocks_keep_their_content(
            steps in prop::collection::vec((size(), any::<usize>(), any::<bool>(), 0..4), 1..40),
        ) {
            thread::scope(|scope| {
                for thread in 1..5_u8 {
                    let steps = &steps;
                    scope.spawn(move || {
                        let mut blocks: Vec<Filled> = Vec::new();
                        for (round, (size, which, zeroed, action)) in steps.iter().enumerate() {
                            let index = which % blocks.len().max(1);
                            match action {
                                0 if !blocks.is_empty() => drop(blocks.swap_remove(index)),
                                1 if !blocks.is_empty() => blocks[index].resize(*size),
                                _ => {
                                    let byte = thread * 50 + round as u8;
                                    blocks.push(Filled::new(*size, byte, *zeroed));
                                }
                            }
                        }
                    });
                }
            });
        }
    }

    #[test]
    fn large_blocks_are_of_the_heap() {
        // The heap is absent under `ulimit -v` and `vm.overcommit_memory=2`.
        let Some(heap) = LargeBlocks::get() else { return };
        let large = Filled::new(LARGE_BLOCK, 1, false);
        let small = Filled::new(LARGE_BLOCK - 1, 2, false);
        assert_eq!((heap.owns(large.start), heap.owns(small.start)), (true, false));
    }

    /// Blocks with a larger alignment than a page are allocated by the system allocator.
    #[test]
    fn blocks_may_be_aligned_to_more_than_a_page() {
        let layout = Layout::from_size_align(LARGE_BLOCK, 1 << 20).unwrap();
        // SAFETY: the size is not zero, and the block is freed with its layout.
        unsafe {
            let block = HugePageAllocator.alloc(layout);
            assert!(block.addr().is_multiple_of(1 << 20) && !block.is_null());
            let block = HugePageAllocator.realloc(block, layout, 3 * LARGE_BLOCK);
            assert!(block.addr().is_multiple_of(1 << 20) && !block.is_null());
            let layout = Layout::from_size_align(3 * LARGE_BLOCK, 1 << 20).unwrap();
            HugePageAllocator.dealloc(block, layout);
        }
    }
}
