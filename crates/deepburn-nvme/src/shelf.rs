//! The idle memory of a buffer pool.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use memmap2::MmapRaw;

/// The store for the memory of dropped buffers.
#[derive(Default)]
pub(crate) struct Shelf(Mutex<IdleMemory>);

/// Idle memory by size, and total sizes.
#[derive(Default)]
pub(crate) struct IdleMemory {
    /// Idle mappings by their size in bytes.
    pub(crate) idle: BTreeMap<usize, Vec<MmapRaw>>,
    /// The total size of idle mappings in bytes.
    pub(crate) idle_bytes: usize,
    /// The total size of all mappings in bytes, idle or in use.
    pub(crate) held_bytes: usize,
}

impl Shelf {
    /// Stores the memory of a dropped buffer.
    pub(crate) fn put_back(&self, memory: MmapRaw) {
        let mut shelf = self.lock();
        shelf.idle_bytes += memory.len();
        shelf.idle.entry(memory.len()).or_default().push(memory);
    }

    /// Locks the idle memory. It is valid even if another thread panicked while it held the lock.
    pub(crate) fn lock(&self) -> MutexGuard<'_, IdleMemory> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl IdleMemory {
    /// Takes the smallest idle mapping with at least `size` and at most `2 * size` bytes.
    pub(crate) fn take_idle(&mut self, size: usize) -> Option<MmapRaw> {
        // The size is limited to twice the requested size, so that little memory is wasted.
        let (&found, stack) = self.idle.range_mut(size..=size.saturating_mul(2)).next()?;
        let memory = stack.pop()?;
        if stack.is_empty() {
            self.idle.remove(&found);
        }
        self.idle_bytes -= found;
        Some(memory)
    }
}
