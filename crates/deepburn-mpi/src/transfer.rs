//! The exchange of the data of one collective or message, and the memory for sending and receiving.
//!
//! Arrays are split into messages of limited size, called pieces, because MPI counts bytes in 32
//! bits and very large messages are poorly supported. A [`Transfer`] owns all memory that MPI reads
//! and writes. If it is dropped before it is complete, that memory is leaked, because MPI may still
//! write to it.
//!
//! ```text
//! array of 2.5 GiB from rank 1, pieces of 1 GiB
//! | piece 0: 1 GiB | piece 1: 1 GiB | piece 2: 0.5 GiB |     three messages, in order
//!
//! array of an all-gather on rank 1
//! | segment of rank 0 | own bytes | segment of rank 2 | segment of rank 3 |     one allocation
//! ```
//!
//! Messages have no header. MPI delivers messages of one kind between two ranks in the order in
//! which they were sent ("Semantics of Point-to-Point Communication" in the MPI standard). Their
//! sizes are known from the headers of the collective or of the message.

use std::mem::ManuallyDrop;
use std::ops::Range;

use bytes::Bytes;
use deepburn_comm::{Form, Received};

use crate::library::{MessageKind, Mpi, MpiError, MpiRequest};

/// An array that is received in segments from several ranks.
#[derive(Debug)]
pub(crate) struct Incoming {
    /// The size of an element in bytes. The memory is aligned to this size.
    pub(crate) element_size: usize,
    /// The length of the array in bytes.
    pub(crate) len: usize,
    /// The sending rank of each range of bytes.
    pub(crate) segments: Vec<(usize, Range<usize>)>,
    /// The bytes that this rank contributes, with their offset in the array.
    pub(crate) own: Option<(usize, Bytes)>,
}

impl Incoming {
    /// Describes an array that is received completely from one rank, according to that rank's
    /// header.
    pub(crate) fn whole(from: usize, part: &(Form, u64), element_size: usize) -> Self {
        let (form, len) = (part.0, part.1 as usize);
        let element_size = if form == Form::SparseRows { 1 } else { element_size };
        Self { element_size, len, segments: vec![(from, 0..len)], own: None }
    }
}

/// Allocates memory for `len` bytes, aligned to elements of `element_size` bytes. The vector has
/// length 0 and `len` bytes of capacity. If `len` is not a multiple of the element size, the array
/// is received as bytes.
fn with_capacity(len: usize, element_size: usize) -> Received {
    match element_size {
        2 if len.is_multiple_of(2) => Received::Two(Vec::with_capacity(len / 2)),
        4 if len.is_multiple_of(4) => Received::Four(Vec::with_capacity(len / 4)),
        8 if len.is_multiple_of(8) => Received::Eight(Vec::with_capacity(len / 8)),
        _ => Received::One(Vec::with_capacity(len)),
    }
}

/// Returns the address of the first byte.
fn start_of(buffer: &mut Received) -> *mut u8 {
    match buffer {
        Received::One(elements) => elements.as_mut_ptr(),
        Received::Two(elements) => elements.as_mut_ptr().cast(),
        Received::Four(elements) => elements.as_mut_ptr().cast(),
        Received::Eight(elements) => elements.as_mut_ptr().cast(),
    }
}

/// Requests huge pages for a large array. The array is written once from beginning to end, and page
/// faults for 4 KiB pages would take longer than writing it.
fn prefer_huge_pages(start: *mut u8, len: usize) {
    const HUGE: usize = 2 << 20;
    let first = (start as usize).next_multiple_of(HUGE);
    let end = (start as usize + len) / HUGE * HUGE;
    #[cfg(target_os = "linux")]
    if first < end {
        // SAFETY: whole pages within one allocation of this process. The advice changes no content,
        // and one that is not taken changes nothing.
        unsafe { libc::madvise(first as *mut libc::c_void, end - first, libc::MADV_HUGEPAGE) };
    }
}

