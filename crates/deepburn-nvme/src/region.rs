//! Regions of a swap file and their allocator.
//!
//! ```text
//! | region | released | region | region | released | region | never used ... |
//!                                                           ^ next           ^ bytes
//! ```
//!
//! A new region is placed at the start of the smallest released part that is large enough. If there
//! is none, the region starts at `next`.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The alignment of regions, requests and buffers, in bytes.
///
/// Direct I/O on current disks requires an alignment of 512 or 4096 bytes. The alignment is a
/// constant, so that callers can compute the total size of their regions before the file is
/// created. File systems with larger requirements are used without direct I/O.
pub const ALIGNMENT: usize = 4096;

/// Rounds up to the alignment.
pub(crate) fn padded(bytes: usize) -> u64 {
    // The result saturates far above the size of any disk, so such a request fails because of
    // insufficient space.
    (bytes as u64).div_ceil(ALIGNMENT as u64).saturating_mul(ALIGNMENT as u64)
}

/// A part of a swap file, reserved until it is [released](crate::SwapFile::release).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Region {
    /// The number of the file that contains the region.
    pub(crate) file: u64,
    /// Its offset in the file, in bytes.
    pub(crate) offset: u64,
    /// The length in bytes, without padding.
    bytes: usize,
    /// The number of bytes that the region occupies in the file, including padding.
    reserved: u64,
}

impl Region {
    /// Returns the length in bytes, without padding.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Returns true if the region has no bytes.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }
}

/// Allocates regions of a file, from released parts if possible and otherwise from the unused end
/// of the file.
#[derive(Debug)]
pub(crate) struct RegionAllocator {
    file: u64,
    /// The allocation state of the file.
    space: Mutex<Space>,
}

/// The used and released parts of a file.
#[derive(Debug)]
struct Space {
    /// The size of the file in bytes.
    bytes: u64,
    /// The end of the last part in use.
    next: u64,
    /// The released parts before `next`: lengths by offset. No two of them are adjacent.
    released: BTreeMap<u64, u64>,
}

impl RegionAllocator {
    /// Returns an allocator for a new file of `bytes` free bytes. Each allocator has a unique
    /// number, so that regions of other files can be detected.
    pub(crate) fn new(bytes: u64) -> Self {
        static FILES: AtomicU64 = AtomicU64::new(0);
        let file = FILES.fetch_add(1, Ordering::Relaxed);
        Self { file, space: Mutex::new(Space { bytes, next: 0, released: BTreeMap::new() }) }
    }

    /// Returns the number of the file within the process.
    pub(crate) fn file(&self) -> u64 {
        self.file
    }

