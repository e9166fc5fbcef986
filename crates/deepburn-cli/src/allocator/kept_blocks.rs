//! Large blocks that were freed and wait for the next allocation of their size.
//!
//! Main type: [`KeptBlocks`]. It counts the bytes of the large blocks in use, and the most that they have been. Kept
//! blocks have a part of the difference:
//!
//! ```text
//! used + kept <= 11/16 of the peak of used, or kept = 0
//! ```
//!
//! At its peak a step needs no kept blocks, and at most times it uses much less. The share is a choice between time and
//! memory, because blocks in use may be counted before they are touched. For a step of GPT-2 124M at stage 3 on two ranks,
//! a half of the peak saves no page faults; eleven sixteenths save two thirds of those that all of it saves, and leave the
//! resident set as it was; three quarters save all of them, and the resident set grows by two per cent. When blocks in use
//! need the room, the kept block that was freed first goes before all others.

use std::alloc::Layout;

/// Most blocks that are kept. Searching all of them takes less time than the page fault that a kept block saves.
const SLOTS: usize = 512;

/// Bytes that blocks in use and kept blocks may have together, if blocks in use had `peak` bytes at most.
const fn share(peak: usize) -> usize {
    peak - peak / 16 * 5
}

/// A block that was freed, with the layout that it was allocated with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct KeptBlock {
    pub(super) start: *mut u8,
    pub(super) layout: Layout,
}

// SAFETY: nobody else uses the block. Any thread may use or free memory of the system's allocator.
unsafe impl Send for KeptBlock {}

/// The kept blocks of a process, and the bytes of the blocks in use. It allocates no memory itself.
pub(super) struct KeptBlocks {
    /// The first `count` are kept blocks, in the order in which they were freed.
    slots: [Option<KeptBlock>; SLOTS],
    count: usize,
    kept: usize,
    used: usize,
    peak: usize,
}

impl KeptBlocks {
    pub(super) const fn new() -> Self {
        Self { slots: [None; SLOTS], count: 0, kept: 0, used: 0, peak: 0 }
    }

    /// Counts a block of `layout` as used, and returns a kept block for it: of the same size and alignment, the one that
    /// was freed last.
    ///
    /// If there is none, the caller allocates the block, after it has freed what [`excess`](Self::excess) returns.
    pub(super) fn allocate(&mut self, layout: Layout) -> Option<*mut u8> {
        self.count_used(layout.size());
        let fits = |slot: &Option<KeptBlock>| slot.is_some_and(|block| block.layout == layout);
        let index = self.slots[..self.count].iter().rposition(fits)?;
        self.take(index).map(|block| block.start)
    }

    /// Counts `bytes` more as used, as after a block has grown.
    pub(super) fn count_used(&mut self, bytes: usize) {
        self.used += bytes;
        self.peak = self.peak.max(self.used);
    }

    /// Counts `bytes` as no longer used, as of a block that the system did not have or that has shrunk.
    pub(super) fn count_freed(&mut self, bytes: usize) {
        self.used = self.used.saturating_sub(bytes);
    }

    /// Returns a kept block that exceeds the share of the peak, for the caller to free.
    pub(super) fn excess(&mut self) -> Option<KeptBlock> {
        (self.used + self.kept > share(self.peak)).then(|| self.take(0)).flatten()
    }

    /// Keeps a block that was in use. Returns the oldest kept block, for the caller to free, if there are too many; then
    /// the caller frees what [`excess`](Self::excess) returns.
    pub(super) fn keep(&mut self, block: KeptBlock) -> Option<KeptBlock> {
        self.count_freed(block.layout.size());
        let oldest = (self.count == SLOTS).then(|| self.take(0)).flatten();
        self.slots[self.count] = Some(block);
        self.count += 1;
        self.kept += block.layout.size();
        oldest
    }

