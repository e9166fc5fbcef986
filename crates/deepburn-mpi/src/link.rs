//! The communication thread's connection to the other ranks. It tracks which ranks have reached a
//! collective, which have left the run, and which failures have occurred.
//!
//! A [`Link`] is owned by the communication thread. Every wait uses one loop (`wait_until`), which
//! also receives control messages, checks the processes on this host and checks the time. A wait
//! therefore ends when its condition is true, when any rank fails, or at the time-out. It never
//! hangs.
//!
//! ```text
//! rank 0                              rank 1
//!   Hello  ------------------------->   the same in the other direction, before anything else
//!   begin(run)
//!   Header (collective 0, sizes) ---->  every rank of the group sends its header to every other
//!   Data                         ---->  only after all headers agree
//!   Letter (tag, sizes), arrays  ---->  a message, at any time, also within a collective
//!   Header (collective 1, sizes) ---->
//!   ...
//!   Leave  ------------------------->   no more collectives in this run
//!   Goodbye ------------------------>   the process ends; MPI_Finalize follows
//! ```
//!
//! Each failure has one reporter, the rank that prints it. A death is reported by the first rank
//! that claims the report ([`Neighbors::claim_report`]). If several ranks can detect another
//! failure, each of them waits for a time that increases with its rank number. The report of the
//! lowest rank thus arrives before the other ranks would send theirs.
//!
//! mpirun ends all processes as soon as the first one has exited, so the other ranks stay alive for
//! a moment until the reporter has printed. Only mpirun notices the death of a process on another
//! host, and then ends all ranks with SIGTERM. Each rank prints the collective and the ranks that
//! it waits for, from its own thread, because Open MPI may block the communication thread in a call
//! on the broken connection.
//!
//! If headers disagree, all ranks find the same first pair and return the same error as rank
//! threads. Subgroups need no communicators: headers go to the members only, and each rank
//! announces its subgroups, so that different lists of members are found.
//!
//! | Failure | Noticed by | Error |
//! |---|---|---|
//! | a rank's own error or panic | the rank, which sends `Failed` | the rank's error |
//! | different collectives | all ranks, from the headers | `CommError::Mismatch` |
//! | a rank that has left is needed | the waiting ranks, from `Leave` | `CommError::Left` |
//! | a process died | the ranks on its host | `CommError::Died` |
//! | a rank does not arrive in time | the waiting ranks | `CommError::Timeout` |
//! | a process hangs, without a time-out | the waiting ranks, by `Ping` | `CommError::Timeout` |

mod current_run;
mod group_link;
mod letters;
mod liveness;

use std::collections::{HashMap, VecDeque};
use std::fmt::Display;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use deepburn_comm::{Absence, Call, CommError, Form, GroupId, GroupRanks, Received, Side};

use crate::backoff::Backoff;
use crate::control::{CallHeader, ControlMessage, Envelope, Hello, disagreement};
use crate::deadline::Deadline;
use crate::letters::Letters;
use crate::library::{MessageKind, Mpi, MpiError, Posted};
use crate::neighbors::Neighbors;
use crate::settings::Settings;
use crate::status::{RunStatus, Wait};
use crate::transfer::{Incoming, Transfer};
use current_run::CurrentRun;
pub(crate) use group_link::GroupLink;
use letters::LetterTransfers;
use liveness::ProcessWatch;

/// The time between the reports of consecutive ranks that detect the same failure. It is long
/// enough for the report of the first rank to reach the others before they would send theirs, and
/// for the last messages of a process that has died.
const REPORT_DELAY: Duration = Duration::from_millis(40);
/// The time that ranks with different collectives wait for the names of each other's arrays, which
/// are only used to improve the error message.
const NAMES_TIMEOUT: Duration = Duration::from_secs(5);

/// The maximum delay of a report. Without this limit, the last rank of a large job would wait for
/// minutes.
const LAST_TURN: Duration = Duration::from_secs(1);
/// Returns the time that a rank waits for lower ranks to report a failure that all of them detect
/// at the same time.
pub(crate) fn turn(rank: usize) -> Duration {
    LAST_TURN.min(REPORT_DELAY * rank.min(1000) as u32)
}

