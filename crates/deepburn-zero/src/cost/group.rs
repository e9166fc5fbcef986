//! The process group of a simulated rank.
//!
//! Main type: `SimulatedGroup`. It advances the clocks by the times of ops and
//! collectives, and counts collectives by purpose, like the statistics of a
//! real group. A test compares the counts with a real group.

use std::collections::BTreeMap;

use deepburn_comm::Count;

use super::clock::{Clock, Started};
use super::collective::Collective;
use super::{Network, RankSpeed};

/// A simulated process group from the view of one rank.
pub(super) struct SimulatedGroup<'a> {
    /// The number of ranks.
    pub(super) ranks: u64,
    /// The speed of this rank.
    pub(super) speed: RankSpeed,
    /// The network between the ranks.
    pub(super) network: &'a Network,
    /// The clocks of this rank and its link.
    pub(super) clock: Clock,
    /// The collectives by purpose.
    pub(super) counts: BTreeMap<&'static str, Count>,
    /// The bytes that this rank has sent to others, without headers.
    pub(super) bytes_sent: u64,
}

impl<'a> SimulatedGroup<'a> {
    /// Creates a group at time 0.
    pub(super) fn new(ranks: u64, speed: RankSpeed, network: &'a Network) -> Self {
        let clock = Clock::new(network.overlaps());
        Self { ranks, speed, network, clock, counts: BTreeMap::new(), bytes_sent: 0 }
    }

    /// Counts a collective and starts it on the link.
    pub(super) fn start(&mut self, collective: &Collective) -> Started {
        let count = self.counts.entry(collective.purpose).or_default();
        count.calls += 1;
        count.elements += collective.elements;
        let sent = collective.bytes_sent(self.ranks);
        self.bytes_sent = self.bytes_sent.saturating_add(sent);
        self.clock.start(self.network.seconds(collective, self.ranks, &self.speed))
    }

    /// Starts a collective and waits for it.
    pub(super) fn run(&mut self, collective: &Collective) {
        let started = self.start(collective);
        self.clock.wait(started);
    }

    /// Runs an op with `flops` floating-point operations that moves `bytes`
    /// bytes.
    pub(super) fn compute(&mut self, flops: u64, bytes: u64) {
        self.clock.compute(self.speed.seconds(flops, bytes));
    }
}
