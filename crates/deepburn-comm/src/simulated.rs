//! The process group of a dry run: one rank of any world, without the other ranks.
//!
//! Main type: [`SimulatedGroup`]. It moves nothing. Each collective returns the result that it
//! would have if all ranks passed the same arrays, and is counted like a collective of the other
//! engines. A received message has the arrays that the receiver names as like it.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::{
    CommError, GroupRanks, MessageDirection, MessageRoute, MessageTag, Operation, Partition,
    Pending, ProcessGroup, SharedPayload, Side, Statistics, Subgroup,
};

/// A call that an observer of a [`SimulatedGroup`] sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GroupEvent<'a> {
    /// The rank sends a message, and does not wait until it arrives.
    Send {
        /// The sender, the receiver and the tag of the message.
        route: &'a MessageRoute,
        /// The bytes of its arrays.
        bytes: u64,
    },
    /// The rank waits for a message.
    Receive {
        /// The sender, the receiver and the tag of the message.
        route: &'a MessageRoute,
    },
    /// The rank starts a collective.
    Start {
        /// The number of the collective, counted from 0.
        number: u64,
        /// The operation.
        operation: Operation,
        /// What the collective is for: the purpose of its tag.
        purpose: &'a str,
        /// The world ranks of the group that runs it.
        members: &'a [usize],
        /// The number of arrays.
        arrays: u64,
        /// The bytes that this rank contributes to a reduction.
        contributed: u64,
        /// The bytes of the complete arrays.
        complete: u64,
    },
    /// The rank waits for the collective with this number.
    Wait {
        /// The number that the collective had at its start.
        number: u64,
    },
}

/// One rank of a group whose other ranks do not exist. Clones and subgroups share the counts.
#[derive(Debug, Clone)]
pub struct SimulatedGroup {
    ranks: GroupRanks,
    shared: Arc<Mutex<GroupState>>,
    observer: EventHandler,
}

/// The state that clones and subgroups share.
#[derive(Debug, Default)]
struct GroupState {
    statistics: Statistics,
    /// The number of collectives started.
    started: u64,
    /// The number of subgroups created with each name.
    subgroups: HashMap<&'static str, u32>,
    /// The cause of the first [`abort`](ProcessGroup::abort).
    failure: Option<CommError>,
}

impl GroupState {
    /// Checks that the group has not been aborted.
    fn check(&self) -> Result<(), CommError> {
        self.failure.clone().map_or(Ok(()), Err)
    }
}

/// A function that is called with each event.
#[derive(Clone)]
struct EventHandler(Arc<dyn Fn(GroupEvent<'_>) + Send + Sync>);

impl fmt::Debug for EventHandler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("EventHandler")
    }
}

impl SimulatedGroup {
    /// Returns rank `rank` of `world_size`.
    ///
    /// # Errors
    /// Returns an error if the group has no ranks.
    ///
    /// # Panics
    /// Panics if `rank` is not below `world_size`.
    pub fn new(rank: usize, world_size: usize) -> Result<Self, CommError> {
        if world_size == 0 {
            return Err(CommError::NoRanks);
        }
        assert!(rank < world_size, "rank {rank} does not exist in a group of {world_size}");
        Ok(Self {
            // Nothing runs for the other ranks, so a dry run may have thousands of them.
            ranks: GroupRanks::world(rank, world_size),
            shared: Arc::default(),
            observer: EventHandler(Arc::new(|_| {})),
        })
    }

