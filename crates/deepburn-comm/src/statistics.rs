//! Counts of the collectives and messages that a rank has started.

use std::borrow::Cow;
use std::collections::HashMap;
use std::iter::Sum;

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

impl Sum for Count {
    fn sum<I: Iterator<Item = Self>>(counts: I) -> Self {
        counts.fold(Self::default(), |sum, count| Self {
            calls: sum.calls + count.calls,
            elements: sum.elements + count.elements,
        })
    }
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

impl Sum for MessageCount {
    fn sum<I: Iterator<Item = Self>>(counts: I) -> Self {
        counts.fold(Self::default(), |sum, count| Self {
            messages: sum.messages + count.messages,
            bytes: sum.bytes + count.bytes,
        })
    }
}

/// Counts of all collectives and messages that one rank has started, in all of its groups, by
/// operation, purpose and group.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Statistics {
    counts: HashMap<CountedCollective, Count>,
    /// The counts of messages by purpose.
    messages: HashMap<(MessageDirection, Cow<'static, str>), MessageCount>,
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
        let selected = self.counts.iter().filter(|(counted, _)| {
            counted.group.as_deref() == group && select(counted.operation, &counted.purpose)
        });
        selected.map(|(_, count)| *count).sum()
    }

    /// Returns the sum of the counts that `select` accepts.
    pub fn total(&self, select: impl Fn(Operation, &str) -> bool) -> Count {
        let selected = self.iter().filter(|(operation, purpose, _)| select(*operation, purpose));
        selected.map(|(_, _, count)| count).sum()
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
        let selected = self.messages.iter();
        let selected = selected.filter(|((it, purpose), _)| *it == direction && select(purpose));
        selected.map(|(_, count)| *count).sum()
    }

    /// Returns the counts of all collectives in no particular order. A purpose may occur several
    /// times: for each element type, and for each group.
    pub fn iter(&self) -> impl Iterator<Item = (Operation, &str, Count)> {
        self.counts.iter().map(|(counted, count)| (counted.operation, &*counted.purpose, *count))
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
        let added = self.counts.iter().map(|(key, count)| {
            let before = earlier.counts.get(key).copied().unwrap_or_default();
            let calls = count.calls - before.calls;
            (key.clone(), Count { calls, elements: count.elements - before.elements })
        });
        // Entries without calls are left out, so that equal work gives equal statistics.
        let counts = added.filter(|(_, count)| count.calls > 0).collect();
        let sent = self.messages.iter().map(|(key, count)| {
            let before = earlier.messages.get(key).copied().unwrap_or_default();
            let messages = count.messages - before.messages;
            (key.clone(), MessageCount { messages, bytes: count.bytes - before.bytes })
        });
        Self { counts, messages: sent.filter(|(_, count)| count.messages > 0).collect() }
    }

    /// Adds counts that occur `times` times.
    pub fn add(&mut self, other: &Self, times: u64) {
        for (key, count) in &other.counts {
            let sum = self.counts.entry(key.clone()).or_default();
            sum.calls += times * count.calls;
            sum.elements += times * count.elements;
        }
        for (key, count) in &other.messages {
            let sum = self.messages.entry(key.clone()).or_default();
            sum.messages += times * count.messages;
            sum.bytes += times * count.bytes;
        }
    }

    /// Counts a message of `bytes`.
    pub fn record_message(&mut self, direction: MessageDirection, tag: &MessageTag, bytes: usize) {
        // Numbers and scopes of tags are not counted, because they may grow without bound.
        let count = self.messages.entry((direction, tag.shared_purpose())).or_default();
        count.messages += 1;
        count.bytes += bytes as u64;
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
        let count = self.counts.entry(counted).or_default();
        count.calls += 1;
        count.elements += arrays.map_or(0, Signature::total) as u64;
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