/// Pending sends and receives of one collective or message, with their memory.
///
/// Dropping it while requests are pending leaks the memory, because MPI may still access it and
/// there is no safe way to prevent this.
pub(crate) struct Transfer {
    /// The memory that MPI reads. Each entry is shared by its messages and, in a gather, by several
    /// receivers.
    sent: ManuallyDrop<Vec<Bytes>>,
    /// The memory that MPI writes, allocated without initialization. Every byte is written by a
    /// segment or by `own`.
    received: ManuallyDrop<Vec<Received>>,
    /// The length of each received array in bytes.
    lens: Vec<usize>,
    /// The pending requests, each with the other rank. Complete requests are removed.
    requests: Vec<(usize, MpiRequest)>,
}

impl Transfer {
    /// Starts to send `outgoing`, each with its receiving rank, and to receive `incoming`. Messages
    /// are at most `piece` bytes.
    ///
    /// Receives are started first, so that arriving data can be written to its final memory. Both
    /// sides must list the messages between them in the same order and use the same `piece`.
    ///
    /// # Errors
    /// Returns an error if MPI fails.
    pub(crate) fn start(
        mpi: &Mpi,
        kind: MessageKind,
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
        // Receives are started first, because MPI makes an additional copy of a message that
        // arrives before its receive.
        for array in incoming {
            transfer.receive(mpi, kind, array, piece)?;
        }
        for (to, bytes) in outgoing {
            for message in bytes.chunks(piece) {
                // SAFETY: `sent` keeps the bytes until the transfer is complete, or forever.
                let request = unsafe { mpi.send(message, to, kind)? };
                transfer.requests.push((to, request));
            }
            transfer.sent.push(bytes);
        }
        Ok(transfer)
    }

    /// Allocates an array, starts to receive its segments and copies this rank's own bytes to it.
    ///
    /// # Panics
    /// Panics if segments and own bytes do not cover the array exactly, because the array would
    /// contain uninitialized memory.
    fn receive(
        &mut self,
        mpi: &Mpi,
        kind: MessageKind,
        array: Incoming,
        piece: usize,
    ) -> Result<(), MpiError> {
        let mut buffer = with_capacity(array.len, array.element_size);
        let start = start_of(&mut buffer);
        prefer_huge_pages(start, array.len);
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
                // memory until the transfer is complete, or forever.
                let request = unsafe { mpi.receive(start.add(at), len, from, kind)? };
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

    /// Lets MPI make progress. Returns true if everything was sent and received.
    ///
    /// MPI transfers large messages only while it is called, so waits must call this frequently.
    ///
    /// # Errors
    /// Returns an error if MPI fails for one of the messages.
    pub(crate) fn advance(&mut self, mpi: &Mpi) -> Result<bool, MpiError> {
        let mut failure = None;
        self.requests.retain_mut(|(_, request)| match mpi.is_complete(request) {
            Ok(complete) => !complete,
            Err(error) => {
                // The request is kept, so that its memory is not freed while MPI may use it.
                failure.get_or_insert(error);
                true
            }
        });
        failure.map_or(Ok(self.requests.is_empty()), Err)
    }

    /// Returns the ranks with pending messages, sorted and without duplicates.
    pub(crate) fn unfinished(&self) -> Vec<usize> {
        let mut ranks: Vec<_> = self.requests.iter().map(|(rank, _)| *rank).collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }

    /// Returns the received arrays in the order of `incoming`, and frees the memory that was sent.
    ///
    /// # Panics
    /// Panics if a message is pending.
    pub(crate) fn finish(mut self) -> Vec<Received> {
        assert!(self.requests.is_empty(), "the transfer is complete");
        // SAFETY: nothing is under way, neither is used again.
        let (sent, mut received) =
            unsafe { (ManuallyDrop::take(&mut self.sent), ManuallyDrop::take(&mut self.received)) };
        drop(sent);
        for (buffer, len) in received.iter_mut().zip(&self.lens) {
            // SAFETY: segments and own bytes cover all `len` bytes of the allocation, and all of
            // them have been written.
            unsafe {
                match buffer {
                    Received::One(elements) => elements.set_len(*len),
                    Received::Two(elements) => elements.set_len(len / 2),
                    Received::Four(elements) => elements.set_len(len / 4),
                    Received::Eight(elements) => elements.set_len(len / 8),
                }
            }
        }
        received
    }
}
