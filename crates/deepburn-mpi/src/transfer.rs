//! The data of one collective on its way: what is sent, what is received, and the memory of both.
//!
//! Messages are cut into pieces, because MPI counts bytes in 32 bits and because very large messages
//! are badly supported. A [`Transfer`] owns all memory that MPI reads and writes. If it is given up
//! before it is complete, that memory is leaked: MPI may still write to it.

use std::mem::ManuallyDrop;
use std::ops::Range;

use bytes::Bytes;

use crate::library::{Kind, Mpi, MpiError, Request};

/// An array that is received, in segments of several ranks.
#[derive(Debug)]
pub(crate) struct Incoming {
    /// Bytes of the whole array.
    pub(crate) len: usize,
    /// Which rank sends which bytes of it.
    pub(crate) segments: Vec<(usize, Range<usize>)>,
    /// Bytes that are there already: where they begin, and they.
    pub(crate) own: Option<(usize, Bytes)>,
}

impl Incoming {
    /// An array that comes from one rank.
    pub(crate) fn whole(from: usize, len: usize) -> Self {
        Self { len, segments: vec![(from, 0..len)], own: None }
    }
}

/// Sends and receives that are under way.
pub(crate) struct Transfer {
    sent: ManuallyDrop<Vec<Bytes>>,
    /// Allocated and not initialised; every byte is written by a segment or by `own`.
    received: ManuallyDrop<Vec<Vec<u8>>>,
    lens: Vec<usize>,
    /// With the rank that each has to do with; complete ones are removed.
    requests: Vec<(usize, Request)>,
}

impl Transfer {
    /// Starts to send `outgoing`, each to a rank, and to receive `incoming`. Both sides list the
    /// messages between them in the same order.
    pub(crate) fn start(
        mpi: &Mpi,
        outgoing: Vec<(usize, Bytes)>,
        incoming: Vec<Incoming>,
        piece: usize,
    ) -> Result<Self, MpiError> {
        let mut transfer = Self {
            sent: ManuallyDrop::new(Vec::with_capacity(outgoing.len())),
            received: ManuallyDrop::new(Vec::with_capacity(incoming.len())),
            lens: incoming.iter().map(|array| array.len).collect(),
            requests: Vec::new(),
        };
        for array in incoming {
            transfer.receive(mpi, array, piece)?;
        }
        for (to, bytes) in outgoing {
            for message in bytes.chunks(piece) {
                // SAFETY: `sent` keeps the bytes until the transfer is complete, or for ever.
                let request = unsafe { mpi.send(message, to, Kind::Data)? };
                transfer.requests.push((to, request));
            }
            transfer.sent.push(bytes);
        }
        Ok(transfer)
    }

    fn receive(&mut self, mpi: &Mpi, array: Incoming, piece: usize) -> Result<(), MpiError> {
        let mut buffer: Vec<u8> = Vec::with_capacity(array.len);
        let start = buffer.as_mut_ptr();
        // Moving the vector does not move its elements.
        self.received.push(buffer);
        let covered: usize = array.segments.iter().map(|(_, range)| range.len()).sum();
        let own = array.own.as_ref().map_or(0, |(_, bytes)| bytes.len());
        assert_eq!(covered + own, array.len, "an array is received whole");
        for (from, range) in array.segments {
            assert!(range.end <= array.len, "segments lie within their array");
            let mut at = range.start;
            while at < range.end {
                let len = piece.min(range.end - at);
                // SAFETY: within the allocation; segments are disjoint, and `received` keeps the
                // memory until the transfer is complete, or for ever.
                let request = unsafe { mpi.receive(start.add(at), len, from, Kind::Data)? };
                self.requests.push((from, request));
                at += len;
            }
        }
        if let Some((at, bytes)) = array.own {
            assert!(at + bytes.len() <= array.len, "own bytes lie within their array");
            // SAFETY: within the allocation, and in no segment.
            unsafe { start.add(at).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        }
        Ok(())
    }

    /// Lets MPI make progress; whether everything has been sent and received.
    pub(crate) fn advance(&mut self, mpi: &Mpi) -> Result<bool, MpiError> {
        let mut failure = None;
        self.requests.retain_mut(|(_, request)| match mpi.is_complete(request) {
            Ok(complete) => !complete,
            Err(error) => {
                failure.get_or_insert(error);
                true
            }
        });
        failure.map_or(Ok(self.requests.is_empty()), Err)
    }

    /// The ranks whose messages are not complete.
    pub(crate) fn unfinished(&self) -> Vec<usize> {
        let mut ranks: Vec<_> = self.requests.iter().map(|(rank, _)| *rank).collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }

    /// The arrays of a complete transfer.
    pub(crate) fn finish(mut self) -> Vec<Vec<u8>> {
        assert!(self.requests.is_empty(), "the transfer is complete");
        // SAFETY: nothing is under way, neither is used again.
        let (sent, mut received) =
            unsafe { (ManuallyDrop::take(&mut self.sent), ManuallyDrop::take(&mut self.received)) };
        drop(sent);
        for (buffer, len) in received.iter_mut().zip(&self.lens) {
            // SAFETY: segments and own bytes cover all `len` bytes of the allocation, and all of
            // them have been written.
            unsafe { buffer.set_len(*len) };
        }
        received
    }
}
