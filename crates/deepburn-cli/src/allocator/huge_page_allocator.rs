//! The global allocator: decides by size and address which allocator has a block.

use std::alloc::{GlobalAlloc, Layout, System};

use super::large_blocks::LargeBlocks;

/// Bytes of the smallest large block: a few pages of the heap, so that less than a tenth of them is
/// lost in the last page on average.
const LARGE_BLOCK: usize = 512 << 10;

/// The system's allocator for small blocks, and a heap of huge pages for large ones.
#[derive(Debug, Clone, Copy)]
pub struct HugePageAllocator;

/// Returns the page heap if `size` bytes are a large block and there is a heap.
fn heap_for(size: usize) -> Option<&'static LargeBlocks> {
    if size < LARGE_BLOCK { None } else { LargeBlocks::get() }
}

/// Returns the page heap if it has the block.
fn heap_of(block: *mut u8, layout: Layout) -> Option<&'static LargeBlocks> {
    heap_for(layout.size()).filter(|heap| heap.owns(block))
}

// SAFETY: a block is the system allocator's or has pages of the heap that no other block has. Blocks
// below LARGE_BLOCK are never of the heap; of others, the address decides where they are freed.
unsafe impl GlobalAlloc for HugePageAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match heap_for(layout.size()).and_then(|heap| heap.allocate(layout)) {
            Some((block, _)) => block,
            // SAFETY: the caller's promises are those that `System` needs.
            None => unsafe { System.alloc(layout) },
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let Some((block, is_zero)) = heap_for(layout.size()).and_then(|heap| heap.allocate(layout))
        else {
            // SAFETY: the caller's promises are those that `System` needs.
            return unsafe { System.alloc_zeroed(layout) };
        };
        if !is_zero {
            // SAFETY: the block has this size and is new.
            unsafe { block.write_bytes(0, layout.size()) };
        }
        block
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        match heap_of(block, layout) {
            // SAFETY: the block is of the heap, has this size, and by the caller's promise nobody
            // uses it any more.
            Some(heap) => unsafe { heap.free(block, layout.size()) },
            // SAFETY: the block is not of the heap, so `System` has allocated it.
            None => unsafe { System.dealloc(block, layout) },
        }
    }

    /// A large block grows where it is if the pages after it are free.
    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        let (old, new) = (layout.size(), new_size);
        match heap_of(block, layout) {
            // SAFETY: the block is of the heap, has `old` bytes, and is the caller's.
            Some(heap) if new >= LARGE_BLOCK && unsafe { heap.resize(block, old, new) } => {
                return block;
            }
            // A large block that the heap could not have may grow without a copy.
            None if old >= LARGE_BLOCK || new < LARGE_BLOCK => {
                // SAFETY: the block is `System`'s, and the caller's promises are those that it needs.
                return unsafe { System.realloc(block, layout, new) };
            }
            _ => {}
        }
        // SAFETY: the caller promises that the alignment is valid and the size fits.
        let moved = unsafe { self.alloc(Layout::from_size_align_unchecked(new, layout.align())) };
        if !moved.is_null() {
            // SAFETY: both blocks have this many bytes, and the new one is nobody else's. The old
            // one has its layout and is not used after this.
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
            // SAFETY: the block has this size, is this value's alone, and was written to the end.
            unsafe { std::slice::from_raw_parts_mut(self.start, self.layout.size()) }
        }

        fn fill(&mut self, byte: u8) {
            // SAFETY: the block has this size.
            unsafe { self.start.write_bytes(byte, self.layout.size()) };
            self.byte = byte;
        }

        /// Checks that the first `count` bytes are what they were filled with.
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
            // SAFETY: the block has this layout and ends here.
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

    /// An alignment that pages do not have is left to the system.
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
