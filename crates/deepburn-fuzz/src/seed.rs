//! The seed of the input that runs now.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The seed of the current input.
static SEED: AtomicU64 = AtomicU64::new(0);

/// Sets the seed of the input that runs next.
pub(crate) fn set_current_seed(seed: u64) {
    SEED.store(seed, Relaxed);
}

/// Returns the seed of the current input.
pub(crate) fn current_seed() -> u64 {
    SEED.load(Relaxed)
}
