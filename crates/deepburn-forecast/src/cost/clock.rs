//! The simulated clocks of a rank and its network link.
//!
//! Main type: `Clock`. A collective starts when the rank has requested it and the link is free:
//!
//! ```text
//! end  = max(now, link) + seconds      start
//! now  = max(now, end)                 wait, if collectives overlap
//! now += seconds                       wait, if they do not
//! ```
//!
//! All times are in seconds since the clock began.

/// The clocks of a rank and its link, in seconds. Collectives run one after the other on the link
/// while the rank computes or waits.
#[derive(Debug, Default)]
pub(super) struct Clock {
    /// Whether collectives run while the rank computes. Otherwise a collective runs on the rank's
    /// thread when the rank waits for it, as with rank threads.
    overlaps: bool,
    /// The current time of the rank.
    pub(super) now: f64,
    /// The time at which the link becomes free.
    link: f64,
    /// The total computation time.
    pub(super) compute: f64,
    /// The total time of transfers to and from host memory and the disk.
    pub(super) offload: f64,
    /// The total time of all collectives, including hidden ones.
    pub(super) communication: f64,
    /// The total time that the rank waited for collectives.
    pub(super) exposed: f64,
}

/// A started collective, which the rank has to wait for.
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

    /// Advances the rank by `seconds` of computation.
    pub(super) fn compute(&mut self, seconds: f64) {
        self.now += seconds;
        self.compute += seconds;
    }

    /// Advances the rank by `seconds` of transfers to or from host memory or the disk.
    pub(super) fn offload(&mut self, seconds: f64) {
        self.now += seconds;
        self.offload += seconds;
    }

    /// Starts a collective that takes `seconds`, after all collectives that are queued on the link.
    /// The rank does not wait.
    pub(super) fn start(&mut self, seconds: f64) -> Started {
        // A collective starts when it has been requested and all earlier collectives have ended.
        let end = self.now.max(self.link) + seconds;
        self.link = end;
        self.communication += seconds;
        Started { seconds, end }
    }

    /// Waits for the end of a collective. Takes no time if the collective has already ended.
    pub(super) fn wait(&mut self, started: Started) {
        let waited = match self.overlaps {
            true => (started.end - self.now).max(0.0),
            // Rank threads move the data themselves, while they wait.
            false => started.seconds,
        };
        self.now += waited;
        self.exposed += waited;
    }
}
