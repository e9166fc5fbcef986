//! Errors of collectives.
//!
//! The first failure ends the group. All pending and later calls return this failure, so every rank
//! gets an equal [`CommError`]. Messages name the ranks and the exchange, and suggest how to fix
//! the problem.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::deadlock::Circle;
use crate::group_id::InGroup;
use crate::message::Tagged;
use crate::{
    Call, CollectiveTag, GroupId, MessageContents, MessageDirection, MessageRoute, MessageTag,
    Operation, Signature, Waiting,
};

/// The reason why a collective was not completed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum CommError {
    /// Two ranks started different collectives at the same position of the common order.
    #[error(
        "collective {sequence}: {left}, but {right}{}; all ranks must start the same collectives \
         in the same order: look for a branch that depends on the rank or on its data",
        left.difference(right)
    )]
    Mismatch {
        /// Number of the collective in the common order, from 0.
        sequence: u64,
        /// The rank that arrived first.
        left: Box<Side>,
        /// The rank whose call differs.
        right: Box<Side>,
    },

    /// Ranks wait for each other in different groups, or for each other's messages.
    #[error(
        "{}, so that none of them can continue; all members of a group must start the same \
         collectives in the same order, also across groups, and send what others receive: look for \
         a branch that depends on the rank or on its data",
        Circle(circle)
    )]
    Deadlock {
        /// The ranks. Each waits for the next one, and the last one for the first.
        circle: Vec<Waiting>,
    },

    /// Some ranks did not reach the collective within the time-out.
    #[error(
        "rank {rank} waited {:.3} s in {call} for {}; find out what holds them up (a crash, a \
         dead-lock, a collective that they skip), or raise the time-out if they are only slow",
        waited.as_secs_f64(), Listed(absent)
    )]
    Timeout {
        /// The rank that waited.
        rank: usize,
        /// The collective in which it waited.
        call: Box<Call>,
        /// The time it waited.
        waited: Duration,
        /// The missing ranks.
        absent: Vec<Absence>,
    },

    /// A rank returned an error or panicked.
    #[error("rank {rank} failed and all ranks stop: {cause}")]
    PeerFailed {
        /// The rank that failed.
        rank: usize,
        /// Its error or panic message.
        cause: String,
    },

    /// A rank finished successfully while other ranks were still waiting for it.
    #[error(
        "rank {waiting} waits in {call} for rank {rank}, which has ended; all ranks must run the \
         same number of collectives: compare the number of steps of both"
    )]
    Left {
        /// The rank that has ended.
        rank: usize,
        /// The rank that waits for it.
        waiting: usize,
        /// The collective in which it waits.
        call: Box<Call>,
    },

    /// A rank used its handle after it had left the group.
    #[error(
        "rank {rank} cannot start {operation} of {tag}: it has left the process group; use the \
         group only inside the function that the ranks run"
    )]
    AfterLeave {
        /// The rank.
        rank: usize,
        /// The collective that it tried to start.
        operation: Operation,
        /// The tag of the exchange.
        tag: CollectiveTag,
    },

    /// The arguments of a collective are invalid. Nothing was exchanged.
    #[error("rank {rank} cannot start {operation} of {tag}: {reason}")]
    InvalidArgument {
        /// The rank that called.
        rank: usize,
        /// The collective.
        operation: Operation,
        /// The tag of the exchange.
        tag: CollectiveTag,
        /// The invalid argument, its value, the rule and how to fix the problem.
        reason: String,
    },

    /// A rank created a subgroup with invalid arguments.
    #[error("rank {rank} cannot create the group `{name}`: {reason}")]
    InvalidSubgroup {
        /// The world rank that called.
        rank: usize,
        /// The name of the group.
        name: Cow<'static, str>,
        /// The invalid argument, its value, the rule and how to fix the problem.
        reason: String,
    },

    /// Two ranks created the same subgroup with different members.
    #[error(
        "rank {left} created the group `{name}` of the ranks {left_members:?}, but rank {right} \
         created it of the ranks {right_members:?}; all members of a group must list the same ranks \
         in the same order, and groups that share some of their ranks need different names"
    )]
    SubgroupMismatch {
        /// The name of the group.
        name: Cow<'static, str>,
        /// The lower of the two world ranks.
        left: usize,
        /// The members that it listed.
        left_members: Box<[usize]>,
        /// The other world rank.
        right: usize,
        /// The members that it listed.
        right_members: Box<[usize]>,
    },

    /// The arguments of a call for a message are invalid, or the rank has left the group. Nothing
    /// was sent.
    #[error(
        "rank {rank} cannot {direction} {tag}{}: {reason}",
        InGroup(group.name())
    )]
    InvalidMessage {
        /// The world rank that called.
        rank: usize,
        /// The call.
        direction: MessageDirection,
        /// The tag of the message.
        tag: Box<MessageTag>,
        /// The group.
        group: GroupId,
        /// The invalid argument, its value, the rule and how to fix the problem.
        reason: String,
    },

    /// A message does not fit the arrays of its receiver.
    #[error(
        "rank {} sent {}{} to rank {} with {sent}, but rank {} expects {expected}{}; both sides must \
         name arrays of the same sizes and types: look for a tag that two messages share, or for a \
         shape that depends on the rank",
        route.from, route.tag, InGroup(route.group.name()), route.to, route.to,
        Arrays::from(&**sent).difference(&Arrays::from(&**expected))
    )]
    MessageMismatch {
        /// The sender, the receiver and the tag.
        route: Box<MessageRoute>,
        /// The arrays of the sender.
        sent: Box<MessageContents>,
        /// The arrays of the receiver.
        expected: Box<MessageContents>,
    },

    /// A message did not arrive within the time-out.
    #[error(
        "rank {} waited {:.3} s for {} from {sender}{}; find out what holds the sender up (a crash, a \
         dead-lock, a message with another tag), or raise the time-out if it is only slow",
        route.to, waited.as_secs_f64(), Tagged(route), Unclaimed(unclaimed)
    )]
    MessageTimeout {
        /// The sender, the receiver and the tag.
        route: Box<MessageRoute>,
        /// The time that the receiver waited.
        waited: Duration,
        /// The sender and its last known collective.
        sender: Box<Absence>,
        /// Some tags of messages of this sender that have arrived and were not received.
        unclaimed: Vec<MessageTag>,
    },

    /// A rank finished successfully while another rank was waiting for a message from it.
    #[error(
        "rank {} waits for {} from rank {}, which has ended without sending it{}; compare what both \
         send and receive",
        route.to, Tagged(route), route.from, Unclaimed(unclaimed)
    )]
    SenderLeft {
        /// The sender, the receiver and the tag.
        route: Box<MessageRoute>,
        /// Some tags of messages of this sender that have arrived and were not received.
        unclaimed: Vec<MessageTag>,
    },

    /// The process of a rank ended without sending a message, for example because it was killed or
    /// ran out of memory.
    #[error(
        "the process of rank {rank} on {host} has died{}; rank {reporter} detected this {}; look for its \
         last messages in its output and in the system's log (out of memory, a signal, a crash)",
        last.as_ref().map_or_else(String::new, |call| format!(", last seen in {call}")),
        call.as_ref().map_or_else(|| "before any collective".into(), |call| format!("at {call}"))
    )]
    Died {
        /// The rank.
        rank: usize,
        /// Its host.
        host: String,
        /// The last collective that the rank is known to have started.
        last: Option<Box<Call>>,
        /// The rank that detected it.
        reporter: usize,
        /// The last collective of the rank that detected it.
        call: Option<Box<Call>>,
    },

    /// The process of a rank exited during a run.
    #[error(
        "the process of rank {rank} on {host} exits in the middle of a run{}; let the function that \
         ranks run return, and report failures as errors",
        call.as_ref().map_or_else(String::new, |call| format!(", after {call}"))
    )]
    Exited {
        /// The rank.
        rank: usize,
        /// Its host.
        host: String,
        /// The last collective that it started.
        call: Option<Box<Call>>,
    },

    /// The processes that the launcher started could not connect to each other.
    #[error(
        "rank {rank} waited {:.3} s to connect to {}; see that all processes of the launcher run the \
         same program and can reach each other",
        waited.as_secs_f64(), Listed(absent)
    )]
    Unconnected {
        /// The rank that waited.
        rank: usize,
        /// The time it waited.
        waited: Duration,
        /// The ranks that did not connect.
        absent: Vec<Absence>,
    },

    /// The launcher ended the job while a rank was waiting. The usual cause is the death of another
    /// rank.
    #[error(
        "the launcher ended the job while rank {rank} waited{} for {}; look for the first failure in the \
         output of the launcher and of the ranks that did not come",
        call.as_ref().map_or_else(String::new, |call| format!(" in {call}")), Listed(absent)
    )]
    Terminated {
        /// The rank that waited.
        rank: usize,
        /// The collective in which it waited.
        call: Option<Box<Call>>,
        /// The missing ranks.
        absent: Vec<Absence>,
    },

    /// The MPI engine failed.
    #[error("rank {rank}: {reason}")]
    Transport {
        /// The rank that detected it.
        rank: usize,
        /// The failed operation and its error.
        reason: String,
    },

    /// A group with 0 ranks was requested.
    #[error("the number of ranks is 0; a process group has at least one rank: pass 1 or more")]
    NoRanks,
}

