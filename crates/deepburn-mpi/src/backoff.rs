//! Pauses between two looks at something that will happen.

use std::thread;
use std::time::Duration;

/// Waits a little longer each time: a rank that is almost there is met at once, one that computes
/// for long does not find its core taken by those that wait.
#[derive(Debug, Default)]
pub(crate) struct Backoff {
    pauses: u32,
}

impl Backoff {
    /// Pauses in which only the turn is given up.
    const YIELDS: u32 = 200;
    /// Longest pause in microseconds.
    const LONGEST: u32 = 500;

    /// Whether others may be late: true now and then in a wait of more than some milliseconds.
    pub(crate) fn is_long(&self) -> bool {
        self.pauses % Self::YIELDS == Self::YIELDS - 1
    }

    pub(crate) fn pause(&mut self) {
        self.pauses = self.pauses.saturating_add(1);
        match self.pauses.saturating_sub(Self::YIELDS) {
            0 => thread::yield_now(),
            pauses => {
                let micros = pauses.saturating_mul(10).min(Self::LONGEST);
                thread::sleep(Duration::from_micros(micros.into()));
            }
        }
    }
}
