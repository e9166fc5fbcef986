//! The allocator of both programs: the system's for small blocks, and a heap of huge pages for large
//! ones.
//!
//! ```text
//!  size of a block        comes from                 after it is freed
//!  below LARGE_BLOCK      a heap of the C library    `finetune` keeps its memory
//!  LARGE_BLOCK or more    the page heap              its pages serve other large blocks, of any
//!                                                    size, or are returned to the system
//! ```
//!
//! Every training step allocates and frees the same arrays, in an order that leaves gaps. A heap
//! that keeps all freed memory for the next step keeps the gaps too: one fifth of the peak of GPT-2
//! 124M. Returning all large blocks to the system costs time instead: a sixth of the step of GPT-2
//! 124M at stage 3 was clearing pages. The page heap keeps pages only as far as the peak of its used
//! blocks; see [`page_heap`].
//!
//! The page heap needs Linux. Elsewhere, and where its addresses cannot be reserved, blocks of all
//! sizes come from the system's allocator. Huge pages are Linux's transparent ones; where they are
//! off, the heap has ordinary pages. Thresholds for smaller blocks are glibc's.

use std::alloc::{GlobalAlloc, Layout, System};

#[cfg(target_os = "linux")]
mod address_range;
#[cfg(target_os = "linux")]
mod large_blocks;
#[cfg(target_os = "linux")]
mod page_heap;

#[cfg(target_os = "linux")]
use large_blocks::LargeBlocks;

/// Other systems have no page heap.
#[cfg(not(target_os = "linux"))]
enum LargeBlocks {}

#[cfg(not(target_os = "linux"))]
impl LargeBlocks {
    fn get() -> Option<&'static Self> {
        None
    }

    fn allocate(&self, _: Layout) -> Option<(*mut u8, bool)> {
        match *self {}
    }

    unsafe fn free(&self, _: *mut u8, _: usize) -> bool {
        match *self {}
    }

    fn owns(&self, _: *mut u8) -> bool {
        match *self {}
    }

    unsafe fn resize(&self, _: *mut u8, _: usize, _: usize) -> bool {
        match *self {}
    }
}

/// Bytes of the smallest large block: a few pages of the heap, so that less than a tenth of them is
/// lost in the last page on average.
const LARGE_BLOCK: usize = 512 << 10;

/// glibc gives blocks of this size or more a mapping of their own, which ends with the block: those
/// that the page heap cannot have, and C libraries' own. LibTorch's are kept up to the largest
/// threshold that glibc accepts.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const MMAP_THRESHOLD: libc::c_int = if cfg!(feature = "tch") { 32 << 20 } else { 4 << 20 };

/// glibc returns free memory at the end of a heap once it exceeds this many bytes. A step frees
/// less, so that nothing is returned between two steps.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const TRIM_THRESHOLD: libc::c_int = 1 << 30;

/// The system's allocator for small blocks, and a heap of huge pages for large ones.
#[derive(Debug, Clone, Copy)]
pub struct HugePageAllocator;

// SAFETY: a block is the system allocator's or has pages of the heap that no other block has. Blocks
// below LARGE_BLOCK are never of the heap; of others, the address decides where they are freed.
unsafe impl GlobalAlloc for HugePageAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.size() >= LARGE_BLOCK
            && let Some((block, _)) = LargeBlocks::get().and_then(|heap| heap.allocate(layout))
        {
            return block;
        }
        // SAFETY: the caller's promises are those that `System` needs.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if layout.size() >= LARGE_BLOCK
            && let Some((block, is_zero)) =
                LargeBlocks::get().and_then(|heap| heap.allocate(layout))
        {
            if !is_zero {
                // SAFETY: the block has this size and is new.
                unsafe { block.write_bytes(0, layout.size()) };
            }
            return block;
        }
        // SAFETY: the caller's promises are those that `System` needs.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: by the caller's promise, the block has this size and nobody uses it any more.
        let free = |heap: &LargeBlocks| unsafe { heap.free(block, layout.size()) };
        if layout.size() < LARGE_BLOCK || !LargeBlocks::get().is_some_and(free) {
            // SAFETY: the block is not of the page heap, so `System` has allocated it.
            unsafe { System.dealloc(block, layout) };
        }
    }

    /// A large block grows where it is if the pages after it are free.
    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        let (old, new) = (layout.size(), new_size);
        let is_of_heap =
            old >= LARGE_BLOCK && LargeBlocks::get().is_some_and(|heap| heap.owns(block));
        // A large block that the heap could not have may grow without a copy.
        if !is_of_heap && (old >= LARGE_BLOCK || new < LARGE_BLOCK) {
            // SAFETY: the caller's promises are those that `System` needs, whose block it is.
            return unsafe { System.realloc(block, layout, new) };
        }
        // SAFETY: by the caller's promise, the block has `old` bytes and is the caller's.
        let resize = |heap: &LargeBlocks| unsafe { heap.resize(block, old, new) };
        if is_of_heap && new >= LARGE_BLOCK && LargeBlocks::get().is_some_and(resize) {
            return block;
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

/// Sets the size from which on glibc gives blocks mappings of their own, and keeps the memory of
/// smaller ones.
///
/// The variables `MALLOC_MMAP_THRESHOLD_` and `MALLOC_TRIM_THRESHOLD_` override it; `GLIBC_TUNABLES`
/// does not.
pub fn set_block_thresholds() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    for (parameter, variable, value) in [
        (libc::M_MMAP_THRESHOLD, "MALLOC_MMAP_THRESHOLD_", MMAP_THRESHOLD),
        (libc::M_TRIM_THRESHOLD, "MALLOC_TRIM_THRESHOLD_", TRIM_THRESHOLD),
    ] {
        if std::env::var_os(variable).is_none() {
            // SAFETY: it sets a number under the lock of the allocator, which reads it at the next
            // allocation. A refused value leaves glibc's default.
            unsafe { libc::mallopt(parameter, value) };
        }
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

    #[cfg(target_os = "linux")]
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
