//! Counts of the collectives and messages that a rank has started.

use std::borrow::Cow;
use std::collections::HashMap;
use std::hash::Hash;

use crate::{CollectiveTag, MessageDirection, MessageTag, Operation, Signature};

/// A number of collectives and of exchanged elements.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Count {
    /// The number of collectives started.
    pub calls: u64,
    /// The number of elements of the complete arrays: the input of a reduction, the result of a
    /// gather, or the arrays that this rank passed to a broadcast.
    pub elements: u64,
}

/// A number of messages and their bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MessageCount {
    /// The number of messages.
    pub messages: u64,
    /// The bytes of their arrays. A sparse array is sent as its rows, and received with the size
    /// that its receiver expects, which is the size of the dense array.
    pub bytes: u64,
}

/// Counts of all collectives and messages that one rank has started, in all of its groups, by
/// operation, purpose and group.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Statistics {
    /// The collectives with their elements.
    counts: Tally<CountedCollective>,
    /// The messages by purpose, with their bytes.
    messages: Tally<(MessageDirection, Cow<'static, str>)>,
}

/// A number of events and the sum of their sizes, by what is counted together.
type Tally<K> = HashMap<K, (u64, u64)>;

/// Adds `events` of the sum `size`.
fn add<K: Eq + Hash>(tally: &mut Tally<K>, key: K, events: u64, size: u64) {
    let sum = tally.entry(key).or_default();
    *sum = (sum.0 + events, sum.1 + size);
}

/// Adds all of `other`, `times` times.
fn add_all<K: Clone + Eq + Hash>(tally: &mut Tally<K>, other: &Tally<K>, times: u64) {
    for (key, (events, size)) in other {
        add(tally, key.clone(), times * events, times * size);
    }
}

/// Returns what was added after `earlier`.
fn since<K: Clone + Eq + Hash>(now: &Tally<K>, earlier: &Tally<K>) -> Tally<K> {
    let added = now.iter().map(|(key, (events, size))| {
        let before = earlier.get(key).copied().unwrap_or_default();
        (key.clone(), (events - before.0, size - before.1))
    });
    // Entries without events are left out, so that equal work gives equal statistics.
    added.filter(|(_, (events, _))| *events > 0).collect()
}

/// Returns the sum of what `select` accepts.
fn sum<K>(tally: &Tally<K>, select: impl Fn(&K) -> bool) -> (u64, u64) {
    let selected = tally.iter().filter(|(key, _)| select(key));
    selected.fold((0, 0), |sum, (_, count)| (sum.0 + count.0, sum.1 + count.1))
}

/// Collectives that are counted together.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct CountedCollective {
    operation: Operation,
    purpose: Cow<'static, str>,
    dtype: Cow<'static, str>,
    /// The name of the subgroup; `None` for the world.
    group: Option<Cow<'static, str>>,
}

impl Statistics {
    /// Returns the counts of the collectives in the subgroup with this name, or in the world for
    /// `None`, that `select` accepts.
    pub fn in_group(&self, group: Option<&str>, select: impl Fn(Operation, &str) -> bool) -> Count {
        let (calls, elements) = sum(&self.counts, |counted| {
            counted.group.as_deref() == group && select(counted.operation, &counted.purpose)
        });
        Count { calls, elements }
    }

    /// Returns the sum of the counts that `select` accepts.
    pub fn total(&self, select: impl Fn(Operation, &str) -> bool) -> Count {
        let (calls, elements) =
            sum(&self.counts, |counted| select(counted.operation, &counted.purpose));
        Count { calls, elements }
    }

    /// Returns the counts of one purpose over all operations.
    pub fn purpose(&self, purpose: &str) -> Count {
        self.total(|_, counted| counted == purpose)
    }

    /// Returns the sum of the counts of messages whose purpose `select` accepts.
    pub fn messages(
        &self,
        direction: MessageDirection,
        select: impl Fn(&str) -> bool,
    ) -> MessageCount {
        let (messages, bytes) =
            sum(&self.messages, |(it, purpose)| *it == direction && select(purpose));
        MessageCount { messages, bytes }
    }

    /// Returns the counts of all collectives in no particular order. A purpose may occur several
    /// times: for each element type, and for each group.
    pub fn iter(&self) -> impl Iterator<Item = (Operation, &str, Count)> {
        self.counts.iter().map(|(counted, &(calls, elements))| {
            (counted.operation, &*counted.purpose, Count { calls, elements })
        })
    }

    /// Returns the sorted names of the element types that were exchanged for a purpose.
    pub fn element_types(&self, purpose: &str) -> Vec<&str> {
        let counted = self.counts.keys().filter(|counted| counted.purpose == purpose);
        let mut types: Vec<_> = counted.map(|counted| &*counted.dtype).collect();
        types.sort_unstable();
        types.dedup();
        types
    }