/// Formats the tags of messages that were not received.
struct Unclaimed<'a>(&'a [MessageTag]);

impl fmt::Display for Unclaimed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, tag) in self.0.iter().enumerate() {
            write!(f, "{}{tag}", if i == 0 { "; not received from it: " } else { ", " })?;
        }
        Ok(())
    }
}

/// A missing rank that other ranks are waiting for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Absence {
    /// The rank.
    pub rank: usize,
    /// Its host; `None` for rank threads.
    pub host: Option<String>,
    /// The last collective that it started; `None` if it started none.
    pub last: Option<Call>,
}

impl fmt::Display for Absence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}", self.rank)?;
        if let Some(host) = &self.host {
            write!(f, " on {host}")?;
        }
        match &self.last {
            Some(call) => write!(f, ", last seen in {call}"),
            None => write!(f, ", which has started no collective"),
        }
    }
}

/// Formats a list of missing ranks.
struct Listed<'a>(&'a [Absence]);

impl fmt::Display for Listed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, absence) in self.0.iter().enumerate() {
            write!(f, "{}{absence}", if i == 0 { "" } else { " and " })?;
        }
        Ok(())
    }
}

/// The call of one rank. All ranks in it are ranks of the world.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Side {
    /// The rank.
    pub rank: usize,
    /// The kind of collective.
    pub operation: Operation,
    /// The tag of the exchange.
    pub tag: CollectiveTag,
    /// The Rust type of the arrays; `()` for a barrier.
    pub payload: Cow<'static, str>,
    /// The sizes and element types of the arrays; `None` if the rank passed no arrays (a barrier,
    /// or the receiver of a broadcast).
    pub signature: Option<Signature>,
}

