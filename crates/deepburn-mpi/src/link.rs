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
//!   Header (collective 0, sizes) ---->  every rank sends its header to every other
//!   Data                         ---->  only after all headers agree
//!   Header (collective 1, sizes) ---->
//!   ...
//!   Leave  ------------------------->   no more collectives in this run
//!   Goodbye ------------------------>   the process ends; MPI_Finalize follows
//! ```
//!
//! Each failure has one reporter, the rank that prints it. A death is reported by the
//! first rank that claims the report ([`Neighbours::claim_report`]). If several ranks can detect
//! another failure, each of them waits for a time that increases with its rank number. The report of
//! the lowest rank thus arrives before the other ranks would send theirs.
//!
//! | Failure | Noticed by | Error |
//! |---|---|---|
//! | a rank's own error or panic | the rank, which sends `Failed` | the rank's error |
//! | different collectives | all ranks, from the headers | `CommError::Mismatch` |
//! | a rank that has left is needed | the waiting ranks, from `Leave` | `CommError::Left` |
//! | a process died | the ranks on its host | `CommError::Died` |
//! | a rank does not arrive in time | the waiting ranks | `CommError::Timeout` |
//! | a process hangs, without a time-out | the waiting ranks, by `Ping` | `CommError::Timeout` |

use std::collections::VecDeque;
use std::fmt::Display;
use std::sync::Arc;
use std::time::{Duration, Instant};

use deepburn_comm::{Absence, Call, CommError, Form, Received, Side};

use crate::backoff::Backoff;
use crate::control::{CallHeader, Envelope, Hello, Message, disagreement};
use crate::library::{Mpi, MpiError, Posted};
use crate::neighbours::Neighbours;
use crate::settings::Settings;
use crate::status::{RunStatus, Wait};
use crate::transfer::{Incoming, Transfer};

/// The interval at which the processes on this host are checked.
const LOOK_INTERVAL: Duration = Duration::from_millis(5);
/// The time between the reports of consecutive ranks that detect the same failure. It is long
/// enough for the report of the first rank to reach the others before they would send theirs, and
/// for the last messages of a process that has died.
const REPORT_DELAY: Duration = Duration::from_millis(40);
/// The interval of pings in a run without a time-out.
///
/// In such a run a rank may download or compile something for hours, so a late rank is not a
/// failure. The communication thread of a working rank answers within milliseconds. A process that
/// is stopped or hangs does not answer.
const PING_INTERVAL: Duration = Duration::from_secs(2);
/// The time within which a rank must answer a ping.
const PING_TIMEOUT: Duration = Duration::from_secs(30);
/// If two iterations of a wait are further apart than this, this process is assumed to have been
/// suspended. The time in between does not count towards the time-out.
const SUSPENDED: Duration = Duration::from_millis(700);
/// The time that ranks with different collectives wait for the names of each other's arrays, which
/// are only used to improve the error message.
const NAMES_TIMEOUT: Duration = Duration::from_secs(5);

/// The maximum delay of a report. Without this limit, the last rank of a large job would wait for
/// minutes.
const LAST_TURN: Duration = Duration::from_secs(1);
/// The number of polls after which a message that is in shared memory has been received. A poll of
/// Open MPI without a result moves such messages into the queue that the next poll searches.
const POLLS: usize = 16;
/// The number of recent collectives of this rank whose array names are kept for messages about late
/// ranks.
const REMEMBERED: usize = 4;

/// Returns the time that a rank waits for lower ranks to report a failure that all of them detect
/// at the same time.
fn turn(rank: usize) -> Duration {
    LAST_TURN.min(REPORT_DELAY * rank.min(1000) as u32)
}

