//! Messages between two ranks: their routes and contents, and the validation of calls.

use std::borrow::Cow;
use std::fmt;

use serde::{Deserialize, Serialize};
use tracing::{Span, trace_span};

use crate::group_id::InGroup;
use crate::{CommError, GroupId, GroupRanks, MessageTag, Payload, Signature};

/// One of the two calls that exchange a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum MessageDirection {
    /// The call of the sender.
    Send,
    /// The call of the receiver.
    Receive,
}

impl fmt::Display for MessageDirection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Send => "send",
            Self::Receive => "receive",
        })
    }
}

/// Identifies the messages that can take each other's place: those between two ranks of a group
/// with equal tags.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct MessageRoute {
    /// The group in which the message is sent.
    pub group: GroupId,
    /// The world rank of the sender.
    pub from: usize,
    /// The world rank of the receiver.
    pub to: usize,
    /// The tag.
    pub tag: MessageTag,
}

impl MessageRoute {
    /// Returns the route of a message between this rank of the group `ranks` and its rank `peer`.
    ///
    /// # Errors
    /// Returns an error if `peer` is this rank or not a rank of the group.
    pub fn new(
        ranks: &GroupRanks,
        direction: MessageDirection,
        peer: usize,
        tag: MessageTag,
    ) -> Result<Self, CommError> {
        let own = ranks.world_rank();
        let reason = match ranks.members().get(peer) {
            Some(&other) if other != own => {
                let (from, to) = match direction {
                    MessageDirection::Send => (own, other),
                    MessageDirection::Receive => (other, own),
                };
                return Ok(Self { group: ranks.id().clone(), from, to, tag });
            }
            Some(_) => "the other side is this rank; pass the rank of another member".to_owned(),
            None => format!(
                "the other side is {peer}, but the ranks of the group are 0 to {}",
                ranks.len() - 1
            ),
        };
        let group = ranks.id().clone();
        Err(CommError::InvalidMessage { rank: own, direction, tag: Box::new(tag), group, reason })
    }

    /// Returns the error for the call of a rank that has left the group.
    pub fn after_leave(self, direction: MessageDirection) -> CommError {
        let Self { group, from, to, tag } = self;
        let rank = if direction == MessageDirection::Send { from } else { to };
        let reason =
            "it has left the process group; use the group only inside the function that the \
                      ranks run"
                .to_owned();
        CommError::InvalidMessage { rank, direction, tag: Box::new(tag), group, reason }
    }

    /// Creates the trace span of the wait for the message.
    pub fn span(&self) -> Span {
        trace_span!("receive", from = self.from, tag = %self.tag)
    }
}

impl fmt::Display for MessageRoute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} from rank {}{}", self.tag, self.from, InGroup(self.group.name()))
    }
}

/// Formats the tag and the group of a message.
pub(crate) struct Tagged<'a>(pub(crate) &'a MessageRoute);

impl fmt::Display for Tagged<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let MessageRoute { tag, group, .. } = self.0;
        write!(f, "{tag}{}", InGroup(group.name()))
    }
}

/// The types and sizes of the arrays of a message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MessageContents {
    /// The Rust type of the arrays.
    pub payload: Cow<'static, str>,
    /// The sizes and element types of the arrays.
    pub signature: Signature,
}

impl MessageContents {
    /// Returns the contents of a message with these arrays.
    pub fn of<T: Payload>(arrays: &[T]) -> Self {
        Self { payload: std::any::type_name::<T>().into(), signature: Signature::of(arrays) }
    }

    /// Checks that a message with these contents fits the arrays `expected` of its receiver.
    ///
    /// # Errors
    /// Returns an error that names both sides.
    pub fn check(&self, route: &MessageRoute, expected: &Self) -> Result<(), CommError> {
        // The payload type is compared too, because the receiver casts the arrays to it.
        if self == expected {
            return Ok(());
        }
        Err(CommError::MessageMismatch {
            route: Box::new(route.clone()),
            sent: Box::new(self.clone()),
            expected: Box::new(expected.clone()),
        })
    }
}

impl fmt::Display for MessageContents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (arrays, elements) = (self.signature.numels.len(), self.signature.total());
        write!(f, "{elements} elements in {arrays} arrays")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Host;

    fn route() -> MessageRoute {
        let ranks = GroupRanks::world(2, 4).subgroup("model", 0, &[1, 2]).unwrap();
        MessageRoute::new(&ranks, MessageDirection::Receive, 0, MessageTag::new("activation", 3))
            .unwrap()
    }

    #[test]
    fn a_route_has_ranks_of_the_world() {
        assert_eq!((route().from, route().to), (1, 2));
        assert_eq!(route().to_string(), "activation 3 from rank 1 in the group `model`");
        let ranks = GroupRanks::world(2, 4);
        let refused = |peer| {
            let tag = MessageTag::new("loss", 0);
            MessageRoute::new(&ranks, MessageDirection::Send, peer, tag).unwrap_err().to_string()
        };
        assert!(refused(2).starts_with("rank 2 cannot send loss 0: the other side is this rank"));
        assert!(refused(4).contains("the other side is 4, but the ranks of the group are 0 to 3"));
    }

    #[test]
    fn a_mismatch_names_both_sides_and_the_first_difference() {
        let contents = |numels: &[usize]| {
            let arrays: Vec<_> = numels.iter().map(|n| Host::from(vec![0_f32; *n])).collect();
            MessageContents::of(&arrays)
        };
        assert_eq!(contents(&[3]).check(&route(), &contents(&[3])), Ok(()));
        let error = contents(&[3, 4]).check(&route(), &contents(&[3, 5])).unwrap_err().to_string();
        let expected = "rank 1 sent activation 3 in the group `model` to rank 2 with 7 elements in 2 \
                        arrays, but rank 2 expects 8 elements in 2 arrays (array 1: 4 x f32 and 5 x \
                        f32; 1 of 2 arrays differ); ";
        assert!(error.starts_with(expected), "{error}");
        let doubles = MessageContents::of(&[Host::from(vec![0_f64; 3])]);
        let error = contents(&[3]).check(&route(), &doubles).unwrap_err().to_string();
        assert!(error.contains("Host<f32> and") && error.contains("Host<f64>"), "{error}");
    }
}