impl Side {
    /// Returns true if both calls can take part in the same exchange.
    pub fn agrees_with(&self, other: &Self) -> bool {
        let same_arrays = match (&self.signature, &other.signature) {
            (Some(mine), Some(theirs)) => mine == theirs,
            // A rank without arrays, as in a barrier, has none that could differ.
            _ => true,
        };
        self.operation == other.operation
            && self.tag == other.tag
            && self.payload == other.payload
            && same_arrays
    }

    /// Describes the first difference between the arrays of both sides.
    fn difference(&self, other: &Self) -> String {
        Arrays::from(self).difference(&Arrays::from(other))
    }
}

/// What is known about the arrays of one side of an exchange.
struct Arrays<'a> {
    /// The Rust type.
    payload: &'a str,
    /// The names; empty if they are not known.
    names: &'a [Arc<str>],
    signature: Option<&'a Signature>,
}

impl<'a> From<&'a Side> for Arrays<'a> {
    fn from(side: &'a Side) -> Self {
        let Side { payload, tag, signature, .. } = side;
        Self { payload, names: tag.names(), signature: signature.as_ref() }
    }
}

impl<'a> From<&'a MessageContents> for Arrays<'a> {
    fn from(contents: &'a MessageContents) -> Self {
        let MessageContents { payload, signature } = contents;
        Self { payload, names: &[], signature: Some(signature) }
    }
}