    /// Returns the counts that were added after `earlier`, which are counts of the same rank.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let counts = since(&self.counts, &earlier.counts);
        Self { counts, messages: since(&self.messages, &earlier.messages) }
    }

    /// Adds counts that occur `times` times.
    pub fn add(&mut self, other: &Self, times: u64) {
        add_all(&mut self.counts, &other.counts, times);
        add_all(&mut self.messages, &other.messages, times);
    }

    /// Counts a message of `bytes`.
    pub fn record_message(&mut self, direction: MessageDirection, tag: &MessageTag, bytes: usize) {
        // Numbers and scopes of tags are not counted, because they may grow without bound.
        add(&mut self.messages, (direction, tag.shared_purpose()), 1, bytes as u64);
    }

    /// Counts a collective. All arrays of a collective have the same element type; a barrier has
    /// none.
    pub fn record(
        &mut self,
        operation: Operation,
        tag: &CollectiveTag,
        arrays: Option<&Signature>,
    ) {
        // The first array stands for all. A barrier is counted under an empty type.
        let dtype = arrays.and_then(|arrays| arrays.dtypes.first()).cloned().unwrap_or_default();
        let (purpose, group) = (tag.shared_purpose(), tag.group_name());
        let counted = CountedCollective { operation, purpose, dtype, group };
        add(&mut self.counts, counted, 1, arrays.map_or(0, Signature::total) as u64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{GroupRanks, ReduceOp};

    #[test]
    fn counts_add_up_by_operation_and_purpose() {
        let mut statistics = Statistics::default();
        let mut record = |operation, tag, elements, dtype| {
            let arrays = Signature { numels: vec![elements], dtypes: vec![Cow::Borrowed(dtype)] };
            statistics.record(operation, &tag, Some(&arrays));
        };
        record(Operation::AllGather, CollectiveTag::new("gather", 0), 10, "f32");
        record(Operation::AllGather, CollectiveTag::new("gather", 1), 5, "bf16");
        record(Operation::AllReduce(ReduceOp::Sum), CollectiveTag::new("norm", 0), 1, "f64");
        record(Operation::AllReduce(ReduceOp::Sum), CollectiveTag::new("gather", 0), 2, "f32");
        assert_eq!(statistics.element_types("gather"), ["bf16", "f32"]);
        assert_eq!(statistics.element_types("norm"), ["f64"]);
        assert_eq!(statistics.purpose("gather"), Count { calls: 3, elements: 17 });
        let gathers = statistics.total(|operation, _| operation == Operation::AllGather);
        assert_eq!(gathers, Count { calls: 2, elements: 15 });
        assert_eq!(statistics.total(|_, _| true), Count { calls: 4, elements: 18 });
        assert_eq!(statistics.purpose("absent"), Count::default());
        assert_eq!(statistics.iter().count(), 4);
    }

    #[test]
    fn the_collectives_of_a_group_are_counted_apart() {
        let world = GroupRanks::world(0, 4);
        let shard = world.subgroup("shard", 0, &[0, 1]).unwrap();
        let mut statistics = Statistics::default();
        for (ranks, elements) in [(&world, 10), (&shard, 3), (&shard, 4)] {
            let arrays = Signature { numels: vec![elements], dtypes: vec!["f32".into()] };
            let tag = ranks.tagged(CollectiveTag::new("gather", 0));
            statistics.record(Operation::AllGather, &tag, Some(&arrays));
        }
        let gathers = |group| statistics.in_group(group, |_, purpose| purpose == "gather");
        assert_eq!(gathers(Some("shard")), Count { calls: 2, elements: 7 });
        assert_eq!(gathers(None), Count { calls: 1, elements: 10 });
        assert_eq!(gathers(Some("absent")), Count::default());
        assert_eq!(statistics.purpose("gather"), Count { calls: 3, elements: 17 });
    }

    #[test]
    fn messages_are_counted_apart_from_collectives() {
        let mut statistics = Statistics::default();
        statistics.record_message(MessageDirection::Send, &MessageTag::new("activation", 0), 10);
        let before = statistics.clone();
        statistics.record_message(MessageDirection::Send, &MessageTag::new("activation", 1), 20);
        statistics.record_message(MessageDirection::Receive, &MessageTag::new("gradient", 1), 5);
        let sent = statistics.messages(MessageDirection::Send, |purpose| purpose == "activation");
        assert_eq!(sent, MessageCount { messages: 2, bytes: 30 });
        let mut added = statistics.since(&before);
        added.add(&added.clone(), 2);
        let all = |direction| added.messages(direction, |_| true);
        assert_eq!(all(MessageDirection::Send), MessageCount { messages: 3, bytes: 60 });
        assert_eq!(all(MessageDirection::Receive), MessageCount { messages: 3, bytes: 15 });
        assert_eq!(statistics.total(|_, _| true), Count::default());
    }
}
