//! The kinds of collectives.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::ReduceOp;

/// A kind of collective with the parameters on which all ranks must agree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Operation {
    /// A reduction whose complete result every rank receives.
    AllReduce(ReduceOp),
    /// A reduction from which each rank receives its chunk.
    ReduceScatter(ReduceOp),
    /// The concatenation of the chunks of all ranks.
    AllGather,
    /// An exchange in which each rank receives its part of every rank's array.
    AllToAll,
    /// A copy of the arrays of one rank to all ranks.
    Broadcast {
        /// The rank whose arrays are copied.
        root: usize,
    },
    /// A synchronization without data.
    Barrier,
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AllReduce(op) => write!(f, "all_reduce({op})"),
            Self::ReduceScatter(op) => write!(f, "reduce_scatter({op})"),
            Self::AllGather => f.write_str("all_gather"),
            Self::AllToAll => f.write_str("all_to_all"),
            Self::Broadcast { root } => write!(f, "broadcast(from rank {root})"),
            Self::Barrier => f.write_str("barrier"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_read_with_their_parameters() {
        let all = [
            Operation::AllReduce(ReduceOp::Max),
            Operation::ReduceScatter(ReduceOp::Mean),
            Operation::AllGather,
            Operation::AllToAll,
            Operation::Broadcast { root: 2 },
            Operation::Barrier,
        ];
        let names = all.map(|operation| operation.to_string());
        let expected = [
            "all_reduce(max)",
            "reduce_scatter(mean)",
            "all_gather",
            "all_to_all",
            "broadcast(from rank 2)",
            "barrier",
        ];
        assert_eq!(names, expected);
    }
}
