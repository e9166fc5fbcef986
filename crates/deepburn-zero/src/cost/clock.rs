//! The times of a rank and of its link.

/// Two clocks in seconds. Collectives run one after the other on the link, while the rank computes or waits.
#[derive(Debug, Default)]
pub(super) struct Clock {
    /// Whether collectives run while the rank computes; otherwise it runs them itself while it waits.
    overlaps: bool,
    /// Seconds since the clock began.
    pub(super) now: f64,
    /// When the link is free.
    link: f64,
    /// Seconds of computation.
    pub(super) compute: f64,
    /// Seconds of collectives.
    pub(super) communication: f64,
    /// Seconds in which the rank waited for collectives.
    pub(super) exposed: f64,
}

/// A collective that was started.
#[derive(Debug, Clone, Copy)]
#[must_use]
pub(super) struct Started {
    seconds: f64,
    end: f64,
}

impl Clock {
    pub(super) fn new(overlaps: bool) -> Self {
        Self { overlaps, ..Self::default() }
    }

    pub(super) fn compute(&mut self, seconds: f64) {
        self.now += seconds;
        self.compute += seconds;
    }

    pub(super) fn start(&mut self, seconds: f64) -> Started {
        let end = self.now.max(self.link) + seconds;
        self.link = end;
        self.communication += seconds;
        Started { seconds, end }
    }

    pub(super) fn wait(&mut self, started: Started) {
        let waited = match self.overlaps {
            true => (started.end - self.now).max(0.0),
            false => started.seconds,
        };
        self.now += waited;
        self.exposed += waited;
    }
}
