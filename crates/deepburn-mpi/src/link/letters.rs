//! Messages between two ranks, on the communication thread, and the subgroups that ranks announce.
//!
//! A message is a `Letter` header on the control channel and its arrays on a channel of their own.
//! The receiver starts to receive the arrays as soon as it has the header, whether or not its rank
//! has asked for the message. No message therefore waits for a receive, and a large one does not
//! delay collectives, whose data has another channel. Both channels keep the order between two
//! ranks, so arrays need no header.
//!
//! `progress_letters` runs in every iteration of every wait, and between waits.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};

use deepburn_comm::{
    CommError, Form, GroupId, GroupRanks, MessageContents, MessageRoute, panic_message,
};

use super::Link;
use crate::control::{ControlMessage, LetterHeader, LetterPart};
use crate::letters::{EncodedArray, Outgoing, ReceivedLetter};
use crate::library::{MessageKind, MpiError};
use crate::transfer::{Incoming, Transfer};

/// The messages that are under way.
#[derive(Default)]
pub(super) struct LetterTransfers {
    /// The arrays that are being sent.
    sending: Vec<Transfer>,
    /// Headers with their run whose arrays are not being received yet, in the order of arrival.
    announced: VecDeque<(u32, LetterHeader)>,
    /// The messages whose arrays are being received, in the order of their headers.
    arriving: Vec<Arriving>,
    /// The ranks that have left, and whether their process exits, until all of their messages are
    /// delivered.
    leaving: Vec<(usize, bool)>,
    /// Whether something was started or delivered since the last look.
    progressed: bool,
}

/// A message whose arrays are being received.
struct Arriving {
    run: u32,
    route: MessageRoute,
    contents: MessageContents,
    forms: Vec<Form>,
    transfer: Transfer,
}

impl LetterTransfers {
    /// Adds a header that has arrived.
    pub(super) fn announce(&mut self, run: u32, header: LetterHeader) {
        self.announced.push_back((run, header));
    }

    /// Starts a run, in which ranks that had left the run before take part again.
    pub(super) fn begin(&mut self) {
        self.leaving.retain(|(_, said_goodbye)| *said_goodbye);
    }

    /// Adds a rank that sends nothing more.
    pub(super) fn leave(&mut self, rank: usize, said_goodbye: bool) {
        self.leaving.push((rank, said_goodbye));
    }

    /// Returns true if nothing is under way.
    pub(super) fn is_empty(&self) -> bool {
        self.sending.is_empty() && self.announced.is_empty() && self.arriving.is_empty()
    }

    /// Returns the ranks of unfinished transfers.
    pub(super) fn unfinished(&self) -> Vec<usize> {
        let arriving = self.arriving.iter().map(|it| &it.transfer);
        let mut ranks: Vec<_> =
            self.sending.iter().chain(arriving).flat_map(Transfer::unfinished).collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }

    /// Returns true if no message from `rank` is under way.
    fn has_all_from(&self, rank: usize) -> bool {
        self.announced.iter().all(|(_, header)| header.route.from != rank)
            && self.arriving.iter().all(|arriving| arriving.route.from != rank)
    }
}

impl Link {
    /// Returns true if messages are under way or the rank waits for one, so that this thread has to
    /// look frequently.
    pub(crate) fn is_busy(&self) -> bool {
        !self.transfers.is_empty() || self.letters.is_urgent()
    }

    /// Returns true once after a message was started or delivered.
    pub(crate) fn take_progress(&mut self) -> bool {
        std::mem::take(&mut self.transfers.progressed)
    }

    /// Starts and completes messages, without waiting.
    ///
    /// # Errors
    /// Returns an error if MPI fails, or if another rank has created a subgroup of this rank with
    /// other members.
    pub(super) fn progress_letters(&mut self) -> Result<(), CommError> {
        self.send_letters()?;
        self.receive_letters().map_err(|error| self.broken(error))?;
        for (rank, said_goodbye) in std::mem::take(&mut self.transfers.leaving) {
            match self.transfers.has_all_from(rank) {
                true => self.letters.set_left(self.run.number, rank, said_goodbye),
                false => self.transfers.leaving.push((rank, said_goodbye)),
            }
        }
        Ok(())
    }

    /// Starts to send what the rank has queued.
    ///
    /// # Errors
    /// Returns an error if MPI fails, or if another rank has created a subgroup of this rank with
    /// other members.
    pub(super) fn send_letters(&mut self) -> Result<(), CommError> {
        while let Some(outgoing) = self.letters.next_outgoing(self.run.number) {
            self.transfers.progressed = true;
            match outgoing {
                Outgoing::Subgroup(ranks) => self.create_subgroup(ranks)?,
                Outgoing::Letter { route, contents, encode } => {
                    // Payload code may panic, and this may not be inside of a collective.
                    let arrays = catch_unwind(AssertUnwindSafe(encode)).map_err(|payload| {
                        let reason = panic_message(&*payload);
                        let cause = format!("panic while sending {}: {reason}", route.tag);
                        self.failed(CommError::PeerFailed { rank: route.from, cause })
                    })?;
                    self.send_letter(route, contents, arrays)?;
                }
            }
        }
        Ok(())
    }

