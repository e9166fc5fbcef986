//! The process group of a simulated rank.
//!
//! Main type: `SimulatedGroup`. It advances the clocks by the times of ops and
//! collectives, and counts collectives by purpose in the same way as the
//! statistics of a real group. A test compares the two.

use std::collections::BTreeMap;

use deepburn_comm::{Count, Operation};

use super::clock::{Clock, Started};
use super::{Machine, Network};

/// The size of a collective, over all arrays that it carries.
#[derive(Debug, Clone, Copy)]
pub(super) struct Collective {
    /// The name under which it is counted, the same as in the engine's tag.
    pub(super) purpose: &'static str,
    /// What the ranks do with the arrays.
    pub(super) operation: Operation,
    /// The number of arrays. Each costs a message per peer.
    pub(super) arrays: u64,
    /// The number of elements of the complete arrays, as in [`Count`].
    pub(super) elements: u64,
    /// The bytes that each rank contributes to a reduction.
    pub(super) sent: u64,
    /// The bytes of the complete result.
    pub(super) result: u64,
}

impl Collective {
    /// Creates a collective of dense arrays with `elements` elements in all,
    /// each of `element_bytes` bytes. Only the gradient of an embedding is not
    /// dense: its contribution is shorter than its result.
    pub(super) fn dense(
        purpose: &'static str,
        operation: Operation,
        [arrays, elements]: [u64; 2],
        element_bytes: u64,
    ) -> Self {
        let bytes = elements.saturating_mul(element_bytes);
        Self { purpose, operation, arrays, elements, sent: bytes, result: bytes }
    }

    /// Returns the bytes that a rank sends to others, `(ranks - 1) / ranks` of
    /// what the operation moves. An all-reduce is a reduce-scatter and an
    /// all-gather, so it moves both.
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
    /// The number of ranks.
    pub(super) ranks: u64,
    /// The speed of this rank.
    pub(super) machine: Machine,
    /// What connects the ranks.
    pub(super) network: &'a Network,
    /// The times of this rank and of its link.
    pub(super) clock: Clock,
    /// The collectives by purpose.
    pub(super) counts: BTreeMap<&'static str, Count>,
    /// The bytes that this rank has sent to others, without headers.
    pub(super) bytes_sent: u64,
}

impl<'a> SimulatedGroup<'a> {
    /// Creates a group at time 0.
    pub(super) fn new(ranks: u64, machine: Machine, network: &'a Network) -> Self {
        let clock = Clock::new(network.overlaps());
        Self { ranks, machine, network, clock, counts: BTreeMap::new(), bytes_sent: 0 }
    }

    /// Counts a collective and starts it on the link.
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

    /// Runs an op with `flops` floating-point operations that moves `bytes`
    /// bytes.
    pub(super) fn compute(&mut self, flops: u64, bytes: u64) {
        self.clock.compute(self.machine.seconds(flops, bytes));
    }
}
