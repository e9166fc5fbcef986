//! The idle memory of a pool, to which buffers return.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use memmap2::MmapRaw;

/// The place to which the memory of dropped buffers returns.
#[derive(Default)]
pub(crate) struct Shelf(Mutex<IdleMemory>);

/// The idle memory by size, and totals.
#[derive(Default)]
pub(crate) struct IdleMemory {
    /// Idle mappings by their size in bytes.
    pub(crate) idle: BTreeMap<usize, Vec<MmapRaw>>,
    /// The bytes of idle mappings.
    pub(crate) idle_bytes: usize,
    /// The bytes of all mappings, idle or in use.
    pub(crate) held_bytes: usize,
}

impl Shelf {
    /// Keeps the memory of a dropped buffer.
    pub(crate) fn put_back(&self, memory: MmapRaw) {
        let mut shelf = self.lock();
        shelf.idle_bytes += memory.len();
        shelf.idle.entry(memory.len()).or_default().push(memory);
    }

    /// Locks the idle memory. A panic of another holder leaves it valid.
    pub(crate) fn lock(&self) -> MutexGuard<'_, IdleMemory> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl IdleMemory {
    /// Takes the smallest idle mapping of `size` to twice `size` bytes.
    pub(crate) fn take_idle(&mut self, size: usize) -> Option<MmapRaw> {
        // The smallest size that is large enough; at most twice the size, so that little memory is
        // wasted.
        let (&found, stack) = self.idle.range_mut(size..=size.saturating_mul(2)).next()?;
        let memory = stack.pop()?;
        if stack.is_empty() {
            self.idle.remove(&found);
        }
        self.idle_bytes -= found;
        Some(memory)
    }
}