    /// Sends the header of a message and starts to send its arrays.
    fn send_letter(
        &mut self,
        route: MessageRoute,
        contents: MessageContents,
        arrays: Vec<EncodedArray>,
    ) -> Result<(), CommError> {
        let (to, piece) = (route.to, self.run.settings.piece);
        let part = |(encoded, element_size): &EncodedArray| LetterPart {
            form: encoded.form,
            len: encoded.bytes.len() as u64,
            element_size: *element_size as u32,
        };
        let parts = arrays.iter().map(part).collect();
        self.post(
            to,
            ControlMessage::Letter(LetterHeader { route, contents, parts, piece: piece as u64 }),
        )?;
        let outgoing = arrays.into_iter().map(|(encoded, _)| (to, encoded.bytes)).collect();
        let started = Transfer::start(&self.mpi, MessageKind::Letter, outgoing, Vec::new(), piece);
        self.transfers.sending.push(started.map_err(|error| self.broken(error))?);
        Ok(())
    }

    /// Starts to receive the arrays of new headers, and delivers the messages that are complete.
    fn receive_letters(&mut self) -> Result<(), MpiError> {
        while let Some((run, header)) = self.transfers.announced.pop_front() {
            let LetterHeader { route, contents, parts, piece } = header;
            let incoming = |part: &LetterPart| {
                Incoming::whole(route.from, &(part.form, part.len), part.element_size as usize)
            };
            let (incoming, piece) = (parts.iter().map(incoming).collect(), piece as usize);
            let transfer =
                Transfer::start(&self.mpi, MessageKind::Letter, Vec::new(), incoming, piece)?;
            let forms = parts.iter().map(|part| part.form).collect();
            self.transfers.arriving.push(Arriving { run, route, contents, forms, transfer });
        }
        let mut sending = std::mem::take(&mut self.transfers.sending);
        while let Some(mut transfer) = sending.pop() {
            match transfer.advance(&self.mpi)? {
                true => drop(transfer.finish()),
                false => self.transfers.sending.push(transfer),
            }
        }
        let mut index = 0;
        while index < self.transfers.arriving.len() {
            let (earlier, rest) = self.transfers.arriving.split_at_mut(index);
            let complete = rest[0].transfer.advance(&self.mpi)?;
            // Messages of one route are delivered in the order of sending, even if a later one is
            // complete first.
            if complete && earlier.iter().all(|it| it.route != rest[0].route) {
                let Arriving { run, route, contents, forms, transfer } =
                    self.transfers.arriving.remove(index);
                let arrays = forms.into_iter().zip(transfer.finish()).collect();
                self.letters.deliver(run, route, ReceivedLetter { contents, arrays });
                self.transfers.progressed = true;
            } else {
                index += 1;
            }
        }
        Ok(())
    }

    /// Announces a subgroup of this rank and compares it with what its members have announced.
    fn create_subgroup(&mut self, ranks: GroupRanks) -> Result<(), CommError> {
        let (id, members) = (ranks.id().clone(), ranks.members().to_vec());
        self.post_all(|_| ControlMessage::Subgroup { id: id.clone(), members: members.clone() })?;
        let compare = |(other, peer): (usize, &super::Peer)| {
            ranks.disagreement(other, peer.subgroups.get(&id)?)
        };
        // A member that has not announced its group yet is compared when it does.
        let disagreement = self.peers.iter().enumerate().find_map(compare);
        self.run.subgroups.insert(id, ranks);
        disagreement.map_or(Ok(()), |cause| Err(self.disagree(cause)))
    }

    /// Stores the subgroup of another rank and compares it with the group of this rank.
    pub(super) fn note_subgroup(&mut self, from: usize, id: GroupId, members: Vec<usize>) {
        let own = self.run.subgroups.get(&id);
        if let Some(cause) = own.and_then(|ranks| ranks.disagreement(from, &members)) {
            self.disagree(cause);
        }
        self.peers[from].subgroups.insert(id, members);
    }

    /// Ends the run because two ranks disagree about a subgroup. Both detect it, and the lower one
    /// reports it.
    fn disagree(&self, cause: CommError) -> CommError {
        let reporter = match &cause {
            CommError::SubgroupMismatch { left, .. } => *left,
            _ => self.rank(),
        };
        self.status.fail(reporter, cause.clone());
        cause
    }
}
