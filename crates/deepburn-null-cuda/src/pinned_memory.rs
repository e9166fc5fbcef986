//! [`PinnedMemory`]: host memory that a device can access.

use std::collections::HashMap;

use memmap2::{MmapMut, MmapOptions};

use crate::counts::AllocationCounts;

/// Page-locked host memory, which here is ordinary memory.
#[derive(Debug, Default)]
pub(crate) struct PinnedMemory {
    /// Allocations by address.
    blocks: HashMap<usize, MmapMut>,
    /// What was allocated so far.
    pub(crate) counts: AllocationCounts,
}

impl PinnedMemory {
    /// Allocates `bytes` and returns their address; `None` if the host has no memory.
    pub(crate) fn allocate(&mut self, bytes: usize) -> Option<usize> {
        // CubeCL allocates large pages, of which it uses a small part. Memory that is not used must
        // not count towards the host's limit.
        let mut block = MmapOptions::new().len(bytes).no_reserve_swap().map_anon().ok()?;
        let address = block.as_mut_ptr() as usize;
        self.blocks.insert(address, block);
        self.counts.add(bytes as u64);
        Some(address)
    }

    /// Releases an allocation and returns its bytes; `None` if there is none at `address`.
    pub(crate) fn release(&mut self, address: usize) -> Option<usize> {
        let bytes = self.blocks.remove(&address)?.len();
        self.counts.remove(bytes as u64);
        Some(bytes)
    }
}
