//! Ranks that wait for each other.
//!
//! Ranks that start different collectives in one group are found by comparing their calls. In
//! different groups there is nothing to compare: each rank waits for a call that another one would
//! make only after its own wait. The engines find such a circle as soon as its last rank waits.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::message::Tagged;
use crate::{Call, MessageRoute};

/// A rank that waits for another rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Waiting {
    /// The rank that waits.
    pub rank: usize,
    /// What it waits for.
    pub awaited: Awaited,
    /// The rank that has not done its part yet. A rank may wait for several; the others are not
    /// named.
    pub absent: usize,
}

/// What a rank waits for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Awaited {
    /// A collective, which other members of the group have not reached.
    Collective(Call),
    /// A message that was not sent.
    Message(MessageRoute),
}

impl fmt::Display for Waiting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, awaited, absent } = self;
        match awaited {
            Awaited::Collective(call) => write!(f, "rank {rank} waits in {call} for rank {absent}"),
            Awaited::Message(route) => {
                write!(f, "rank {rank} waits for {} from rank {absent}", Tagged(route))
            }
        }
    }
}

/// Formats ranks of which each waits for the next one, and the last one for the first.
pub(crate) struct Circle<'a>(pub(crate) &'a [Waiting]);

impl fmt::Display for Circle<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, waiting) in self.0.iter().enumerate() {
            // A circle has at least two ranks, because no rank waits for itself.
            let separator = match i {
                0 => "",
                _ if i + 1 == self.0.len() => ", and ",
                _ => ", ",
            };
            write!(f, "{separator}{waiting}")?;
        }
        Ok(())
    }
}