impl Arrays<'_> {
    /// Describes the first difference between the arrays of both sides, as a phrase for the error
    /// message. Returns an empty string if the arrays are equal.
    ///
    /// Buckets can contain hundreds of arrays, so a complete list would obscure the difference.
    fn difference(&self, other: &Self) -> String {
        if self.payload != other.payload {
            return format!(" (payloads {} and {})", self.payload, other.payload);
        }
        // One side may have more arrays. Positions that only it has count as differences too.
        let len = self.len().max(other.len());
        let differs = |i: &usize| self.array(*i) != other.array(*i);
        // Calls may differ in operation or tag only, which the message shows before.
        let Some(first) = (0..len).find(differs) else { return String::new() };
        let count = (0..len).filter(differs).count();
        let described = |side: &Self| {
            side.array(first).map_or_else(|| "none".to_owned(), |array| array.to_string())
        };
        let (left, right) = (described(self), described(other));
        let of_all = match len {
            1 => String::new(),
            // The number tells one wrong shape from two lists that are shifted against each other.
            _ => format!("; {count} of {len} arrays differ"),
        };
        format!(" (array {first}: {left} and {right}{of_all})")
    }

    /// Returns the number of arrays whose name or size is known.
    fn len(&self) -> usize {
        // Names may be known without sizes, and sizes without names.
        self.signature.map_or(0, |signature| signature.numels.len()).max(self.names.len())
    }

    /// Returns the name and size of array `index`; `None` if neither is known.
    fn array(&self, index: usize) -> Option<KnownArray<'_>> {
        let name = self.names.get(index).map(|name| &**name);
        let size = self.signature.and_then(|signature| {
            Some((*signature.numels.get(index)?, &**signature.dtypes.get(index)?))
        });
        (name.is_some() || size.is_some()).then_some(KnownArray { name, size })
    }
}

/// The known properties of an array.
#[derive(PartialEq)]
struct KnownArray<'a> {
    name: Option<&'a str>,
    /// The number of elements and the element type.
    size: Option<(usize, &'a str)>,
}