    /// Returns the size of the file in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.lock().bytes
    }

    /// Reserves a region in the smallest released part that is large enough, or after all other
    /// regions. If the file is too small, calls `grow`, which returns the new size of the file.
    ///
    /// # Errors
    /// Returns the error of `grow`.
    pub(crate) fn allocate<E>(
        &self,
        bytes: usize,
        grow: impl FnOnce(Shortage) -> Result<u64, E>,
    ) -> Result<Region, E> {
        let needed = padded(bytes);
        let mut space = self.lock();
        if let Some(offset) = space.take_released(needed) {
            return Ok(Region { file: self.file, offset, bytes, reserved: needed });
        }
        let (offset, end) = (space.next, space.next.saturating_add(needed));
        if end > space.bytes {
            let left = space.bytes - offset;
            space.bytes = grow(Shortage { needed, left, bytes: space.bytes, end })?;
        }
        space.next = end;
        Ok(Region { file: self.file, offset, bytes, reserved: needed })
    }

    /// Releases a region. Empty regions occupy no part of the file.
    pub(crate) fn release(&self, region: &Region) {
        if region.reserved > 0 {
            self.lock().release(region.offset, region.reserved);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Space> {
        self.space.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The error for a region that does not fit in its file.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shortage {
    /// The size of the region in bytes.
    pub(crate) needed: u64,
    /// The number of bytes after the last region.
    pub(crate) left: u64,
    /// The size of the file in bytes.
    pub(crate) bytes: u64,
    /// The required size of the file in bytes.
    pub(crate) end: u64,
}

impl Space {
    /// Takes the first `needed` bytes of the smallest released part that is large enough, and
    /// returns their offset.
    fn take_released(&mut self, needed: u64) -> Option<u64> {
        let fitting = self.released.iter().filter(|(_, bytes)| **bytes >= needed);
        // Any part is large enough for an empty region, which occupies none.
        let (&offset, &bytes) = fitting.min_by_key(|(_, bytes)| **bytes).filter(|_| needed > 0)?;
        self.released.remove(&offset);
        if bytes > needed {
            self.released.insert(offset + needed, bytes - needed);
        }
        Some(offset)
    }

    /// Adds a released part and merges it with adjacent released parts.
    ///
    /// If sizes change from pass to pass, merging keeps the file close to the maximum amount of
    /// data at any one time. Without merging, the file would grow to the sum of all sizes.
    fn release(&mut self, mut offset: u64, mut bytes: u64) {
        if let Some((&before, &length)) = self.released.range(..offset).next_back()
            && before + length == offset
        {
            self.released.remove(&before);
            (offset, bytes) = (before, bytes + length);
        }
        if let Some(length) = self.released.remove(&(offset + bytes)) {
            bytes += length;
        }
        // The end of the file is not kept as a released part, so that the next region can have any
        // size there.
        if offset + bytes == self.next {
            self.next = offset;
        } else {
            self.released.insert(offset, bytes);
        }
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
    fn released_parts_join_and_are_used_again() {
        let allocator = RegionAllocator::new(8 * 4096);
        let pages = |count: usize| allocate(&allocator, count * 4096);
        let parts = [1, 2, 1, 3, 1].map(|count| pages(count).unwrap());
        assert_eq!(pages(1), Err(0));
        allocator.release(&parts[1]);
        allocator.release(&parts[3]);
        // The smallest part that is large enough is used first, then the rest of it.
        assert_eq!(pages(1).unwrap().offset, parts[1].offset);
        assert_eq!(allocate(&allocator, 100).unwrap().offset, parts[1].offset + 4096);
        // The part is merged with the released part after it.
        allocator.release(&parts[2]);
        let four = pages(4).unwrap();
        assert_eq!(four.offset, parts[2].offset);
        // Releasing the last region moves `next` back.
        allocator.release(&parts[4]);
        allocator.release(&four);
        assert_eq!(pages(5).unwrap().offset, parts[2].offset);
        assert_eq!(pages(1), Err(0));
    }

    /// Regions that grow from round to round only need the space of the largest round.
    #[test]
    fn growing_regions_use_released_parts() {
        let allocator = RegionAllocator::new(u64::MAX);
        for round in 1..200 {
            let regions: Vec<_> = (0..5)
                .map(|index| allocate(&allocator, (round * 7 + index) * 4096).unwrap())
                .collect();
            let end = regions.iter().map(|region| region.offset + region.reserved).max().unwrap();
            assert_eq!(end, (35 * round as u64 + 10) * 4096);
            regions.iter().rev().step_by(2).for_each(|region| allocator.release(region));
            regions.iter().rev().skip(1).step_by(2).for_each(|region| allocator.release(region));
        }
    }

    /// Live regions never overlap and never extend beyond the file.
    #[test]
    fn live_regions_never_overlap() {
        let mut random = 7_u64;
        let mut draw = |below: u64| {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) % below
        };
        let allocator = RegionAllocator::new(64 * 4096);
        let mut live: Vec<Region> = Vec::new();
        for _ in 0..20_000 {
            if draw(2) == 0 && !live.is_empty() {
                let index = draw(live.len() as u64) as usize;
                allocator.release(&live.swap_remove(index));
            } else if let Ok(region) = allocate(&allocator, draw(9 * 4096) as usize) {
                live.push(region);
            }
            let mut parts: Vec<_> = live.iter().map(|it| (it.offset, it.reserved)).collect();
            parts.retain(|(_, bytes)| *bytes > 0);
            parts.sort_unstable();
            assert!(parts.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0), "{parts:?}");
            assert!(parts.last().is_none_or(|(offset, bytes)| offset + bytes <= 64 * 4096));
        }
    }
}