/// The state of the connection to all ranks.
pub(crate) struct Link {
    /// MPI, which only this thread calls.
    mpi: Mpi,
    /// The state of the run, shared with the rank's own thread.
    status: Arc<RunStatus>,
    /// The messages of the rank, shared with its own thread.
    letters: Arc<Letters>,
    /// The messages that are under way.
    transfers: LetterTransfers,
    /// The state of all ranks, by rank number. The entry of this rank only contains its greeting.
    peers: Vec<Peer>,
    /// What detects processes that have died or hang.
    watch: ProcessWatch,
    /// Control messages that are being sent, with their receivers. MPI reads their memory until
    /// they are complete.
    outbox: Vec<(usize, Posted)>,
    /// Messages of a run that has not started on this rank yet.
    early: Vec<(usize, Envelope)>,
    /// The state of the current run.
    run: CurrentRun,
    /// Whether this rank has announced the failure of the run, or has been informed by the rank
    /// that reports it.
    announced: bool,
}

/// The known state of a rank.
#[derive(Debug, Default)]
struct Peer {
    /// Its greeting.
    hello: Option<Hello>,
    /// Its headers of collectives that this rank has not reached yet, in the common order of each
    /// group.
    headers: HashMap<GroupId, VecDeque<CallHeader>>,
    /// The members of the subgroups that it has created in this run.
    subgroups: HashMap<GroupId, Vec<usize>>,
    /// The names of its arrays, received if headers disagree.
    names: Option<Vec<String>>,
    /// The last collective that it has reached.
    last: Option<Call>,
    /// The time at which it announced that it starts no more collectives.
    left: Option<Instant>,
    /// Whether its process is about to exit.
    said_goodbye: bool,
    /// The time at which the end of its process was detected. Only processes on this host are
    /// watched.
    ended: Option<Instant>,
    /// The time of the first ping since its last message; `None` if it has answered.
    asked: Option<Instant>,
}

impl Peer {
    /// Returns true if it has not reached the next collective of a group.
    fn is_missing(&self, group: &GroupId) -> bool {
        self.headers.get(group).is_none_or(VecDeque::is_empty)
    }
}

impl Link {
    /// Sends a greeting to all ranks and waits until all ranks have sent theirs.
    ///
    /// # Errors
    /// Returns an error if a rank does not connect within 30 minutes, or if the ranks run different
    /// builds.
    pub(crate) fn connect(
        mpi: Mpi,
        own: Hello,
        status: Arc<RunStatus>,
        letters: Arc<Letters>,
    ) -> Result<Self, CommError> {
        let (rank, world_size) = (mpi.rank(), mpi.world_size());
        let mut link = Self {
            peers: (0..world_size).map(|_| Peer::default()).collect(),
            mpi,
            status,
            letters,
            transfers: LetterTransfers::default(),
            watch: ProcessWatch::default(),
            outbox: Vec::new(),
            early: Vec::new(),
            run: CurrentRun::default(),
            announced: false,
        };
        link.peers[rank].hello = Some(own.clone());
        link.post_all(|_| ControlMessage::Hello(own.clone()))?;
        link.wait_until(|link| {
            let missing = |peer: &Peer| peer.hello.is_none();
            Ok(if link.peers.iter().any(missing) { Err(link.ranks(missing)) } else { Ok(()) })
        })?;
        let hellos: Vec<_> = link.peers.iter().filter_map(|peer| peer.hello.clone()).collect();
        if let Some(other) = hellos.iter().position(|hello| hello.build != own.build) {
            let reason = format!(
                "rank {rank} on {} runs {}, but rank {other} on {} runs {}; start the same program \
                 on all hosts",
                own.host, own.build, hellos[other].host, hellos[other].build
            );
            return Err(CommError::Transport { rank, reason });
        }
        let others = hellos.iter().enumerate().filter(|(other, _)| *other != rank);
        link.watch.neighbors = Neighbors::new(&own, &others.collect::<Vec<_>>());
        Ok(link)
    }

    /// Returns the rank, from 0.
    pub(crate) fn rank(&self) -> usize {
        self.mpi.rank()
    }

    /// Returns the number of ranks.
    pub(crate) fn world_size(&self) -> usize {
        self.mpi.world_size()
    }

    /// Returns the host of each rank.
    pub(crate) fn hosts(&self) -> Vec<Arc<str>> {
        let host = |peer: &Peer| peer.hello.as_ref().map_or("", |hello| &hello.host).into();
        self.peers.iter().map(host).collect()
    }

