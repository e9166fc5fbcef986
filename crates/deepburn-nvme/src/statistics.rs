//! What a swap file has transferred, and how long that took.

use std::ops::Add;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Bytes and times of a swap file since it was created.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct IoStatistics {
    /// Bytes read, with padding.
    pub bytes_read: u64,
    /// Bytes written, with padding. The wear of the disk.
    pub bytes_written: u64,
    /// How long callers were blocked in [`PendingIo::wait`](crate::PendingIo::wait) and
    /// [`SwapFile::wait_all`](crate::SwapFile::wait_all), summed over threads.
    pub waited: Duration,
    /// How long workers spent in reads and writes, summed over workers.
    pub busy: Duration,
    /// How long at least one request was in progress. Bytes per second of this is the bandwidth.
    pub active: Duration,
}

/// The sum over two files. Their times may overlap.
impl Add for IoStatistics {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            bytes_read: self.bytes_read + other.bytes_read,
            bytes_written: self.bytes_written + other.bytes_written,
            waited: self.waited + other.waited,
            busy: self.busy + other.busy,
            active: self.active + other.active,
        }
    }
}

/// Adds up how long callers are blocked.
#[derive(Debug, Default)]
pub(crate) struct WaitClock(AtomicU64);

impl WaitClock {
    /// Adds one wait.
    pub(crate) fn add(&self, waited: Duration) {
        // 64 bits of nanoseconds last for 584 years.
        self.0.fetch_add(waited.as_nanos() as u64, Ordering::Relaxed);
    }

    /// The sum of all waits.
    pub(crate) fn total(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::Relaxed))
    }
}
