//! The connection to the members of a group.

use bytes::Bytes;
use deepburn_comm::{CommError, Form, GroupRanks, Received, Side};

use super::Link;
use crate::control::CallHeader;
use crate::transfer::Incoming;

/// The connection to the members of a group, for one collective. Its ranks are ranks of the group.
pub(crate) struct GroupLink<'a> {
    link: &'a mut Link,
    ranks: &'a GroupRanks,
}

impl<'a> GroupLink<'a> {
    /// Returns the connection to the members of a group.
    pub(crate) fn new(link: &'a mut Link, ranks: &'a GroupRanks) -> Self {
        Self { link, ranks }
    }

    /// Returns the rank in the group, from 0.
    pub(crate) fn rank(&self) -> usize {
        self.ranks.rank()
    }

    /// Returns the number of ranks in the group.
    pub(crate) fn world_size(&self) -> usize {
        self.ranks.len()
    }

    /// Returns the rank in the group of a member with this rank in the world.
    pub(crate) fn position(&self, world_rank: usize) -> usize {
        self.ranks.position(world_rank).unwrap_or_default()
    }

    /// Exchanges headers with the members; see [`Link::meet`].
    ///
    /// # Errors
    /// Returns an error if ranks disagree, fail, have left or do not arrive in time.
    pub(crate) fn meet(
        &mut self,
        side: &Side,
        parts: impl Fn(usize) -> Vec<(Form, u64)>,
    ) -> Result<Vec<CallHeader>, CommError> {
        self.link.meet(self.ranks, side, parts)
    }

    /// Exchanges data with the members; see [`Link::exchange`].
    ///
    /// # Errors
    /// Returns an error if a rank fails or at the time-out.
    pub(crate) fn exchange(
        &mut self,
        mut outgoing: Vec<(usize, Bytes)>,
        mut incoming: Vec<Incoming>,
    ) -> Result<Vec<Received>, CommError> {
        // There is one communicator, the world's, so messages are addressed to world ranks.
        let members = self.ranks.members();
        let segments = incoming.iter_mut().flat_map(|array| &mut array.segments);
        let ranks = outgoing.iter_mut().map(|(to, _)| to).chain(segments.map(|(from, _)| from));
        ranks.for_each(|rank| *rank = members[*rank]);
        self.link.exchange(self.ranks, outgoing, incoming)
    }

    /// Returns the error for bytes of a member that do not encode the expected array.
    pub(crate) fn undecodable(&self, reason: String) -> CommError {
        CommError::Transport { rank: self.ranks.world_rank(), reason }
    }
}
