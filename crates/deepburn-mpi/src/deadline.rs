//! The end of a wait.

use std::time::{Duration, Instant};

/// If two checks of a wait are further apart than this, this process is assumed to have been
/// suspended. The time in between does not count towards the time-out.
const SUSPENDED: Duration = Duration::from_millis(700);

/// The time at which a wait ends. A process that was suspended cannot conclude that other ranks are
/// late, so this time does not count.
#[derive(Debug)]
pub(crate) struct Deadline {
    /// The time of the last check.
    last: Instant,
    /// The time of the end; `None` for a wait without a time-out.
    end: Option<Instant>,
}

impl Deadline {
    /// Returns the end of a wait that may last `limit` from now.
    pub(crate) fn after(limit: Duration) -> Self {
        let last = Instant::now();
        // `Duration::MAX` gives no end.
        Self { last, end: last.checked_add(limit) }
    }

    /// Returns true if the wait has to end. Must be called frequently.
    pub(crate) fn has_passed(&mut self) -> bool {
        let now = Instant::now();
        let suspended = now - self.last;
        if suspended > SUSPENDED {
            self.end = self.end.and_then(|end| end.checked_add(suspended));
        }
        self.last = now;
        self.end.is_some_and(|end| end <= now)
    }
}
