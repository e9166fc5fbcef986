//! Regions of a swap file and their allocator.

use std::sync::atomic::{AtomicU64, Ordering};

/// Alignment of every region, request and buffer, in bytes.
///
/// Direct I/O on current disks needs 512 or 4096. A fixed number lets callers add up the bytes of
/// their regions before the file exists; file systems that need more are used without direct I/O.
pub const ALIGNMENT: usize = 4096;

/// Rounds up to the alignment.
pub(crate) fn padded(bytes: usize) -> u64 {
    // Saturates far above the size of any disk, so such a request is refused for lack of space.
    (bytes as u64).div_ceil(ALIGNMENT as u64).saturating_mul(ALIGNMENT as u64)
}

/// A part of a swap file, reserved for as long as the file exists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Region {
    /// The file that the region belongs to.
    pub(crate) file: u64,
    /// Where it starts in the file, in bytes.
    pub(crate) offset: u64,
    bytes: usize,
}

impl Region {
    /// Bytes of the region, without padding.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether the region has no bytes.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }
}

/// Hands out the bytes of a file from start to end.
#[derive(Debug)]
pub(crate) struct RegionAllocator {
    file: u64,
    bytes: u64,
    next: AtomicU64,
}

impl RegionAllocator {
    /// All `bytes` of a new file are free.
    pub(crate) fn new(bytes: u64) -> Self {
        static FILES: AtomicU64 = AtomicU64::new(0);
        let file = FILES.fetch_add(1, Ordering::Relaxed);
        Self { file, bytes, next: AtomicU64::new(0) }
    }

    /// Number of the file within the process.
    pub(crate) fn file(&self) -> u64 {
        self.file
    }

    /// Bytes of the file.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Reserves a region.
    ///
    /// # Errors
    /// The bytes left, when they are too few.
    pub(crate) fn allocate(&self, bytes: usize) -> Result<Region, u64> {
        let padded = padded(bytes);
        let reserve = |next: u64| next.checked_add(padded).filter(|end| *end <= self.bytes);
        let offset = self
            .next
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, reserve)
            .map_err(|next| self.bytes - next)?;
        Ok(Region { file: self.file, offset, bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_are_aligned_and_do_not_overlap() {
        let allocator = RegionAllocator::new(4 * 4096);
        let offsets: Vec<u64> =
            [1, 0, 4097, 4096].map(|bytes| allocator.allocate(bytes).unwrap().offset).into();
        assert_eq!(offsets, [0, 4096, 4096, 3 * 4096]);
        assert_eq!(allocator.allocate(1), Err(0));
        assert_eq!(allocator.allocate(usize::MAX), Err(0));
        assert!(allocator.allocate(0).unwrap().is_empty());
    }
}
