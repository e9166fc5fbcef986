//! [`DeviceMemory`]: the addresses of a device's memory.

use std::collections::BTreeMap;

use crate::counts::AllocationCounts;

/// The first address. No host memory is there on x86-64 and 64-bit Arm, so a program that accesses
/// device memory from the host fails, as it does with a device.
const START: u64 = 1 << 52;

/// Addresses of allocations are multiples of this.
const ALIGNMENT: u64 = 512;

/// Device memory: addresses without memory behind them, because no kernel runs.
///
/// Addresses are never used twice, so a copy to or from released memory is detected.
#[derive(Debug)]
pub(crate) struct DeviceMemory {
    /// Bytes of the device.
    capacity: u64,
    /// The address of the next allocation.
    next: u64,
    /// Bytes of each allocation, by address.
    blocks: BTreeMap<u64, u64>,
    /// What was allocated so far.
    pub(crate) counts: AllocationCounts,
}

impl DeviceMemory {
    /// Returns the memory of a device with `capacity` bytes.
    pub(crate) fn new(capacity: u64) -> Self {
        let counts = AllocationCounts::default();
        Self { capacity, next: START, blocks: BTreeMap::new(), counts }
    }

    /// Allocates `bytes` and returns their address; `None` if there is not enough memory.
    pub(crate) fn allocate(&mut self, bytes: u64) -> Option<u64> {
        if bytes > self.capacity - self.counts.bytes {
            return None;
        }
        let address = self.next;
        // Addresses differ, also of allocations of 0 bytes.
        self.next += bytes.max(1).next_multiple_of(ALIGNMENT);
        self.blocks.insert(address, bytes);
        // CubeCL allocates empty tensors too, as many as are alive at once. They take no memory.
        if bytes > 0 {
            self.counts.add(bytes);
        }
        Some(address)
    }

    /// Releases an allocation and returns its bytes; `None` if there is none at `address`.
    pub(crate) fn release(&mut self, address: u64) -> Option<u64> {
        let bytes = self.blocks.remove(&address)?;
        self.counts.remove(bytes);
        Some(bytes)
    }

    /// Returns whether all `bytes` from `address` on are in one allocation.
    pub(crate) fn contains(&self, address: u64, bytes: u64) -> bool {
        let block = self.blocks.range(..=address).next_back();
        block.is_some_and(|(start, length)| {
            let offset = address - start;
            offset.checked_add(bytes).is_some_and(|end| end <= *length)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_ends_at_the_capacity() {
        let mut memory = DeviceMemory::new(1000);
        let first = memory.allocate(600).unwrap();
        assert_eq!(memory.allocate(401), None);
        let second = memory.allocate(400).unwrap();
        assert!(second >= first + 600 && second.is_multiple_of(ALIGNMENT));
        assert_eq!(memory.release(first), Some(600));
        assert_eq!(memory.release(first), None, "it is released already");
        assert!(memory.allocate(600).is_some());
        assert_ne!(memory.allocate(0), memory.allocate(0));
        let counts = AllocationCounts { allocations: 3, bytes: 1000, peak_bytes: 1000 };
        assert_eq!(memory.counts, counts);
    }

    #[test]
    fn ranges_beyond_an_allocation_are_detected() {
        let mut memory = DeviceMemory::new(1 << 20);
        let (first, second) = (memory.allocate(512).unwrap(), memory.allocate(512).unwrap());
        assert!(memory.contains(first, 512) && memory.contains(first + 12, 500));
        assert!(!memory.contains(first, 513) && !memory.contains(first - 1, 1));
        assert!(!memory.contains(first, u64::MAX));
        memory.release(first);
        assert!(!memory.contains(first, 1) && memory.contains(second, 1));
    }
}
