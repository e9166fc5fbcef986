//! Increasing pauses while waiting for an event.

use std::thread;
use std::time::Duration;

/// A back-off with increasing pauses. An event that occurs soon is detected immediately, and a long
/// wait does not occupy a core that computing ranks could use.
#[derive(Debug, Default)]
pub(crate) struct Backoff {
    pauses: u32,
}

impl Backoff {
    /// The number of pauses that only yield.
    const YIELDS: u32 = 200;
    /// The longest pause in microseconds.
    const LONGEST: u32 = 500;

    /// Returns true at intervals once a wait has lasted several milliseconds. The caller then
    /// checks for late ranks.
    pub(crate) fn is_long(&self) -> bool {
        self.pauses % Self::YIELDS == Self::YIELDS - 1
    }

    /// Pauses once.
    pub(crate) fn pause(&mut self) {
        self.pauses = self.pauses.saturating_add(1);
        match self.pauses.saturating_sub(Self::YIELDS) {
            // A message from this host arrives within microseconds, before a sleep would end.
            0 => thread::yield_now(),
            pauses => {
                let micros = pauses.saturating_mul(10).min(Self::LONGEST);
                thread::sleep(Duration::from_micros(micros.into()));
            }
        }
    }
}