/// The state of the connection to all ranks.
pub(crate) struct Link {
    /// MPI, which only this thread calls.
    mpi: Mpi,
    /// The state of the run, shared with the rank's own thread.
    status: Arc<RunStatus>,
    /// The state of all ranks, by rank number. The entry of this rank only contains its greeting.
    peers: Vec<Peer>,
    /// The processes of this host.
    neighbours: Neighbours,
    /// The time of the last check of the processes of this host.
    last_look: Instant,
    /// The time of the last round of pings.
    last_ping: Instant,
    /// Control messages that are being sent, with their receivers. MPI reads their memory until
    /// they are complete.
    outbox: Vec<(usize, Posted)>,
    /// Messages of a run that has not started on this rank yet.
    early: Vec<(usize, Envelope)>,
    /// The number of the current run, from 1; 0 before the first one.
    run: u32,
    /// The time-out and the message size of the current run.
    settings: Settings,
    /// The number of this rank's next collective in the common order.
    next_sequence: u64,
    /// The collective that this rank has reached, if any.
    current: Option<Call>,
    /// This rank's last collectives, newest first, with the names of their arrays, which headers do
    /// not contain.
    recent: VecDeque<Call>,
    /// Whether this rank has announced the failure of the run, or has been informed by the rank
    /// that reports it.
    announced: bool,
}