    /// Calls `observe` with each collective that this handle and its later clones start or wait
    /// for, and with each message that they send or wait for.
    #[must_use]
    pub fn observed(self, observe: impl Fn(GroupEvent<'_>) + Send + Sync + 'static) -> Self {
        Self { observer: EventHandler(Arc::new(observe)), ..self }
    }

    /// Returns the ranks of the group.
    pub fn ranks(&self) -> &GroupRanks {
        &self.ranks
    }

    /// Returns the counts of the collectives and messages that would have been started, in all
    /// groups.
    pub fn statistics(&self) -> Statistics {
        self.shared().statistics.clone()
    }

    /// Counts a message of `bytes` between this rank and rank `peer` of the group. Returns its
    /// route.
    fn count_message(
        &self,
        direction: MessageDirection,
        peer: usize,
        tag: MessageTag,
        bytes: usize,
    ) -> Result<MessageRoute, CommError> {
        let route = MessageRoute::new(&self.ranks, direction, peer, tag)?;
        let mut shared = self.shared();
        shared.check()?;
        shared.statistics.record_message(direction, &route.tag, bytes);
        Ok(route)
    }

    /// Returns the result that the operation has if all ranks pass `array`. The complete array has
    /// `numel` elements.
    fn result<T: SharedPayload>(&self, operation: Operation, array: &T, numel: usize) -> T {
        let (rank, world_size) = (self.ranks.rank(), self.ranks.len());
        let partition = Partition::new(numel, world_size);
        let part = || array.part(partition.owned(rank));
        match operation {
            // A part is flat, as are the results of the other engines.
            Operation::AllReduce(op) => array.part(0..numel).reduce_alike(world_size, numel, op),
            Operation::ReduceScatter(op) => {
                part().reduce_alike(world_size, partition.shard_len(), op)
            }
            Operation::AllGather => array.concat_alike(world_size, numel),
            Operation::AllToAll => {
                part().concat_alike(world_size, partition.owned(rank).len() * world_size)
            }
            Operation::Broadcast { .. } | Operation::Barrier => array.clone(),
        }
    }

    /// Locks the shared state. A panic leaves it valid, because each change is a single assignment
    /// or addition.
    fn shared(&self) -> MutexGuard<'_, GroupState> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Subgroup for SimulatedGroup {
    fn subgroup(&self, name: &'static str, ranks: &[usize]) -> Result<Self, CommError> {
        let mut shared = self.shared();
        shared.check()?;
        let index = shared.subgroups.entry(name).or_default();
        let ranks = self.ranks.subgroup(name, *index, ranks)?;
        *index += 1;
        drop(shared);
        Ok(Self { ranks, ..self.clone() })
    }
}

impl<T: SharedPayload> ProcessGroup<T> for SimulatedGroup {
    fn ranks(&self) -> &GroupRanks {
        &self.ranks
    }

    /// Counts the collective. The results are already there when the handle is returned.
    fn start(&self, side: Side, arrays: Vec<T>) -> Result<Pending<T>, CommError> {
        let operation = side.operation;
        let mut shared = self.shared();
        shared.check()?;
        shared.statistics.record(operation, &side.tag, side.signature.as_ref());
        let number = shared.started;
        shared.started += 1;
        // Released before the observer runs, which may use the group.
        drop(shared);
        let numels = side.numels();
        // Arrays of one collective may have different types.
        let bytes = |(array, numel): (&T, &usize)| (numel * array.element_size()) as u64;
        (self.observer.0)(GroupEvent::Start {
            number,
            operation,
            purpose: side.tag.purpose(),
            members: self.ranks.members(),
            arrays: numels.len() as u64,
            contributed: arrays.iter().map(T::contributed_bytes).sum::<usize>() as u64,
            complete: arrays.iter().zip(numels).map(bytes).sum(),
        });
        let result = |(array, numel)| self.result(operation, array, numel);
        let results = arrays.iter().zip(numels.iter().copied()).map(result).collect();
        let observer = self.observer.clone();
        Ok(Pending::new(move || {
            (observer.0)(GroupEvent::Wait { number });
            Ok(results)
        }))
    }

    /// Counts the message.
    fn send(&self, to: usize, tag: MessageTag, arrays: Vec<T>) -> Result<(), CommError> {
        let bytes = arrays.iter().map(T::contributed_bytes).sum();
        let route = self.count_message(MessageDirection::Send, to, tag, bytes)?;
        (self.observer.0)(GroupEvent::Send { route: &route, bytes: bytes as u64 });
        Ok(())
    }

    /// Counts the message. The result is `like`.
    fn receive(&self, from: usize, tag: MessageTag, like: Vec<T>) -> Result<Pending<T>, CommError> {
        let bytes = like.iter().map(|array| array.numel() * array.element_size()).sum();
        let route = self.count_message(MessageDirection::Receive, from, tag, bytes)?;
        let observer = self.observer.clone();
        Ok(Pending::new(move || {
            (observer.0)(GroupEvent::Receive { route: &route });
            Ok(like)
        }))
    }

    /// Returns true: every message has arrived.
    fn has_arrived(&self, from: usize, _tag: &MessageTag) -> bool {
        self.ranks.members().get(from).is_some_and(|from| *from != self.ranks.world_rank())
    }

    fn check(&self) -> Result<(), CommError> {
        self.shared().check()
    }

