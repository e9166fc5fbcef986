//! What a rank does in a training step, in order: ops, collectives, messages, and waits.
//!
//! Main type: [`Timeline`]. A dry run records it, and the [cost model](crate::cost) replays it. The
//! dry runs of pipeline stages share [`MessageNumbers`], so that sender and receiver of a message
//! give it the same number.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use deepburn_comm::{GroupEvent, MessageRoute, Operation};
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
    /// The rank sends a message, and does not wait.
    Send {
        /// The number of the message.
        message: u64,
        /// The world rank of the receiver.
        to: u64,
        /// The bytes of its arrays.
        bytes: u64,
    },
    /// The rank waits for a message.
    Receive {
        /// The number of the message.
        message: u64,
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

/// Numbers messages by their routes. Clones share the numbers.
#[derive(Debug, Clone, Default)]
pub(crate) struct MessageNumbers(Arc<Mutex<HashMap<MessageRoute, u64>>>);

impl MessageNumbers {
    /// Returns the number of the messages with this route.
    fn of(&self, route: &MessageRoute) -> u64 {
        let mut numbers = locked(&self.0);
        let next = numbers.len() as u64;
        *numbers.entry(route.clone()).or_insert(next)
    }
}

/// Collects events. Clones collect into the same list.
#[derive(Debug, Clone, Default)]
pub(crate) struct Recorder {
    events: Arc<Mutex<Vec<RankEvent>>>,
    messages: MessageNumbers,
}

impl Recorder {
    /// Creates a recorder without events, whose messages have these numbers.
    pub(crate) fn new(messages: MessageNumbers) -> Self {
        Self { events: Arc::default(), messages }
    }

    /// Adds an op.
    pub(crate) fn compute(&self, work: Work) {
        // Views, and ops on no elements.
        if work != Work::default() {
            self.add(RankEvent::Compute(work));
        }
    }

    /// Adds a call of the process group.
    pub(crate) fn group(&self, event: GroupEvent<'_>) {
        self.add(match event {
            GroupEvent::Start {
                number, operation, members, arrays, contributed, complete, ..
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
            GroupEvent::Send { route, bytes } => {
                RankEvent::Send { message: self.messages.of(route), to: route.to as u64, bytes }
            }
            GroupEvent::Receive { route } => {
                RankEvent::Receive { message: self.messages.of(route) }
            }
        });
    }

    /// Returns the events since the last call.
    pub(crate) fn take(&self) -> Vec<RankEvent> {
        std::mem::take(&mut *locked(&self.events))
    }

    fn add(&self, event: RankEvent) {
        locked(&self.events).push(event);
    }
}

/// Locks a list or map. A panic leaves it valid, because each change is a single insertion.
fn locked<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}
