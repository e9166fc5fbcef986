//! Regions of a swap file and their allocator.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

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

/// A part of a swap file, reserved until it is [released](crate::SwapFile::release).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Region {
    /// The file that the region belongs to.
    pub(crate) file: u64,
    /// Where it starts in the file, in bytes.
    pub(crate) offset: u64,
    bytes: usize,
    /// Bytes that it takes up in the file.
    reserved: u64,
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

/// Hands out the bytes of a file: released ones where they fit, and otherwise the next ones.
#[derive(Debug)]
pub(crate) struct RegionAllocator {
    file: u64,
    space: Mutex<Space>,
}

/// The bytes of a file.
#[derive(Debug)]
struct Space {
    /// All of them.
    bytes: u64,
    /// The first byte that was never handed out.
    next: u64,
    /// Offsets of released parts, by their size.
    released: BTreeMap<u64, Vec<u64>>,
}

impl RegionAllocator {
    /// All `bytes` of a new file are free.
    pub(crate) fn new(bytes: u64) -> Self {
        static FILES: AtomicU64 = AtomicU64::new(0);
        let file = FILES.fetch_add(1, Ordering::Relaxed);
        Self { file, space: Mutex::new(Space { bytes, next: 0, released: BTreeMap::new() }) }
    }

    /// Number of the file within the process.
    pub(crate) fn file(&self) -> u64 {
        self.file
    }

    /// Bytes of the file.
    pub(crate) fn bytes(&self) -> u64 {
        self.lock().bytes
    }

    /// Reserves a region. It takes the smallest released part that is large enough and at most twice as
    /// large as needed. Where the file is too small, `grow` is asked for a file of so many bytes.
    ///
    /// # Errors
    /// What `grow` returns.
    pub(crate) fn allocate<E>(
        &self,
        bytes: usize,
        grow: impl FnOnce(Shortage) -> Result<u64, E>,
    ) -> Result<Region, E> {
        let needed = padded(bytes);
        let mut space = self.lock();
        if let Some((reserved, offset)) = space.take_released(needed) {
            return Ok(Region { file: self.file, offset, bytes, reserved });
        }
        let (offset, end) = (space.next, space.next.saturating_add(needed));
        if end > space.bytes {
            let left = space.bytes - offset;
            space.bytes = grow(Shortage { needed, left, bytes: space.bytes, end })?;
        }
        space.next = end;
        Ok(Region { file: self.file, offset, bytes, reserved: needed })
    }

    /// Takes a region back.
    pub(crate) fn release(&self, region: &Region) {
        if region.reserved > 0 {
            self.lock().released.entry(region.reserved).or_default().push(region.offset);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Space> {
        self.space.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A region that does not fit into its file.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shortage {
    /// Bytes of the region.
    pub(crate) needed: u64,
    /// Bytes of the file that were never handed out.
    pub(crate) left: u64,
    /// Bytes of the file.
    pub(crate) bytes: u64,
    /// Bytes that the file needs.
    pub(crate) end: u64,
}

impl Space {
    /// A released part for `needed` bytes: its size and offset.
    fn take_released(&mut self, needed: u64) -> Option<(u64, u64)> {
        if needed == 0 {
            return None;
        }
        let range = needed..=needed.saturating_mul(2);
        let (&reserved, offsets) = self.released.range_mut(range).next()?;
        let offset = offsets.pop()?;
        if offsets.is_empty() {
            self.released.remove(&reserved);
        }
        Some((reserved, offset))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allocate(allocator: &RegionAllocator, bytes: usize) -> Result<Region, u64> {
        allocator.allocate(bytes, |shortage| Err(shortage.left))
    }

    #[test]
    fn regions_are_aligned_and_do_not_overlap() {
        let allocator = RegionAllocator::new(4 * 4096);
        let offsets: Vec<u64> =
            [1, 0, 4097, 4096].map(|bytes| allocate(&allocator, bytes).unwrap().offset).into();
        assert_eq!(offsets, [0, 4096, 4096, 3 * 4096]);
        assert_eq!(allocate(&allocator, 1), Err(0));
        assert_eq!(allocate(&allocator, usize::MAX), Err(0));
        assert!(allocate(&allocator, 0).unwrap().is_empty());
    }

    #[test]
    fn released_parts_are_used_again_where_they_fit() {
        let allocator = RegionAllocator::new(8 * 4096);
        let [small, large] = [4096, 5 * 4096].map(|bytes| allocate(&allocator, bytes).unwrap());
        allocator.release(&small);
        allocator.release(&large);
        // Twice as large at most: two pages do not take five.
        assert_eq!(allocate(&allocator, 2 * 4096).unwrap().offset, 6 * 4096);
        let four = allocate(&allocator, 3 * 4096 + 1).unwrap();
        assert_eq!((four.offset, four.len()), (large.offset, 3 * 4096 + 1));
        assert_eq!(allocate(&allocator, 100).unwrap().offset, small.offset);
        // Released as large as it was.
        allocator.release(&four);
        assert_eq!(allocate(&allocator, 5 * 4096).unwrap().offset, large.offset);
        assert_eq!(allocate(&allocator, 4096), Err(0));
    }
}
