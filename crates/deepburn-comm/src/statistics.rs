//! Counts of the collectives that a rank has started.

use std::collections::HashMap;
use std::iter::Sum;

use crate::{Operation, Tag};

/// How often something was exchanged, and how much.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Count {
    /// Collectives started.
    pub calls: u64,
    /// Elements of the whole arrays: of the input of a reduction, of the result of a gather, of
    /// what this rank passed to a broadcast.
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

/// Every collective that one rank has started, counted by operation and purpose of the tag.
#[derive(Debug, Clone, Default)]
pub struct Statistics {
    counts: HashMap<(Operation, &'static str), Count>,
}

impl Statistics {
    /// The counts of all operations and purposes that `select` accepts, together.
    pub fn total(&self, select: impl Fn(Operation, &str) -> bool) -> Count {
        let selected = self.iter().filter(|(operation, purpose, _)| select(*operation, purpose));
        selected.map(|(_, _, count)| count).sum()
    }

    /// The counts of one purpose, all operations together.
    pub fn purpose(&self, purpose: &str) -> Count {
        self.total(|_, counted| counted == purpose)
    }

    /// All counts, in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = (Operation, &'static str, Count)> {
        self.counts.iter().map(|((operation, purpose), count)| (*operation, *purpose, *count))
    }

    pub(crate) fn record(&mut self, operation: Operation, tag: Tag, elements: usize) {
        let count = self.counts.entry((operation, tag.purpose())).or_default();
        count.calls += 1;
        count.elements += elements as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ReduceOp;

    #[test]
    fn counts_add_up_by_operation_and_purpose() {
        let mut statistics = Statistics::default();
        statistics.record(Operation::AllGather, Tag::new("gather", 0), 10);
        statistics.record(Operation::AllGather, Tag::new("gather", 1), 5);
        statistics.record(Operation::AllReduce(ReduceOp::Sum), Tag::new("norm", 0), 1);
        statistics.record(Operation::AllReduce(ReduceOp::Sum), Tag::new("gather", 0), 2);
        assert_eq!(statistics.purpose("gather"), Count { calls: 3, elements: 17 });
        let gathers = statistics.total(|operation, _| operation == Operation::AllGather);
        assert_eq!(gathers, Count { calls: 2, elements: 15 });
        assert_eq!(statistics.total(|_, _| true), Count { calls: 4, elements: 18 });
        assert_eq!(statistics.purpose("absent"), Count::default());
        assert_eq!(statistics.iter().count(), 3);
    }
}
