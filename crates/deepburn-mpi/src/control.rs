//! The messages that keep ranks in step: greetings, headers, failures, partings.
//!
//! They are small, apart from the data, and may arrive at any time. Encoded with `postcard`.

use bytes::Bytes;
use deepburn_comm::{CommError, Form, Side};
use serde::{Deserialize, Serialize};

/// A message and the run of the job that it belongs to. A process may run ranks several times, one
/// run after the other; a message of a run that has ended means nothing.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Envelope {
    pub(crate) run: u32,
    pub(crate) message: Message,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Message {
    /// Sent once, before anything else.
    Hello(Hello),
    /// What a rank is about to exchange.
    Header(Header),
    /// The names of its arrays, sent where headers disagree.
    Names(Vec<String>),
    /// The run has failed.
    Failed(CommError),
    /// The rank starts no more collectives in this run.
    Leave,
    /// The process is about to end.
    Goodbye,
    /// Asks whether the process is alive.
    Ping,
    /// Answers a ping.
    Pong,
}

/// Identity of a rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hello {
    /// Version of this crate and byte order. Ranks must be the same build.
    pub(crate) build: String,
    /// Name of its host.
    pub(crate) host: String,
    /// Of processes with the same value, process numbers can be compared.
    pub(crate) namespace: String,
    pub(crate) pid: i32,
}

/// A rank's side of a collective.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Header {
    /// Number of the collective in the common order.
    pub(crate) sequence: u64,
    pub(crate) side: Side,
    /// Form and bytes of what it sends to the receiver of this header, array by array.
    pub(crate) parts: Vec<(Form, u64)>,
}

impl Envelope {
    pub(crate) fn encode(&self) -> Result<Bytes, postcard::Error> {
        postcard::to_allocvec(self).map(Bytes::from)
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, postcard::Error> {
        postcard::from_bytes(bytes)
    }
}

/// The first two ranks that have come for different collectives.
///
/// All are compared with the first that brought arrays, or else the first, as rank threads are.
pub(crate) fn disagreement(headers: &[Header]) -> Option<(usize, usize)> {
    let reference = headers.iter().position(|header| header.side.signature.is_some()).unwrap_or(0);
    let differs = |header: &Header| !headers[reference].side.agrees_with(&header.side);
    let other = headers.iter().position(differs)?;
    Some((reference.min(other), reference.max(other)))
}