/// The known state of a rank.
#[derive(Debug, Default)]
struct Peer {
    /// Its greeting.
    hello: Option<Hello>,
    /// Its headers of collectives that this rank has not reached yet, in the common order.
    headers: VecDeque<CallHeader>,
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

impl Link {
    /// Sends a greeting to all ranks and waits until all ranks have sent theirs.
    ///
    /// # Errors
    ///
    /// Returns an error if a rank does not connect within 30 minutes, or if the ranks run different
    /// builds.
    pub(crate) fn connect(mpi: Mpi, own: Hello, status: Arc<RunStatus>) -> Result<Self, CommError> {
        let (rank, world_size) = (mpi.rank(), mpi.world_size());
        let mut link = Self {
            peers: (0..world_size).map(|_| Peer::default()).collect(),
            mpi,
            status,
            neighbours: Neighbours::default(),
            last_look: Instant::now(),
            last_ping: Instant::now(),
            outbox: Vec::new(),
            early: Vec::new(),
            run: 0,
            settings: Settings::default(),
            next_sequence: 0,
            current: None,
            recent: VecDeque::new(),
            announced: false,
        };
        link.peers[rank].hello = Some(own.clone());
        link.post_all(|_| Message::Hello(own.clone()))?;
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
        link.neighbours = Neighbours::new(&own, &others.collect::<Vec<_>>());
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
        (self.run, self.settings) = (run, settings);
        (self.next_sequence, self.current) = (0, None);
        self.recent.clear();
        for peer in &mut self.peers {
            peer.headers.clear();
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
    ///
    /// Returns an error if MPI fails.
    pub(crate) fn leave(&mut self) -> Result<(), CommError> {
        self.post_all(|_| Message::Leave)
    }

    /// Exchanges headers with all ranks at the next collective and checks that they agree. Returns
    /// the headers of all ranks. `parts` describes the arrays that this rank sends to a given rank.
    ///
    /// Headers act as a barrier: no rank sends data before all ranks have reached the collective.
    /// Receivers therefore know all sizes and can allocate memory before data arrives, and no data
    /// is sent if ranks disagree.
    ///
    /// # Errors
    ///
    /// Returns an error if ranks disagree, fail, have left or do not arrive in time.
    pub(crate) fn meet(
        &mut self,
        side: &Side,
        parts: impl Fn(usize) -> Vec<(Form, u64)>,
    ) -> Result<Vec<CallHeader>, CommError> {
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        let (operation, tag) = (side.operation, side.tag.clone());
        let call = Call { sequence, operation, tag };
        self.recent.push_front(call.clone());
        self.recent.truncate(REMEMBERED);
        self.current = Some(call.clone());
        self.note_wait(&self.remote_ranks(|peer| peer.headers.is_empty()));
        self.listen()?;
        self.post_all(|rank| {
            Message::Header(CallHeader { sequence, side: side.clone(), parts: parts(rank) })
        })?;
        let own = CallHeader { sequence, side: side.clone(), parts: parts(self.rank()) };
        let rank = self.rank();
        self.wait_until(|link| {
            let missing = |peer: &Peer| peer.headers.is_empty();
            let missing: Vec<_> = link.ranks(missing);
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
        let mut headers: Vec<_> =
            self.peers.iter_mut().filter_map(|peer| peer.headers.pop_front()).collect();
        headers.insert(rank, own);
        match disagreement(&headers) {
            None => Ok(headers),
            Some((left, right)) => Err(self.mismatch(&headers, left, right)),
        }
    }

    /// Sends `outgoing`, each with its receiving rank, and returns the arrays that `incoming`
    /// describes.
    ///
    /// # Errors
    ///
    /// Returns an error if a rank fails or at the time-out.
    pub(crate) fn exchange(
        &mut self,
        outgoing: Vec<(usize, bytes::Bytes)>,
        incoming: Vec<Incoming>,
    ) -> Result<Vec<Received>, CommError> {
        self.note_wait(&self.remote_ranks(|_| true));
        let started = Transfer::start(&self.mpi, outgoing, incoming, self.settings.piece);
        let mut transfer = started.map_err(|error| self.broken(error))?;
        self.wait_until(|link| {
            let done = transfer.advance(&link.mpi).map_err(|error| link.broken(error))?;
            Ok(if done { Ok(()) } else { Err(transfer.unfinished()) })
        })?;
        Ok(transfer.finish())
    }

    /// Handles the control messages that have arrived, and checks the processes of this host at
    /// intervals. Announces a failure of the run if this rank reports it.
    ///
    /// # Errors
    ///
    /// Returns the failure that ended the run.
    pub(crate) fn listen(&mut self) -> Result<(), CommError> {
        if let Err(error) = self.receive().and_then(|()| self.look()) {
            let cause = self.broken(error);
            self.announce(&cause);
            return Err(cause);
        }
        let Some(cause) = self.status.cause() else { return Ok(()) };
        self.announce(&cause);
        Err(cause)
    }

    /// Sends `Goodbye` and finalizes MPI. `MPI_Finalize` waits for all ranks and cannot be
    /// interrupted, so it is only called after all ranks have sent `Goodbye`.
    ///
    /// # Errors
    ///
    /// Returns an error if a rank does not arrive or MPI fails.
    pub(crate) fn finalize(mut self) -> Result<(), CommError> {
        self.post_all(|_| Message::Goodbye)?;
        self.wait_until(|link| {
            let missing = |peer: &Peer| !peer.said_goodbye;
            let missing = link.ranks(missing);
            Ok(if missing.is_empty() && link.outbox.is_empty() { Ok(()) } else { Err(missing) })
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
    ///
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
        while let Some(arrived) = self.mpi.arrived()? {
            let bytes = self.mpi.take(&arrived)?;
            match Envelope::decode(&bytes) {
                Ok(envelope) => self.handle(arrived.from, envelope),
                Err(error) => {
                    let reason = format!(
                        "{} bytes from rank {} are not a valid message ({error})",
                        bytes.len(),
                        arrived.from
                    );
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
            Message::Hello(hello) => peer.hello = Some(hello),
            Message::Goodbye => {
                peer.said_goodbye = true;
                peer.left.get_or_insert_with(Instant::now);
            }
            Message::Ping => {
                // A lost answer is harmless, because the other rank will send another ping.
                let _ = self.post(from, Message::Pong);
            }
            message if run > self.run => self.early.push((from, Envelope { run, message })),
            _ if run < self.run => {}
            Message::Header(header) => {
                let (operation, tag) = (header.side.operation, header.side.tag.clone());
                peer.last = Some(Call { sequence: header.sequence, operation, tag });
                peer.headers.push_back(header);
            }
            Message::Names(names) => peer.names = Some(names),
            Message::Leave => peer.left = Some(Instant::now()),
            Message::Failed(cause) => self.status.fail(from, cause),
            Message::Pong => {}
        }
    }

    /// Checks the processes of this host at intervals. Ends the run if one of them has ended
    /// although other ranks still needed it.
    ///
    /// # Errors
    ///
    /// Returns an error if MPI fails or a message cannot be decoded.
    fn look(&mut self) -> Result<(), MpiError> {
        if self.last_look.elapsed() < LOOK_INTERVAL {
            return Ok(());
        }
        self.last_look = Instant::now();
        while let Some(rank) = self.neighbours.ended() {
            self.peers[rank].ended = Some(Instant::now());
        }
        let is_dead = |peer: &Peer| peer.ended.is_some() && peer.left.is_none();
        let Some(&rank) = self.ranks(is_dead).first() else { return Ok(()) };
        let since = self.peers[rank].ended.map(|ended| ended.elapsed()).unwrap_or_default();
        // The last message of the process may still be in flight.
        if since < REPORT_DELAY || self.status.cause().is_some() || !self.neighbours.claim_report()
        {
            return Ok(());
        }
        // A process that held the claim before, and has exited, has sent its report.
        for _ in 0..POLLS {
            self.receive()?;
        }
        let Peer { hello, last, .. } = &self.peers[rank];
        let host = hello.as_ref().map(|hello| hello.host.clone()).unwrap_or_default();
        let cause = CommError::Died {
            rank,
            host,
            last: last.clone().map(|call| Box::new(self.with_names(call))),
            reporter: self.rank(),
            call: self.current.clone().map(Box::new),
        };
        self.status.fail(self.rank(), cause);
        Ok(())
    }

    /// Sends the failure of the run to the other ranks, once, if this rank is its reporter.
    fn announce(&mut self, cause: &CommError) {
        if std::mem::replace(&mut self.announced, true) || !self.status.is_reporter(self.rank()) {
            return;
        }
        // Ranks that do not receive this message detect the failure themselves.
        let _ = self.post_all(|_| Message::Failed(cause.clone()));
    }

    /// Returns the error for two ranks that started different collectives, with the names of the
    /// arrays of both sides. All ranks return the same error.
    ///
    /// Headers do not contain array names, because the names would make up most of a header. Names
    /// are only exchanged here. If they do not arrive within [`NAMES_TIMEOUT`], the error shows the
    /// numbers of the exchanges instead.
    fn mismatch(&mut self, headers: &[CallHeader], left: usize, right: usize) -> CommError {
        let names = |header: &CallHeader| -> Vec<String> {
            header.side.tag.names().iter().map(ToString::to_string).collect()
        };
        let (rank, sequence) = (self.rank(), headers[left].sequence);
        self.peers[rank].names = Some(names(&headers[rank]));
        let own = names(&headers[rank]);
        let timeout = std::mem::replace(&mut self.settings.timeout, NAMES_TIMEOUT);
        let told = self.post_all(|_| Message::Names(own.clone())).and_then(|()| {
            self.wait_until(|link| {
                let missing = link.ranks(|peer| peer.names.is_none());
                Ok(if missing.is_empty() { Ok(()) } else { Err(missing) })
            })
        });
        self.settings.timeout = timeout;
        if let Err(failure) = told {
            tracing::debug!(%failure, "ranks that disagree could not exchange the names of arrays");
        }
        let side = |other: usize| {
            let names = self.peers[other].names.iter().flatten();
            let mut side = headers[other].side.clone();
            side.tag = side.tag.naming(names.map(|name| Arc::from(name.as_str())));
            Box::new(side)
        };
        let cause = CommError::Mismatch { sequence, left: side(left), right: side(right) };
        // All ranks have detected the same mismatch. The lower rank of the two sides reports it.
        self.status.fail(left, cause.clone());
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
    ///
    /// Returns the failure of the run: another rank's, a failure of `poll`, or missing ranks at the
    /// deadline.
    fn wait_until<R>(
        &mut self,
        mut poll: impl FnMut(&mut Self) -> Result<Result<R, Vec<usize>>, CommError>,
    ) -> Result<R, CommError> {
        let rank = self.rank();
        let limit = self.settings.timeout.saturating_add(turn(rank));
        let mut last = Instant::now();
        let mut deadline = last.checked_add(limit);
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
            // If this process was suspended anywhere in this loop, it cannot conclude that other
            // ranks are late.
            let now = Instant::now();
            let suspended = now - last;
            if suspended > SUSPENDED {
                deadline = deadline.and_then(|deadline| deadline.checked_add(suspended));
            }
            last = now;
            if deadline.is_some_and(|deadline| deadline <= now) {
                return Err(self.late(&absent, self.settings.timeout));
            }
            if self.settings.timeout == Duration::MAX
                && let Some(silent) = self.find_silent(&absent)
            {
                return Err(self.late(&[silent], PING_TIMEOUT));
            }
            if backoff.is_long() {
                self.note_wait(&absent);
            }
            backoff.pause();
        }
    }

    /// Pings missing ranks in a run without a time-out. Returns a rank that does not answer within
    /// [`PING_TIMEOUT`]. The communication thread of a busy rank answers.
    fn find_silent(&mut self, absent: &[usize]) -> Option<usize> {
        if self.last_ping.elapsed() < PING_INTERVAL {
            return None;
        }
        // If this process was stopped, it could not receive the answers, so the time is restarted.
        let heard = self.last_ping.elapsed() < 2 * PING_INTERVAL;
        self.last_ping = Instant::now();
        for &rank in absent {
            if !heard {
                self.peers[rank].asked = None;
            }
            let asked = *self.peers[rank].asked.get_or_insert_with(Instant::now);
            if asked.elapsed() > PING_TIMEOUT {
                return Some(rank);
            }
            let _ = self.post(rank, Message::Ping);
        }
        None
    }

    /// Stores the collective and the missing ranks in the run's status, from which the rank's own
    /// thread reads them. This is necessary because the next MPI call may block for seconds if the
    /// process of a peer has died.
    fn note_wait(&self, absent: &[usize]) {
        let (call, absent) = (self.current.clone(), self.absences(absent));
        self.status.set_wait(Some(Wait { call, absent }));
    }

    /// Returns the same collective with the names of its arrays, if this rank has reached it
    /// recently.
    fn with_names(&self, call: Call) -> Call {
        self.recent.iter().find(|own| **own == call).cloned().unwrap_or(call)
    }

    /// Returns the host and the last known collective of missing ranks, for an error message.
    fn absences(&self, ranks: &[usize]) -> Vec<Absence> {
        let seen = |&rank: &usize| {
            let Peer { hello, last, .. } = &self.peers[rank];
            let host = hello.as_ref().map(|hello| hello.host.clone());
            Absence { rank, host, last: last.clone().map(|call| self.with_names(call)) }
        };
        ranks.iter().map(seen).collect()
    }

    /// Ends the run because `absent` ranks did not arrive within `waited`.
    fn late(&mut self, absent: &[usize], waited: Duration) -> CommError {
        let rank = self.rank();
        let absent = self.absences(absent);
        self.failed(match self.current.clone() {
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
    ///
    /// Returns an error if MPI fails.
    fn post_all(&mut self, message: impl Fn(usize) -> Message) -> Result<(), CommError> {
        let own = self.rank();
        (0..self.world_size())
            .filter(|rank| *rank != own)
            .try_for_each(|rank| self.post(rank, message(rank)))
    }

    /// Sends a message to a rank, without waiting. The message stays in the outbox until MPI has
    /// sent it.
    ///
    /// # Errors
    ///
    /// Returns an error if MPI fails.
    fn post(&mut self, to: usize, message: Message) -> Result<(), CommError> {
        let envelope = Envelope { run: self.run, message };
        let bytes = envelope.encode().map_err(|error| self.broken(error))?;
        let posted = Posted::send(&self.mpi, bytes, to).map_err(|error| self.broken(error))?;
        self.outbox.push((to, posted));
        Ok(())
    }

    /// Returns the ranks of other hosts for which `holds` is true. The end of a process on this
    /// host is detected immediately, so waits for it do not have to be recorded.
    fn remote_ranks(&self, holds: impl Fn(&Peer) -> bool) -> Vec<usize> {
        let host = |rank: usize| self.peers[rank].hello.as_ref().map(|hello| &hello.host);
        let own = host(self.rank());
        let mut ranks = self.ranks(holds);
        ranks.retain(|rank| host(*rank) != own);
        ranks
    }

    /// Returns the other ranks for which `holds` is true.
    fn ranks(&self, holds: impl Fn(&Peer) -> bool) -> Vec<usize> {
        let own = self.rank();
        let others = self.peers.iter().enumerate().filter(|(rank, _)| *rank != own);
        others.filter(|(_, peer)| holds(peer)).map(|(rank, _)| rank).collect()
    }
}