    /// Starts a run of all ranks with a new common order. Messages of this run that arrived early
    /// are handled now.
    pub(crate) fn begin(&mut self, run: u32, settings: Settings) {
        // What was sent in the run that ends keeps its number. A failure is in the status.
        let _ = self.send_letters();
        self.run = CurrentRun::new(run, settings);
        self.transfers.begin();
        for peer in &mut self.peers {
            peer.headers.clear();
            peer.subgroups.clear();
            (peer.last, peer.names) = (None, None);
            // A process that has sent `Goodbye` does not take part in later runs.
            peer.left = peer.left.filter(|_| peer.said_goodbye);
        }
        for (from, envelope) in std::mem::take(&mut self.early) {
            self.handle(from, envelope);
        }
    }

    /// Announces that this rank starts no more collectives in this run.
    ///
    /// # Errors
    /// Returns an error if MPI fails.
    pub(crate) fn leave(&mut self) -> Result<(), CommError> {
        // Messages that were sent before are announced before.
        self.send_letters()?;
        self.post_all(|_| ControlMessage::Leave)
    }

    /// Exchanges headers with all members of a group at its next collective and checks that they
    /// agree. Returns the headers in the order of the group. `parts` describes the arrays that this
    /// rank sends to the member with a given rank in the group.
    ///
    /// Headers act as a barrier: no rank sends data before all ranks have reached the collective.
    /// Receivers therefore know all sizes and can allocate memory before data arrives, and no data
    /// is sent if ranks disagree.
    ///
    /// # Errors
    /// Returns an error if ranks disagree, fail, have left or do not arrive in time.
    pub(crate) fn meet(
        &mut self,
        ranks: &GroupRanks,
        side: &Side,
        parts: impl Fn(usize) -> Vec<(Form, u64)>,
    ) -> Result<Vec<CallHeader>, CommError> {
        let (group, rank) = (ranks.id(), self.rank());
        let call = self.run.reach(group, side);
        self.note_wait(&self.remote_ranks(ranks, |peer| peer.is_missing(group)));
        self.listen()?;
        let header = |position| {
            let (group, side) = (group.clone(), side.clone());
            CallHeader { group, sequence: call.sequence, side, parts: parts(position) }
        };
        let others = || ranks.members().iter().copied().enumerate().filter(|it| it.1 != rank);
        others().try_for_each(|(position, to)| {
            self.post(to, ControlMessage::Header(header(position)))
        })?;
        self.wait_until(|link| {
            let missing = others().map(|(_, other)| other);
            let missing: Vec<_> =
                missing.filter(|other| link.peers[*other].is_missing(group)).collect();
            // Several ranks may detect this at the same time, so each of them gives lower ranks
            // time to report it first.
            let noticed = |left: Instant| left.elapsed() >= turn(rank);
            let gone = |other: &&usize| link.peers[**other].left.is_some_and(noticed);
            if let Some(&left) = missing.iter().find(gone) {
                let call = Box::new(call.clone());
                return Err(CommError::Left { rank: left, waiting: rank, call });
            }
            Ok(if missing.is_empty() { Ok(()) } else { Err(missing) })
        })?;
        let mut headers: Vec<_> = others()
            .filter_map(|(_, other)| self.peers[other].headers.get_mut(group)?.pop_front())
            .collect();
        // In the order of the group, in which all ranks compare the calls.
        headers.insert(ranks.rank(), header(ranks.rank()));
        match disagreement(&headers) {
            None => Ok(headers),
            Some((left, right)) => Err(self.mismatch(ranks, &headers, left, right)),
        }
    }

    /// Sends `outgoing`, each with its receiving rank, and returns the arrays that `incoming`
    /// describes, for a collective of the group `ranks`.
    ///
    /// # Errors
    /// Returns an error if a rank fails or at the time-out.
    pub(crate) fn exchange(
        &mut self,
        ranks: &GroupRanks,
        outgoing: Vec<(usize, Bytes)>,
        incoming: Vec<Incoming>,
    ) -> Result<Vec<Received>, CommError> {
        self.note_wait(&self.remote_ranks(ranks, |_| true));
        let (kind, piece) = (MessageKind::Data, self.run.settings.piece);
        let started = Transfer::start(&self.mpi, kind, outgoing, incoming, piece);
        let mut transfer = started.map_err(|error| self.broken(error))?;
        self.wait_until(|link| {
            let done = transfer.advance(&link.mpi).map_err(|error| link.broken(error))?;
            Ok(if done { Ok(()) } else { Err(transfer.unfinished()) })
        })?;
        Ok(transfer.finish())
    }

