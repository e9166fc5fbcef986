//! The process group of a simulated rank.
//!
//! Main type: [`SimulatedGroup`]. It advances the clocks by what collectives take and counts them.

use std::collections::BTreeMap;

use deepburn_comm::{Count, Operation};

use super::clock::{Clock, Started};
use super::{Machine, Network};

/// A collective.
#[derive(Debug, Clone, Copy)]
pub(super) struct Collective {
    pub(super) purpose: &'static str,
    pub(super) operation: Operation,
    pub(super) arrays: u64,
    /// Elements of the whole arrays, as [`Count`] has them.
    pub(super) elements: u64,
    /// Bytes that each rank contributes to a reduction.
    pub(super) sent: u64,
    /// Bytes of the whole arrays that come out.
    pub(super) result: u64,
}

impl Collective {
    /// A collective of dense arrays of `elements` elements in all, of so many bytes each.
    pub(super) fn dense(
        purpose: &'static str,
        operation: Operation,
        [arrays, elements]: [u64; 2],
        element_bytes: u64,
    ) -> Self {
        let bytes = elements.saturating_mul(element_bytes);
        Self { purpose, operation, arrays, elements, sent: bytes, result: bytes }
    }

    /// Bytes that a rank sends to others.
    fn bytes_sent(&self, ranks: u64) -> u64 {
        let whole = match self.operation {
            Operation::ReduceScatter(_) => self.sent,
            Operation::AllReduce(_) => self.sent.saturating_add(self.result),
            Operation::AllGather | Operation::AllToAll | Operation::Broadcast { .. } => self.result,
            Operation::Barrier => 0,
        };
        (whole as f64 * (ranks - 1) as f64 / ranks as f64).round() as u64
    }
}

/// The group as one of its ranks sees it.
pub(super) struct SimulatedGroup<'a> {
    pub(super) ranks: u64,
    pub(super) machine: Machine,
    pub(super) network: &'a Network,
    pub(super) clock: Clock,
    pub(super) counts: BTreeMap<&'static str, Count>,
    pub(super) bytes_sent: u64,
}

impl<'a> SimulatedGroup<'a> {
    pub(super) fn new(ranks: u64, machine: Machine, network: &'a Network) -> Self {
        let clock = Clock::new(network.overlaps());
        Self { ranks, machine, network, clock, counts: BTreeMap::new(), bytes_sent: 0 }
    }

    /// Starts a collective.
    pub(super) fn start(&mut self, collective: &Collective) -> Started {
        let count = self.counts.entry(collective.purpose).or_default();
        count.calls += 1;
        count.elements += collective.elements;
        let sent = collective.bytes_sent(self.ranks);
        self.bytes_sent = self.bytes_sent.saturating_add(sent);
        self.clock.start(self.network.seconds(collective, self.ranks, &self.machine))
    }

    /// Starts a collective and waits for it.
    pub(super) fn run(&mut self, collective: &Collective) {
        let started = self.start(collective);
        self.clock.wait(started);
    }

    /// Runs an op.
    pub(super) fn compute(&mut self, flops: u64, bytes: u64) {
        self.clock.compute(self.machine.seconds(flops, bytes));
    }
}
