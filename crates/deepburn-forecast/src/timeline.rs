//! What a rank does in a training step, in order: ops, collectives, and waits for collectives.
//!
//! Main type: [`Timeline`]. A dry run records it, and the [cost model](crate::cost) replays it.

use std::sync::{Arc, Mutex, PoisonError};

use deepburn_comm::{GroupEvent, Operation};
use deepburn_meta::Work;

/// An event of a rank.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum RankEvent {
    /// The rank computes an op.
    Compute(Work),
    /// The rank starts a collective.
    Start {
        /// The number of the collective.
        number: u64,
        /// Its operation and size.
        collective: Collective,
        /// The number of ranks of its group.
        ranks: u64,
    },
    /// The rank waits for the collective with this number.
    Wait {
        /// The number that the collective had at its start.
        number: u64,
    },
}

/// The operation and the size of a collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Collective {
    /// The operation on the arrays.
    pub(crate) operation: Operation,
    /// The number of arrays. Each array needs one message per peer.
    pub(crate) arrays: u64,
    /// The bytes that each rank contributes to a reduction.
    pub(crate) contributed: u64,
    /// The bytes of the complete arrays.
    pub(crate) complete: u64,
    /// The distance between the rank numbers of neighbors in the group.
    pub(crate) stride: u64,
}

impl Collective {
    /// Returns the bytes that a rank sends to other ranks: `(ranks - 1) / ranks` of the operation's
    /// bytes. An all-reduce consists of a reduce-scatter and an all-gather, so the bytes of both
    /// are added.
    pub(crate) fn bytes_sent(&self, ranks: u64) -> u64 {
        let whole = match self.operation {
            Operation::ReduceScatter(_) => self.contributed,
            Operation::AllReduce(_) => self.contributed.saturating_add(self.complete),
            Operation::AllGather | Operation::AllToAll | Operation::Broadcast { .. } => {
                self.complete
            }
            Operation::Barrier => 0,
        };
        // Of `p` parts, a rank sends those that belong to others, or its own part to all others.
        // Both are (p - 1) / p of the whole.
        (whole as f64 * (ranks - 1) as f64 / ranks as f64).round() as u64
    }
}

/// The events of a training step.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Timeline {
    /// The parts of the step in order. All micro-batches between the first and the last one are
    /// alike, so they are one part that is repeated.
    pub(crate) parts: Vec<Stretch>,
}

/// Consecutive events that occur one or more times.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Stretch {
    /// The events in order. Every collective that is started in a part is awaited in it.
    pub(crate) events: Vec<RankEvent>,
    /// How often the events occur.
    pub(crate) times: u64,
}

/// Collects events. Clones collect into the same list.
#[derive(Debug, Clone, Default)]
pub(crate) struct Recorder(Arc<Mutex<Vec<RankEvent>>>);

impl Recorder {
    /// Adds an op.
    pub(crate) fn compute(&self, work: Work) {
        // Views, and ops on no elements.
        if work != Work::default() {
            self.add(RankEvent::Compute(work));
        }
    }

    /// Adds a call of the process group.
    pub(crate) fn collective(&self, event: GroupEvent<'_>) {
        self.add(match event {
            GroupEvent::Start {
                number,
                operation,
                members,
                arrays,
                contributed,
                complete,
                ..
            } => {
                // The members of a group are evenly spaced: 1 apart if they are neighbors, and more
                // if the group has one rank of each machine or stage.
                let stride = match members {
                    [first, second, ..] => second.abs_diff(*first) as u64,
                    _ => 1,
                };
                let collective = Collective { operation, arrays, contributed, complete, stride };
                RankEvent::Start { number, collective, ranks: members.len() as u64 }
            }
            GroupEvent::Wait { number } => RankEvent::Wait { number },
            // Messages to other pipeline stages have no time yet.
            GroupEvent::Send { .. } | GroupEvent::Receive { .. } => return,
        });
    }

    /// Returns the events since the last call.
    pub(crate) fn take(&self) -> Vec<RankEvent> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn add(&self, event: RankEvent) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(event);
    }
}
