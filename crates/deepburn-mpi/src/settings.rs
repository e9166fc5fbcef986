//! The options of a run.

use std::time::Duration;

/// Options for the exchange of data.
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    /// The maximum time that a rank waits for other ranks before the run fails. With
    /// `Duration::MAX` a rank waits forever.
    pub timeout: Duration,
    /// The maximum message size in bytes, at most 1 GiB.
    pub piece: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self { timeout: Duration::from_secs(30 * 60), piece: 1 << 30 }
    }
}
