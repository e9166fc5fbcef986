//! Control messages between ranks: greetings, headers, failures and farewells. They are small, may
//! arrive at any time, and are encoded with `postcard`.

use deepburn_comm::{CommError, Form, GroupId, MessageContents, MessageRoute, Side};
use serde::{Deserialize, Serialize};

/// A message with the number of its run. A process can take part in several runs, and messages from
/// earlier runs are ignored.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Envelope {
    /// The number of the run, from 1.
    pub(crate) run: u32,
    pub(crate) message: ControlMessage,
}

/// What a rank tells another one beside data.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum ControlMessage {
    /// The identity of the rank. Sent once, before anything else.
    Hello(Hello),
    /// The arguments of the sender's next collective.
    Header(CallHeader),
    /// A message between two ranks, whose arrays follow on another channel.
    Letter(LetterHeader),
    /// A subgroup that the sender has created, with the world ranks of its members.
    Subgroup {
        /// The group.
        id: GroupId,
        /// The members in the order of the group.
        members: Vec<usize>,
    },
    /// The names of the sender's arrays, sent if headers disagree.
    Names(Vec<String>),
    /// The run has failed.
    Failed(CommError),
    /// The rank starts no more collectives in this run.
    Leave,
    /// The process is about to exit.
    Goodbye,
    /// A request to show that the process is alive.
    Ping,
    /// The answer to a ping.
    Pong,
}

/// The identity of a rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hello {
    /// The version of this crate and the byte order. All ranks must run the same build.
    pub(crate) build: String,
    /// The name of its host.
    pub(crate) host: String,
    /// The process-id namespace. Process ids can only be compared within the same namespace.
    pub(crate) namespace: String,
    /// The process id in that namespace.
    pub(crate) pid: i32,
}

/// The header of a collective, which every rank of a group sends to every other rank of the group.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct CallHeader {
    /// The group that runs the collective.
    pub(crate) group: GroupId,
    /// The number of the collective in the common order of the group.
    pub(crate) sequence: u64,
    /// The arguments of the collective, which must agree on all ranks.
    pub(crate) side: Side,
    /// The form and the length in bytes of each array that the sender will send to the receiver of
    /// this header.
    pub(crate) parts: Vec<(Form, u64)>,
}

/// The header of a message between two ranks.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct LetterHeader {
    /// The sender, the receiver and the tag.
    pub(crate) route: MessageRoute,
    /// The types and sizes of the arrays.
    pub(crate) contents: MessageContents,
    /// The encoded arrays.
    pub(crate) parts: Vec<LetterPart>,
    /// The maximum size of an MPI message in bytes. The receiver may be in another run, with other
    /// settings.
    pub(crate) piece: u64,
}

/// An encoded array of a message.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct LetterPart {
    /// The encoding.
    pub(crate) form: Form,
    /// The length in bytes.
    pub(crate) len: u64,
    /// The size of an element in bytes.
    pub(crate) element_size: u32,
}

/// Returns the first two ranks of the group that started different collectives; `None` if all
/// agree.
///
/// All calls are compared with the first call that has arrays, or with the first call if none has
/// arrays. Rank threads use the same rule.
pub(crate) fn disagreement(headers: &[CallHeader]) -> Option<(usize, usize)> {
    let reference = headers.iter().position(|header| header.side.signature.is_some()).unwrap_or(0);
    let differs = |header: &CallHeader| !headers[reference].side.agrees_with(&header.side);
    let other = headers.iter().position(differs)?;
    Some((reference.min(other), reference.max(other)))
}
