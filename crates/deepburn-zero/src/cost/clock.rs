//! The times of a rank and of its link.
//!
//! Main type: `Clock`. A collective starts when it is asked for and the link is
//! free, and takes its time on the link:
//!
//! ```text
//! end  = max(now, link) + seconds      start
//! now  = max(now, end)                 wait, if collectives overlap
//! now += seconds                       wait, if they do not
//! ```
//!
//! All times are in seconds since the clock began.

/// Two clocks in seconds. Collectives run one after the other on the link, while the rank computes or waits.
#[derive(Debug, Default)]
pub(super) struct Clock {
    /// Whether collectives run while the rank computes. Otherwise the rank runs
    /// them itself when it waits for them, as rank threads do.
    overlaps: bool,
    /// The time of the rank.
    pub(super) now: f64,
    /// The time from which on the link is free.
    link: f64,
    /// The sum of computation.
    pub(super) compute: f64,
    /// The sum of all collectives, hidden ones included.
    pub(super) communication: f64,
    /// The sum of the times in which the rank waited for collectives.
    pub(super) exposed: f64,
}

/// A collective that was started and has to be waited for.
#[derive(Debug, Clone, Copy)]
#[must_use]
pub(super) struct Started {
    /// Its duration.
    seconds: f64,
    /// The time at which it ends on the link.
    end: f64,
}

impl Clock {
    /// Creates a clock at time 0 with a free link.
    pub(super) fn new(overlaps: bool) -> Self {
        Self { overlaps, ..Self::default() }
    }

    /// Computes for `seconds`.
    pub(super) fn compute(&mut self, seconds: f64) {
        self.now += seconds;
        self.compute += seconds;
    }

    /// Starts a collective of `seconds` behind the collectives that the link
    /// still runs. The rank does not wait.
    pub(super) fn start(&mut self, seconds: f64) -> Started {
        // A collective can start neither before it is asked for nor before the
        // ones ahead of it have ended.
        let end = self.now.max(self.link) + seconds;
        self.link = end;
        self.communication += seconds;
        Started { seconds, end }
    }

    /// Waits for the end of a collective. Takes no time if it ended earlier.
    pub(super) fn wait(&mut self, started: Started) {
        let waited = match self.overlaps {
            true => (started.end - self.now).max(0.0),
            false => started.seconds,
        };
        self.now += waited;
        self.exposed += waited;
    }
}