    /// Handles the control messages that have arrived, starts and completes messages between ranks,
    /// and checks the processes of this host at intervals. Announces a failure of the run if this
    /// rank reports it.
    ///
    /// # Errors
    /// Returns the failure that ended the run.
    pub(crate) fn listen(&mut self) -> Result<(), CommError> {
        if let Err(error) = self.receive().and_then(|()| self.look()) {
            let cause = self.broken(error);
            self.announce(&cause);
            return Err(cause);
        }
        if self.status.cause().is_none() {
            // A failure is stored in the status.
            let _ = self.progress_letters();
        }
        let Some(cause) = self.status.cause() else { return Ok(()) };
        self.announce(&cause);
        Err(cause)
    }

    /// Sends `Goodbye` and finalizes MPI. `MPI_Finalize` waits for all ranks and cannot be
    /// interrupted, so it is only called after all ranks have sent `Goodbye`.
    ///
    /// # Errors
    /// Returns an error if a rank does not arrive or MPI fails.
    pub(crate) fn finalize(mut self) -> Result<(), CommError> {
        self.post_all(|_| ControlMessage::Goodbye)?;
        self.wait_until(|link| {
            let missing = |peer: &Peer| !peer.said_goodbye;
            let mut missing = link.ranks(missing);
            // All messages have been announced before the farewells.
            let complete = link.transfers.is_empty() && link.letters.is_empty();
            missing.extend(link.transfers.unfinished());
            let done = missing.is_empty() && complete && link.outbox.is_empty();
            Ok(if done { Ok(()) } else { Err(missing) })
        })?;
        let rank = self.rank();
        let broken = |error: MpiError| CommError::Transport { rank, reason: error.to_string() };
        self.mpi.finalize().map_err(broken)
    }

    /// Returns true if all live ranks have been informed of the failure of this run. Messages to a
    /// process that has died never complete, so they are ignored.
    pub(crate) fn has_announced(&self) -> bool {
        let sent = |(to, _): &(usize, Posted)| self.peers[*to].ended.is_some();
        self.announced && self.outbox.iter().all(sent)
    }

    /// Receives the control messages that have arrived, and frees the memory of messages that have
    /// been sent.
    ///
    /// # Errors
    /// Returns an error if MPI fails or a message cannot be decoded.
    fn receive(&mut self) -> Result<(), MpiError> {
        let mut failure = None;
        let mpi = &self.mpi;
        self.outbox.retain_mut(|(_, posted)| {
            let complete = posted.is_complete(mpi);
            !complete.unwrap_or_else(|error| {
                failure.get_or_insert(error);
                // The message is kept, because MPI may still read its memory.
                false
            })
        });
        failure.map_or(Ok(()), Err)?;
        while let Some((from, bytes)) = self.mpi.take_arrived()? {
            match postcard::from_bytes(&bytes) {
                Ok(envelope) => self.handle(from, envelope),
                Err(error) => {
                    let len = bytes.len();
                    let reason =
                        format!("{len} bytes from rank {from} are not a valid message ({error})");
                    return Err(MpiError::Call { call: "reading a control message", reason });
                }
            }
        }
        Ok(())
    }

    /// Handles a control message. Messages of earlier runs are ignored, and messages of later runs
    /// are stored. Messages that concern the process rather than a run are always handled.
    fn handle(&mut self, from: usize, envelope: Envelope) {
        let Envelope { run, message } = envelope;
        let peer = &mut self.peers[from];
        peer.asked = None;
        match message {
            ControlMessage::Hello(hello) => peer.hello = Some(hello),
            ControlMessage::Goodbye => {
                peer.said_goodbye = true;
                peer.left.get_or_insert_with(Instant::now);
                self.transfers.leave(from, true);
            }
            ControlMessage::Ping => {
                // A lost answer is harmless, because the other rank will send another ping.
                let _ = self.post(from, ControlMessage::Pong);
            }
            // The arrays of all runs are received, because the channel keeps their order.
            ControlMessage::Letter(header) => self.transfers.announce(run, header),
            message if run > self.run.number => self.early.push((from, Envelope { run, message })),
            _ if run < self.run.number => {}
            ControlMessage::Header(header) => {
                let (operation, tag) = (header.side.operation, header.side.tag.clone());
                let call = Call { sequence: header.sequence, operation, tag };
                self.letters.set_last(run, from, &call);
                peer.last = Some(call);
                peer.headers.entry(header.group.clone()).or_default().push_back(header);
            }
            ControlMessage::Subgroup { id, members } => self.note_subgroup(from, id, members),
            ControlMessage::Names(names) => peer.names = Some(names),
            ControlMessage::Leave => {
                peer.left = Some(Instant::now());
                self.transfers.leave(from, false);
            }
            ControlMessage::Failed(cause) => self.status.fail(from, cause),
            ControlMessage::Pong => {}
        }
    }

