//! The position of a collective in the common order.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{CollectiveTag, Operation};

/// A collective at its position in the common order of its group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Call {
    /// The number of the collective. Every rank counts from 0.
    pub sequence: u64,
    /// The kind of collective.
    pub operation: Operation,
    /// The tag of the exchange.
    pub tag: CollectiveTag,
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "collective {} ({} of {})", self.sequence, self.operation, self.tag)
    }
}