    /// Takes out the kept block at `index`, if there is one.
    fn take(&mut self, index: usize) -> Option<KeptBlock> {
        let block = self.slots[index].take()?;
        self.slots[index..self.count].rotate_left(1);
        self.count -= 1;
        self.kept -= block.layout.size();
        Some(block)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::ptr::without_provenance_mut;

    use proptest::prelude::*;

    use super::*;

    fn layout(size: usize) -> Layout {
        Layout::from_size_align(size, 8).unwrap()
    }

    fn block(start: usize, size: usize) -> KeptBlock {
        KeptBlock { start: without_provenance_mut(start), layout: layout(size) }
    }

    fn remove_excess(blocks: &mut KeptBlocks, mapped: &mut HashSet<*mut u8>) {
        while let Some(freed) = blocks.excess() {
            assert!(mapped.remove(&freed.start), "a block that is freed was mapped");
        }
    }

    #[test]
    fn a_block_serves_only_its_own_size_and_alignment() {
        let mut blocks = KeptBlocks::new();
        let aligned = Layout::from_size_align(100, 64).unwrap();
        assert_eq!(blocks.allocate(layout(100)), None);
        assert_eq!(blocks.keep(block(8, 100)), None);
        assert_eq!(blocks.allocate(aligned), None);
        assert_eq!(blocks.excess(), Some(block(8, 100)), "both would be more than the share");
        assert_eq!(blocks.excess(), None);
        assert_eq!(blocks.keep(KeptBlock { layout: aligned, ..block(64, 100) }), None);
        assert_eq!(blocks.allocate(layout(100)), None);
    }

    #[test]
    fn the_block_that_was_freed_last_is_used_first_and_returned_last() {
        let mut blocks = KeptBlocks::new();
        for _ in 0..4 {
            blocks.allocate(layout(10));
        }
        for start in [1, 2, 3] {
            assert_eq!(blocks.keep(block(start, 10)), None);
        }
        assert_eq!(blocks.allocate(layout(10)), Some(without_provenance_mut(3)));
        // The share of a peak of 40 bytes is 30: 20 are used and 20 kept, then 5 more are used.
        assert_eq!(blocks.excess(), Some(block(1, 10)));
        assert_eq!(blocks.excess(), None);
        assert_eq!(blocks.allocate(layout(5)), None);
        assert_eq!(blocks.excess(), Some(block(2, 10)));
        assert_eq!(blocks.excess(), None);
    }

    #[test]
    fn the_oldest_block_goes_if_there_are_too_many() {
        let mut blocks = KeptBlocks::new();
        for _ in 0..=SLOTS {
            blocks.allocate(layout(10));
        }
        for start in 0..SLOTS {
            assert_eq!(blocks.keep(block(start, 10)), None);
        }
        assert_eq!(blocks.keep(block(SLOTS, 10)), Some(block(0, 10)));
    }

    proptest! {
        /// Any order of allocations and frees: no block is handed out twice or lost, and kept blocks have their share.
        #[test]
        fn memory_stays_within_the_peak_of_what_is_used(
            steps in prop::collection::vec((any::<bool>(), 1_usize..6, 0_usize..100), 1..400),
        ) {
            let mut blocks = KeptBlocks::new();
            let (mut used, mut mapped) = (Vec::<KeptBlock>::new(), HashSet::new());
            let (mut next, mut peak) = (1, 0);
            for (allocates, size, which) in steps {
                if allocates {
                    let kept = blocks.allocate(layout(size));
                    remove_excess(&mut blocks, &mut mapped);
                    let start = kept.unwrap_or_else(|| {
                        next += 1;
                        without_provenance_mut(next)
                    });
                    prop_assert_eq!(mapped.insert(start), kept.is_none());
                    prop_assert!(used.iter().all(|block| block.start != start), "handed out twice");
                    used.push(KeptBlock { start, layout: layout(size) });
                } else if !used.is_empty() {
                    let freed = blocks.keep(used.swap_remove(which % used.len()));
                    prop_assert_eq!(freed, None);
                    remove_excess(&mut blocks, &mut mapped);
                }
                let bytes: usize = used.iter().map(|block| block.layout.size()).sum();
                peak = peak.max(bytes);
                prop_assert_eq!((blocks.used, blocks.peak), (bytes, peak));
                prop_assert!(blocks.kept == 0 || blocks.used + blocks.kept <= share(peak));
                prop_assert_eq!(mapped.len(), used.len() + blocks.count);
            }
        }
    }
}