    /// Sends the failure of the run to the other ranks, once, if this rank is its reporter.
    fn announce(&mut self, cause: &CommError) {
        if std::mem::replace(&mut self.announced, true) || !self.status.is_reporter(self.rank()) {
            return;
        }
        // Ranks that do not receive this message detect the failure themselves.
        let _ = self.post_all(|_| ControlMessage::Failed(cause.clone()));
    }

    /// Returns the error for two ranks that started different collectives, with the names of the
    /// arrays of both sides. All ranks return the same error.
    ///
    /// Headers do not contain array names, because the names would make up most of a header. Names
    /// are only exchanged here. If they do not arrive within [`NAMES_TIMEOUT`], the error shows the
    /// numbers of the exchanges instead.
    fn mismatch(
        &mut self,
        ranks: &GroupRanks,
        headers: &[CallHeader],
        left: usize,
        right: usize,
    ) -> CommError {
        let names = |header: &CallHeader| -> Vec<String> {
            header.side.tag.names().iter().map(ToString::to_string).collect()
        };
        let (rank, sequence) = (self.rank(), headers[left].sequence);
        let own = names(&headers[ranks.rank()]);
        self.peers[rank].names = Some(own.clone());
        let timeout = std::mem::replace(&mut self.run.settings.timeout, NAMES_TIMEOUT);
        let mut others = ranks.members().iter().copied().filter(|other| *other != rank);
        let told =
            others.try_for_each(|other| self.post(other, ControlMessage::Names(own.clone())));
        let told = told.and_then(|()| {
            self.wait_until(|link| {
                let is_member = |other: &usize| ranks.position(*other).is_some();
                let missing = link.ranks(|peer| peer.names.is_none());
                let missing: Vec<_> = missing.into_iter().filter(is_member).collect();
                Ok(if missing.is_empty() { Ok(()) } else { Err(missing) })
            })
        });
        self.run.settings.timeout = timeout;
        if let Err(failure) = told {
            tracing::debug!(%failure, "ranks that disagree could not exchange the names of arrays");
        }
        let side = |position: usize| {
            let names = self.peers[ranks.members()[position]].names.iter().flatten();
            let mut side = headers[position].side.clone();
            side.tag = side.tag.naming(names.map(|name| Arc::from(name.as_str())));
            Box::new(side)
        };
        let cause = CommError::Mismatch { sequence, left: side(left), right: side(right) };
        // All ranks have detected the same mismatch. The lower rank of the two sides reports it.
        self.status.fail(ranks.members()[left], cause.clone());
        cause
    }

    /// Waits until `poll` returns `Ok(Ok(..))`. Until then, `poll` returns the missing ranks.
    ///
    /// Each iteration receives control messages, calls `poll`, and then makes these checks in
    /// order. If this process was suspended, the deadline is extended by that time. If the deadline
    /// has passed, the wait fails. In a run without a time-out, the wait fails if a missing rank no
    /// longer answers pings. The pauses between iterations increase to half a millisecond
    /// (`Backoff`).
    ///
    /// # Errors
    /// Returns the failure of the run: another rank's, a failure of `poll`, or missing ranks at the
    /// deadline.
    fn wait_until<R>(
        &mut self,
        mut poll: impl FnMut(&mut Self) -> Result<Result<R, Vec<usize>>, CommError>,
    ) -> Result<R, CommError> {
        let rank = self.rank();
        let limit = self.run.settings.timeout.saturating_add(turn(rank));
        let mut deadline = Deadline::after(limit);
        let mut backoff = Backoff::default();
        loop {
            self.listen()?;
            let absent = match poll(self) {
                Ok(Ok(result)) => {
                    self.status.set_wait(None);
                    return Ok(result);
                }
                Ok(Err(absent)) => absent,
                Err(cause) => return Err(self.failed(cause)),
            };
            if deadline.has_passed() {
                return Err(self.late(&absent, self.run.settings.timeout));
            }
            self.ping(&absent)?;
            if backoff.is_long() {
                self.note_wait(&absent);
            }
            backoff.pause();
        }
    }

