//! Host memory that is suitable for direct I/O.
//!
//! Direct I/O transfers data between the disk and the memory of the process without a copy in the
//! page cache. The kernel requires the address, offset and length of a request to be multiples of
//! the disk's block size.

use std::fmt;
use std::slice;
use std::sync::Arc;

use bytemuck::Pod;
use memmap2::MmapRaw;

use crate::shelf::Shelf;
use crate::transfer_block::BlockMemory;

/// Aligned host memory. Dropping it returns the memory to its [`BufferPool`](crate::BufferPool).
///
/// It is aligned to pages, which is sufficient for direct I/O and for every element type.
pub struct AlignedBuffer {
    /// The mapping; `None` only while the buffer is dropped.
    memory: Option<MmapRaw>,
    /// The length in bytes, at most the length of the mapping.
    length: usize,
    /// The pool's store of idle memory, to which the mapping is returned.
    shelf: Arc<Shelf>,
}

impl AlignedBuffer {
    /// Returns a buffer of the first `length` bytes of `memory`.
    pub(crate) fn new(memory: MmapRaw, length: usize, shelf: Arc<Shelf>) -> Self {
        debug_assert!(length <= memory.len());
        Self { memory: Some(memory), length, shelf }
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Returns true if the length is 0.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Returns all bytes.
    #[allow(unsafe_code)]
    pub fn as_bytes(&self) -> &[u8] {
        // SAFETY: the mapping is readable, initialized by the system and at least `length` bytes
        // long. It lives as long as `self`. Workers only touch it while the queue owns the buffer.
        unsafe { slice::from_raw_parts(self.memory().as_ptr(), self.length) }
    }

    /// Returns all bytes as a mutable slice.
    #[allow(unsafe_code)]
    pub fn as_mut_bytes(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_bytes`; the mapping is writable and `self` is borrowed exclusively.
        unsafe { slice::from_raw_parts_mut(self.memory().as_mut_ptr(), self.length) }
    }

    /// Returns the buffer as a slice of elements, such as `f32` or `u16`. An incomplete element at
    /// the end is omitted.
    pub fn as_slice<T: Pod>(&self) -> &[T] {
        const { assert!(size_of::<T>() > 0 && align_of::<T>() <= crate::ALIGNMENT) };
        bytemuck::cast_slice(&self.as_bytes()[..self.length - self.length % size_of::<T>()])
    }

    /// Returns the buffer as a mutable slice of elements. An incomplete element at the end is
    /// omitted.
    pub fn as_mut_slice<T: Pod>(&mut self) -> &mut [T] {
        const { assert!(size_of::<T>() > 0 && align_of::<T>() <= crate::ALIGNMENT) };
        let whole = self.length - self.length % size_of::<T>();
        bytemuck::cast_slice_mut(&mut self.as_mut_bytes()[..whole])
    }

    /// Returns the length rounded up to the alignment, which is the number of bytes that the disk
    /// transfers. The mapping is never smaller.
    pub(crate) fn padded_len(&self) -> usize {
        self.length.next_multiple_of(crate::ALIGNMENT)
    }

    /// Returns the memory of a block that starts at byte `start` of the padded length.
    ///
    /// # Panics
    /// Panics if the block extends beyond the mapping.
    pub(crate) fn block(&self, start: usize, length: usize) -> BlockMemory {
        assert!(start + length <= self.memory().len(), "a block lies in its buffer");
        BlockMemory::new(self.memory().as_mut_ptr().wrapping_add(start), length)
    }

    /// Returns the mapping.
    fn memory(&self) -> &MmapRaw {
        self.memory.as_ref().expect("only drop takes the memory")
    }
}

impl Drop for AlignedBuffer {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            self.shelf.put_back(memory);
        }
    }
}

impl fmt::Debug for AlignedBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AlignedBuffer").field("length", &self.length).finish_non_exhaustive()
    }
}
