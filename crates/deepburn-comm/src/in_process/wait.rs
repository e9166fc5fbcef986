//! What sleeping ranks wait for, from which ranks that wait for each other are found.

use std::collections::HashMap;
use std::thread::{self, ThreadId};

use super::letter::Letter;
use super::round::{Round, RoundKey};
use crate::{Awaited, Call, GroupRanks, Mailbox, MessageRoute, ReceiveId};

/// The threads that have started collectives and messages as one rank, or waited for them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum ActingThreads {
    /// None yet.
    #[default]
    None,
    /// One.
    One(ThreadId),
    /// At least two. While one of them sleeps, another one may do what other ranks wait for.
    Several,
}

impl ActingThreads {
    /// Adds the current thread.
    pub(super) fn note_current(&mut self) {
        let current = thread::current().id();
        *self = match *self {
            Self::None => Self::One(current),
            Self::One(other) if other == current => return,
            // A thread that has acted once may act again at any time, so threads are never removed.
            Self::One(_) | Self::Several => Self::Several,
        };
    }

    /// Returns true if there is exactly one.
    pub(super) fn are_one(self) -> bool {
        matches!(self, Self::One(_))
    }
}

/// What a sleeping thread waits for.
#[derive(Debug, Clone)]
pub(super) enum WaitTarget {
    /// The deposits or the results of a round.
    Round {
        /// The round.
        key: RoundKey,
        /// Its group.
        ranks: GroupRanks,
        /// The collective.
        call: Call,
    },
    /// A message.
    Message {
        /// Its sender, receiver and tag.
        route: MessageRoute,
        /// The receive.
        id: ReceiveId,
    },
}

impl WaitTarget {
    /// Returns the world ranks without whose next call the wait cannot end. They are taken from the
    /// present state, because the thread may not have noticed yet that it was woken.
    ///
    /// There are none if the deposits are complete: ranks that compute results do not wait for
    /// others.
    pub(super) fn absent(
        &self,
        rounds: &HashMap<RoundKey, Round>,
        letters: &Mailbox<Letter>,
    ) -> Vec<usize> {
        match self {
            Self::Round { key, ranks, .. } => {
                // A round that is gone has ended, so nothing is missing in it.
                let missing = rounds.get(key).map(Round::missing).unwrap_or_default();
                missing.into_iter().map(|rank| ranks.members()[rank]).collect()
            }
            Self::Message { id, .. } if letters.is_matched(*id) => Vec::new(),
            Self::Message { route, .. } => vec![route.from],
        }
    }

    /// Describes the wait for an error message.
    pub(super) fn awaited(&self) -> Awaited {
        match self {
            Self::Round { call, .. } => Awaited::Collective(call.clone()),
            Self::Message { route, .. } => Awaited::Message(route.clone()),
        }
    }
}
