//! Pauses while waiting for an event.

use std::thread;
use std::time::Duration;

/// Waits longer with each pause. An event that comes soon is noticed at once,
/// and a long wait does not take a core from ranks that compute.
#[derive(Debug, Default)]
pub(crate) struct Backoff {
    pauses: u32,
}

impl Backoff {
    /// The number of pauses that only yield.
    const YIELDS: u32 = 200;
    /// The longest pause in microseconds.
    const LONGEST: u32 = 500;

    /// Returns true from time to time in a wait of more than some milliseconds,
    /// to check for late ranks.
    pub(crate) fn is_long(&self) -> bool {
        self.pauses % Self::YIELDS == Self::YIELDS - 1
    }

    /// Pauses once.
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