    fn abort(&self, cause: CommError) {
        self.shared().failure.get_or_insert(cause);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{CollectiveTag, Host, Operation, ReduceOp, gather_bytes, run_ranks};

    /// The results and counts of every collective on arrays that are equal on all ranks.
    fn results(
        group: &dyn ProcessGroup<Host<f64>>,
        bytes: &dyn ProcessGroup<Host<u8>>,
    ) -> Result<Vec<Vec<f64>>, CommError> {
        let tag = || CollectiveTag::new("test", 0);
        let (rank, world_size) = (group.rank(), group.world_size());
        let array = |len: usize| Host::from((0..len).map(|i| i as f64 + 0.5).collect::<Vec<_>>());
        let shard = array(Partition::new(7, world_size).shard_len());
        let mut all = Vec::new();
        for op in [ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Max] {
            all.extend(group.all_reduce(tag(), vec![array(5), array(1)], op)?.wait()?);
            all.extend(group.reduce_scatter(tag(), vec![array(7)], op)?.wait()?);
        }
        all.extend(group.all_gather(tag(), vec![shard], vec![7])?.wait()?);
        all.extend(group.all_to_all(tag(), vec![array(world_size * 2)])?.wait()?);
        all.extend(group.broadcast(tag(), vec![array(3)], world_size - 1)?.wait()?);
        group.barrier(tag())?;
        let gathered = gather_bytes(bytes, tag(), &[1, 2, 3])?;
        assert_eq!(gathered, vec![vec![1, 2, 3]; world_size], "rank {rank}");
        Ok(all.into_iter().map(Host::into_vec).collect())
    }

    #[test]
    fn ranks_with_equal_arrays_have_the_same_results_and_counts() {
        for world_size in 1..=4 {
            let real = run_ranks(world_size, Duration::from_secs(60), |member| {
                Ok::<_, CommError>((results(&member, &member)?, member.statistics()))
            });
            for (rank, (real, counted)) in real.unwrap().into_iter().enumerate() {
                let simulated = SimulatedGroup::new(rank, world_size).unwrap();
                assert_eq!(results(&simulated, &simulated).unwrap(), real, "rank {rank}");
                let sorted = |statistics: &Statistics| {
                    let mut counts: Vec<_> =
                        statistics.iter().map(|it| format!("{it:?}")).collect();
                    counts.sort();
                    counts
                };
                let counts = simulated.statistics();
                assert_eq!(sorted(&counts), sorted(&counted), "rank {rank}");
                let barriers = counts.total(|operation, _| operation == Operation::Barrier);
                assert_eq!(barriers.calls, 1);
            }
        }
    }

    #[test]
    fn an_observer_sees_sizes_and_waits() {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let log = seen.clone();
        let group = SimulatedGroup::new(0, 4).unwrap();
        let group = group.observed(move |event| log.lock().unwrap().push(format!("{event:?}")));
        let group: &dyn ProcessGroup<Host<f64>> = &group;
        let (tag, shard) = (CollectiveTag::new("gather", 0), Host::from(vec![0.0; 2]));
        let pending = group.all_gather(tag, vec![shard.clone(), shard], vec![7, 8]).unwrap();
        group.barrier(CollectiveTag::new("end", 0)).unwrap();
        pending.wait().unwrap();
        let start = "Start { number: 0, operation: AllGather, purpose: \"gather\", members: [0, 1, \
                     2, 3], arrays: 2, contributed: 32, complete: 120 }";
        let seen = seen.lock().unwrap();
        assert_eq!(seen[0], start);
        assert!(seen[1].starts_with("Start { number: 1, operation: Barrier"), "{}", seen[1]);
        assert_eq!(seen[2..], ["Wait { number: 1 }", "Wait { number: 0 }"]);
    }

    #[test]
    fn an_observer_sees_messages_when_they_are_sent_and_awaited() {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let log = seen.clone();
        let group = SimulatedGroup::new(1, 3).unwrap();
        let group = group.observed(move |event| {
            log.lock().unwrap().push(match event {
                GroupEvent::Send { route, bytes } => {
                    format!("{} to {}: {bytes}", route.tag, route.to)
                }
                GroupEvent::Receive { route } => format!("{} from {}", route.tag, route.from),
                _ => panic!("{event:?}"),
            });
        });
        let group: &dyn ProcessGroup<Host<f64>> = &group;
        let array = || vec![Host::from(vec![0.0; 3])];
        let coming = group.receive(0, MessageTag::new("late", 4), array()).unwrap();
        group.send(2, MessageTag::new("early", 5), array()).unwrap();
        coming.wait().unwrap();
        assert_eq!(*seen.lock().unwrap(), ["early 5 to 2: 24", "late 4 from 0"]);
    }

    #[test]
    fn an_aborted_group_starts_nothing() {
        let group = SimulatedGroup::new(1, 3).unwrap();
        let group: &dyn ProcessGroup<Host<f64>> = &group;
        assert!(group.check().is_ok());
        group.abort(CommError::NoRanks);
        assert_eq!(group.check(), Err(CommError::NoRanks));
        assert_eq!(group.barrier(CollectiveTag::new("test", 0)), Err(CommError::NoRanks));
    }
}
