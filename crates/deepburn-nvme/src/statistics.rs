//! Statistics about the transfers of a swap file.

use std::ops::Add;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The transferred bytes and the I/O times of a swap file since it was created.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct IoStatistics {
    /// The number of bytes read, including padding.
    pub bytes_read: u64,
    /// The number of bytes written, including padding. Writes wear out the disk.
    pub bytes_written: u64,
    /// The total time that callers were blocked in [`PendingIo::wait`](crate::PendingIo::wait) and
    /// [`SwapFile::wait_all`](crate::SwapFile::wait_all), summed over threads.
    pub waited: Duration,
    /// The total time that workers spent in reads and writes, summed over all workers.
    pub busy: Duration,
    /// The time during which at least one request was in progress. The bandwidth is the number of
    /// bytes divided by this time.
    pub active: Duration,
}

/// Adds the statistics of two files. Their times may overlap.
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

/// The total time that callers were blocked, in nanoseconds.
#[derive(Debug, Default)]
pub(crate) struct WaitClock(AtomicU64);

impl WaitClock {
    /// Adds the duration of a wait.
    pub(crate) fn add(&self, waited: Duration) {
        // A 64-bit number of nanoseconds overflows after 584 years.
        self.0.fetch_add(waited.as_nanos() as u64, Ordering::Relaxed);
    }

    /// Returns the sum of all waits.
    pub(crate) fn total(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::Relaxed))
    }
}