impl fmt::Display for KnownArray<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.name, self.size) {
            (Some(name), Some((numel, dtype))) => write!(f, "{name} of {numel} x {dtype}"),
            (Some(name), None) => f.write_str(name),
            (None, Some((numel, dtype))) => write!(f, "{numel} x {dtype}"),
            (None, None) => f.write_str("none"),
        }
    }
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} called {} of {}", self.rank, self.operation, self.tag)?;
        if let Some(signature) = &self.signature {
            let (arrays, elements) = (signature.numels.len(), signature.total());
            write!(f, " with {elements} elements in {arrays} arrays")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ReduceOp;

    fn side(rank: usize, numels: &[usize], dtype: &'static str) -> Side {
        Side {
            rank,
            operation: Operation::AllReduce(ReduceOp::Sum),
            tag: CollectiveTag::new("norm", 3),
            payload: "Host<f32>".into(),
            signature: Some(Signature {
                numels: numels.to_vec(),
                dtypes: vec![dtype.into(); numels.len()],
            }),
        }
    }

    fn mismatch(left: Side, right: Side) -> String {
        assert!(!left.agrees_with(&right));
        CommError::Mismatch { sequence: 7, left: left.into(), right: right.into() }.to_string()
    }

    #[test]
    fn a_mismatch_names_both_sides_and_the_first_difference() {
        let message = mismatch(side(0, &[4, 5], "f32"), side(2, &[4, 6], "f32"));
        let expected = "collective 7: rank 0 called all_reduce(sum) of norm#3 with 9 elements in \
                        2 arrays, but rank 2 called all_reduce(sum) of norm#3 with 10 elements in \
                        2 arrays (array 1: 5 x f32 and 6 x f32; 1 of 2 arrays differ); ";
        assert!(message.starts_with(expected), "{message}");
        let message = mismatch(side(0, &[4], "f32"), side(1, &[4], "f64"));
        assert!(message.contains("(array 0: 4 x f32 and 4 x f64)"), "{message}");
        let message = mismatch(side(0, &[4], "f32"), side(1, &[4, 1], "f32"));
        assert!(message.contains("in 1 arrays, but rank 1"), "{message}");
        assert!(message.contains("(array 1: none and 1 x f32; 1 of 2 arrays differ)"), "{message}");
        let other = Side { payload: "Tensor".into(), ..side(1, &[4], "f32") };
        let message = mismatch(side(0, &[4], "f32"), other);
        assert!(message.contains("(payloads Host<f32> and Tensor)"), "{message}");
    }

    #[test]
    fn a_mismatch_names_the_arrays_of_both_sides() {
        let named = |rank, id, numels: &[usize], names: &[&str]| {
            let tag = CollectiveTag::new("gradients", id)
                .naming(names.iter().map(|name| Arc::from(*name)));
            Side { tag, ..side(rank, numels, "f32") }
        };
        let left = named(0, 1, &[4, 5, 6], &["norm.weight", "a.bias", "b.bias"]);
        let right = named(3, 2, &[4, 6, 5], &["norm.weight", "b.bias", "a.bias"]);
        let expected = "collective 7: rank 0 called all_reduce(sum) of gradients (norm.weight and 2 \
                        more) with 15 elements in 3 arrays, but rank 3 called all_reduce(sum) of \
                        gradients (norm.weight and 2 more) with 15 elements in 3 arrays (array 1: \
                        a.bias of 5 x f32 and b.bias of 6 x f32; 2 of 3 arrays differ); ";
        let message = mismatch(left.clone(), right);
        assert!(message.starts_with(expected), "{message}");
        let right = named(1, 2, &[4], &["norm.weight"]);
        let message = mismatch(left, right);
        let expected = "(array 1: a.bias of 5 x f32 and none; 2 of 3 arrays differ)";
        assert!(message.contains(expected), "{message}");
        let message = mismatch(named(0, 0, &[4], &["a"]), named(1, 1, &[4], &["b"]));
        assert!(message.contains("of gradients (a) with 4 elements"), "{message}");
        assert!(message.contains("(array 0: a of 4 x f32 and b of 4 x f32)"), "{message}");
    }

    #[test]
    fn a_side_without_arrays_agrees_with_any_arrays() {
        let silent = Side { signature: None, ..side(1, &[], "f32") };
        assert!(silent.agrees_with(&side(0, &[3], "f32")));
        assert!(!Side { tag: CollectiveTag::new("norm", 4), ..silent }.agrees_with(&side(
            0,
            &[3],
            "f32"
        )));
    }

    #[test]
    fn a_timeout_lists_the_absent_and_where_they_were() {
        let call = Call {
            sequence: 9,
            operation: Operation::Barrier,
            tag: CollectiveTag::new("end of step", 4),
        };
        let absent = vec![
            Absence { rank: 1, host: None, last: Some(call.clone()) },
            Absence { rank: 3, host: Some("b".into()), last: None },
        ];
        let error = CommError::Timeout {
            rank: 0,
            call: Box::new(call),
            waited: Duration::from_millis(1500),
            absent,
        };
        let expected = "rank 0 waited 1.500 s in collective 9 (barrier of end of step#4) for rank \
                        1, last seen in collective 9 (barrier of end of step#4) and rank 3 on b, which \
                        has started no collective; ";
        assert!(error.to_string().starts_with(expected), "{error}");
    }
}
