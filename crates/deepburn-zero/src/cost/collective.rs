//! The operation and size of a simulated collective.

use deepburn_comm::Operation;

/// The operation of a collective, and the total size of its arrays.
#[derive(Debug, Clone, Copy)]
pub(super) struct Collective {
    /// The name under which the collective is counted. It is the same as in the
    /// engine's tag.
    pub(super) purpose: &'static str,
    /// The operation on the arrays.
    pub(super) operation: Operation,
    /// The number of arrays. Each array needs one message per peer.
    pub(super) arrays: u64,
    /// The number of elements of the complete arrays, as in
    /// [`Count`](deepburn_comm::Count).
    pub(super) elements: u64,
    /// The bytes that each rank contributes to a reduction.
    pub(super) sent: u64,
    /// The bytes of the complete result.
    pub(super) result: u64,
}

impl Collective {
    /// Creates a collective of dense arrays with `elements` elements in total,
    /// of `element_bytes` bytes each. All arrays are dense except the gradient
    /// of an embedding, whose contribution is smaller than its result.
    pub(super) fn dense(
        purpose: &'static str,
        operation: Operation,
        [arrays, elements]: [u64; 2],
        element_bytes: u64,
    ) -> Self {
        let bytes = elements.saturating_mul(element_bytes);
        Self { purpose, operation, arrays, elements, sent: bytes, result: bytes }
    }

    /// Returns the bytes that a rank sends to other ranks: `(ranks - 1) /
    /// ranks` of the operation's bytes. An all-reduce consists of a
    /// reduce-scatter and an all-gather, so the bytes of both are added.
    pub(super) fn bytes_sent(&self, ranks: u64) -> u64 {
        let whole = match self.operation {
            Operation::ReduceScatter(_) => self.sent,
            Operation::AllReduce(_) => self.sent.saturating_add(self.result),
            Operation::AllGather | Operation::AllToAll | Operation::Broadcast { .. } => self.result,
            Operation::Barrier => 0,
        };
        (whole as f64 * (ranks - 1) as f64 / ranks as f64).round() as u64
    }
}