    /// Stores the collective and the missing ranks in the run's status, from which the rank's own
    /// thread reads them. This is necessary because the next MPI call may block for seconds if the
    /// process of a peer has died.
    fn note_wait(&self, absent: &[usize]) {
        let (call, absent) = (self.run.current.clone(), self.absences(absent));
        self.status.set_wait(Some(Wait { call, absent }));
    }

    /// Returns the host and the last known collective of missing ranks, for an error message.
    fn absences(&self, ranks: &[usize]) -> Vec<Absence> {
        let seen = |&rank: &usize| {
            let Peer { hello, last, .. } = &self.peers[rank];
            let host = hello.as_ref().map(|hello| hello.host.clone());
            Absence { rank, host, last: last.clone().map(|call| self.run.with_names(call)) }
        };
        ranks.iter().map(seen).collect()
    }

    /// Ends the run because `absent` ranks did not arrive within `waited`.
    fn late(&mut self, absent: &[usize], waited: Duration) -> CommError {
        let rank = self.rank();
        let absent = self.absences(absent);
        self.failed(match self.run.current.clone() {
            Some(call) => CommError::Timeout { rank, call: Box::new(call), waited, absent },
            None => CommError::Unconnected { rank, waited, absent },
        })
    }

    /// Ends the run with a failure that this rank has detected. Returns the failure that ended the
    /// run, which may be an earlier failure.
    fn failed(&mut self, cause: CommError) -> CommError {
        self.status.fail(self.rank(), cause.clone());
        let cause = self.status.cause().unwrap_or(cause);
        self.announce(&cause);
        cause
    }

    /// Ends the run with an MPI failure and returns it.
    fn broken(&self, error: impl Display) -> CommError {
        let cause = CommError::Transport { rank: self.rank(), reason: error.to_string() };
        self.status.fail(self.rank(), cause.clone());
        cause
    }

    /// Sends a message to every other rank, without waiting.
    ///
    /// # Errors
    /// Returns an error if MPI fails.
    fn post_all(&mut self, message: impl Fn(usize) -> ControlMessage) -> Result<(), CommError> {
        let own = self.rank();
        (0..self.world_size())
            .filter(|rank| *rank != own)
            .try_for_each(|rank| self.post(rank, message(rank)))
    }

    /// Sends a message to a rank, without waiting. The message stays in the outbox until MPI has
    /// sent it.
    ///
    /// # Errors
    /// Returns an error if MPI fails.
    fn post(&mut self, to: usize, message: ControlMessage) -> Result<(), CommError> {
        let envelope = Envelope { run: self.run.number, message };
        let bytes = postcard::to_allocvec(&envelope).map_err(|error| self.broken(error))?;
        let posted =
            Posted::send(&self.mpi, bytes.into(), to).map_err(|error| self.broken(error))?;
        self.outbox.push((to, posted));
        Ok(())
    }

    /// Returns the members of a group on other hosts for which `holds` is true. The end of a
    /// process on this host is detected immediately, so waits for it do not have to be recorded.
    fn remote_ranks(&self, group: &GroupRanks, holds: impl Fn(&Peer) -> bool) -> Vec<usize> {
        let host = |rank: usize| self.peers[rank].hello.as_ref().map(|hello| &hello.host);
        let own = host(self.rank());
        let mut ranks = self.ranks(holds);
        ranks.retain(|rank| host(*rank) != own && group.position(*rank).is_some());
        ranks
    }

    /// Returns the other ranks for which `holds` is true.
    fn ranks(&self, holds: impl Fn(&Peer) -> bool) -> Vec<usize> {
        let own = self.rank();
        let others = self.peers.iter().enumerate().filter(|(rank, _)| *rank != own);
        others.filter(|(_, peer)| holds(peer)).map(|(rank, _)| rank).collect()
    }
}
