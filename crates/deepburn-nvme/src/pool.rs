//! The buffers of a swap file.
//!
//! ```text
//! length                 size class (64 KiB and up)
//! 65,537 .. 81,920       81,920      1.25 * 64 KiB
//! 81,921 .. 98,304       98,304      1.5
//! 98,305 .. 114,688      114,688     1.75
//! 114,689 .. 131,072     131,072     2
//! ```

use std::fmt;
use std::sync::{Arc, MutexGuard};

use memmap2::{Advice, MmapMut, MmapRaw};

use crate::shelf::{IdleMemory, Shelf};
use crate::{ALIGNMENT, AlignedBuffer, SwapError};

/// The minimum size in bytes of buffers for which huge pages are requested.
const HUGE_PAGE: usize = 2 << 20;

/// A pool that allocates buffers and reuses the memory of dropped buffers.
///
/// A request is served by the smallest idle buffer that is large enough and at most twice as large
/// as needed. The size of new memory is rounded up to one of four size classes per power of two, so
/// that arrays of similar sizes can share buffers. A loop that repeats the same sizes allocates no
/// memory after its first iterations. Clones share their buffers.
///
/// Buffers of 2 MiB or more use huge pages if they are enabled (`always` or `madvise` in
/// `/sys/kernel/mm/transparent_hugepage/enabled`). Huge pages make direct I/O faster, because fewer
/// pages are pinned.
#[derive(Clone, Default)]
pub struct BufferPool {
    /// The idle memory, shared by clones.
    shelf: Arc<Shelf>,
}

impl BufferPool {
    /// Returns an empty pool.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns a buffer of `length` zero bytes.
    ///
    /// # Errors
    /// Returns an error if the system has no memory left.
    pub fn zeroed(&self, length: usize) -> Result<AlignedBuffer, SwapError> {
        let (mut buffer, is_new) = self.take(length)?;
        if !is_new {
            buffer.as_mut_bytes().fill(0);
        }
        Ok(buffer)
    }

    /// Returns a buffer of `length` bytes that the caller must overwrite. It contains zeros or data
    /// from an earlier use.
    ///
    /// # Errors
    /// Returns an error if the system has no memory left.
    pub fn unfilled(&self, length: usize) -> Result<AlignedBuffer, SwapError> {
        self.take(length).map(|(buffer, _)| buffer)
    }

    /// Returns the total size of all buffers in bytes, idle or in use.
    pub fn held_bytes(&self) -> usize {
        self.lock().held_bytes
    }

    /// Returns the total size of idle buffers in bytes.
    pub fn idle_bytes(&self) -> usize {
        self.lock().idle_bytes
    }

    /// Returns the memory of all idle buffers to the system.
    pub fn release_idle(&self) {
        let mut shelf = self.lock();
        shelf.held_bytes -= shelf.idle_bytes;
        shelf.idle_bytes = 0;
        shelf.idle.clear();
    }

    /// Returns a buffer, and whether its memory is new and therefore zero.
    ///
    /// # Errors
    /// Returns an error if the system has no memory left.
    fn take(&self, length: usize) -> Result<(AlignedBuffer, bool), SwapError> {
        let mut shelf = self.lock();
        let out_of_memory = |held| SwapError::OutOfMemory { bytes: length, held };
        let size = size_class(length).ok_or_else(|| out_of_memory(shelf.held_bytes))?;
        let (memory, is_new) = match shelf.take_idle(size) {
            Some(memory) => (memory, false),
            None => {
                let memory = allocate(size).ok_or_else(|| out_of_memory(shelf.held_bytes))?;
                shelf.held_bytes += size;
                (memory, true)
            }
        };
        drop(shelf);
        Ok((AlignedBuffer::new(memory, length, self.shelf.clone()), is_new))
    }

    fn lock(&self) -> MutexGuard<'_, IdleMemory> {
        self.shelf.lock()
    }
}

/// Returns `length` rounded up to one of four size classes per power of two, and to the alignment.
/// Returns `None` if the result overflows.
fn size_class(length: usize) -> Option<usize> {
    let step = length.checked_next_power_of_two()? / 8;
    length.max(1).checked_next_multiple_of(step.max(ALIGNMENT))
}

/// Allocates zeroed memory; returns `None` if the system has no memory left.
fn allocate(size: usize) -> Option<MmapRaw> {
    let memory = MmapMut::map_anon(size).ok()?;
    if size >= HUGE_PAGE {
        // Direct I/O pins every page of a request, so fewer, larger pages are faster. This call is
        // only a hint, and its error on a system without huge pages is ignored.
        let _ = memory.advise(Advice::HugePage);
    }
    Some(memory.into())
}

impl fmt::Debug for BufferPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shelf = self.lock();
        f.debug_struct("BufferPool")
            .field("held_bytes", &shelf.held_bytes)
            .field("idle_bytes", &shelf.idle_bytes)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_steady_state_allocates_nothing() {
        let pool = BufferPool::new();
        let sizes = [1, 4096, 100_000, 120_000, 5_000_000, 0, 3];
        let round = || {
            let held: Vec<AlignedBuffer> =
                sizes.iter().map(|&size| pool.zeroed(size).unwrap()).collect();
            drop(held);
            pool.held_bytes()
        };
        let first = round();
        assert!((0..10).all(|_| round() == first));
        assert_eq!(pool.idle_bytes(), first);
        pool.release_idle();
        assert_eq!((pool.held_bytes(), pool.idle_bytes()), (0, 0));
    }

    #[test]
    fn buffers_are_zeroed_aligned_and_typed() {
        let pool = BufferPool::new();
        for length in [0, 7, 4096, 3 << 20] {
            let mut buffer = pool.zeroed(length).unwrap();
            assert!(buffer.as_bytes().len() == length && buffer.len() == length);
            assert!(buffer.as_bytes().iter().all(|&byte| byte == 0));
            assert_eq!(buffer.as_bytes().as_ptr() as usize % ALIGNMENT, 0);
            buffer.as_mut_slice::<f32>().fill(1.0);
            assert_eq!(buffer.as_slice::<f64>().len(), length / 8);
            assert_eq!(buffer.as_slice::<u16>().len(), length / 2);
            buffer.as_mut_bytes().fill(0xff);
        }
        assert!(matches!(pool.zeroed(usize::MAX), Err(SwapError::OutOfMemory { .. })));
        assert!(matches!(pool.zeroed(1 << 60), Err(SwapError::OutOfMemory { .. })));
    }

    #[test]
    fn size_classes_waste_at_most_a_quarter_above_small_sizes() {
        for length in (1..200).map(|step| step * 123_457) {
            let size = size_class(length).unwrap();
            assert!(size >= length && size.is_multiple_of(ALIGNMENT));
            assert!(size <= length + length / 4 + ALIGNMENT, "{length} -> {size}");
        }
        assert_eq!(size_class(16 << 20), Some(16 << 20));
    }
}
