//! The bytes that a swap file has transferred, and the time that it took.

use std::ops::Add;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Bytes and times of a swap file since it was created.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct IoStatistics {
    /// The bytes that were read, with padding.
    pub bytes_read: u64,
    /// The bytes that were written, with padding. They wear the disk.
    pub bytes_written: u64,
    /// The time that callers were blocked in [`PendingIo::wait`](crate::PendingIo::wait) and
    /// [`SwapFile::wait_all`](crate::SwapFile::wait_all), summed over threads.
    pub waited: Duration,
    /// The time that workers spent in reads and writes, summed over workers.
    pub busy: Duration,
    /// The time during which at least one request was in progress. Bytes divided by this time are
    /// the bandwidth.
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

/// The sum of the times that callers were blocked, in nanoseconds.
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
