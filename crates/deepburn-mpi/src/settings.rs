//! The options of a run.

use std::time::Duration;

/// Options of the exchange of data.
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    /// The time that a rank waits for others before the run ends;
    /// `Duration::MAX` waits forever.
    pub timeout: Duration,
    /// The largest size of a message in bytes, at most 1 GiB.
    pub piece: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self { timeout: Duration::from_secs(30 * 60), piece: 1 << 30 }
    }
}
