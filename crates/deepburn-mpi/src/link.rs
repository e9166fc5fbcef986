//! The communication thread's view of the other ranks: who has come, who has left, what failed.
//!
//! A [`Link`] lives on the communication thread. Whatever it waits for, it also listens to control
//! messages, looks after the processes of its host and watches the clock. So a wait ends when what
//! it waits for is there, when any rank fails, or when time is up.

use std::collections::VecDeque;
use std::fmt::Display;
use std::sync::Arc;
use std::time::{Duration, Instant};

use deepburn_comm::{Absence, Call, CommError, Form, Received, Side};

use crate::backoff::Backoff;
use crate::control::{Envelope, Header, Hello, Message, disagreement};
use crate::library::{Mpi, MpiError, Posted};
use crate::neighbours::Neighbours;
use crate::process::{RunStatus, Settings, Wait};
use crate::transfer::{Incoming, Transfer};

/// How often the processes of this host are looked at.
const LOOK_INTERVAL: Duration = Duration::from_millis(5);
/// How much later than the rank before it a rank reports what several ranks notice at once: the
/// first report reaches the others before they would make their own.
const REPORT_DELAY: Duration = Duration::from_millis(40);
/// In a run without a time-out, whose ranks may download or build something for hours: how often ranks
/// that others wait for are asked whether they are alive, and how long they may take to answer. The
/// communication thread of a rank that works answers within milliseconds; a process that was stopped or
/// hangs does not answer at all.
const PING_INTERVAL: Duration = Duration::from_secs(2);
const PING_TIMEOUT: Duration = Duration::from_secs(30);
/// A wait in which this process did not run for longer was suspended, and that time does not count.
const SUSPENDED: Duration = Duration::from_millis(700);
/// How long ranks that disagree wait for each other's names of arrays.
const NAMES_TIMEOUT: Duration = Duration::from_secs(5);

/// The last ranks report no later than this after the first.
const LAST_TURN: Duration = Duration::from_secs(1);
/// Collectives of this rank whose names of arrays are remembered, for messages about ranks that are late.
const REMEMBERED: usize = 4;

/// How long a rank leaves to those before it to report what all notice at once.
fn turn(rank: usize) -> Duration {
    LAST_TURN.min(REPORT_DELAY * rank.min(1000) as u32)
}

pub(crate) struct Link {
    mpi: Mpi,
    status: Arc<RunStatus>,
    peers: Vec<Peer>,
    neighbours: Neighbours,
    last_look: Instant,
    last_ping: Instant,
    /// What is being sent, and to whom.
    outbox: Vec<(usize, Posted)>,
    /// Messages of a run that has not begun on this rank.
    early: Vec<(usize, Envelope)>,
    run: u32,
    settings: Settings,
    next_sequence: u64,
    current: Option<Call>,
    /// The last collectives of this rank, with the names of arrays, which headers do not have.
    recent: VecDeque<Call>,
    /// Whether the failure was announced: by this rank, or by the one that reports it.
    announced: bool,
}

/// What is known of a rank; of this rank nothing but its greeting.
#[derive(Debug, Default)]
struct Peer {
    hello: Option<Hello>,
    headers: VecDeque<Header>,
    names: Option<Vec<String>>,
    last: Option<Call>,
    /// When it said that it starts no more collectives.
    left: Option<Instant>,
    said_goodbye: bool,
    /// When its process ended, as far as is known.
    ended: Option<Instant>,
    /// When it was first asked whether it is alive, since it was last heard of.
    asked: Option<Instant>,
}

impl Link {
    /// Greets all ranks and returns when all have greeted.
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

    pub(crate) fn rank(&self) -> usize {
        self.mpi.rank()
    }

    pub(crate) fn world_size(&self) -> usize {
        self.mpi.world_size()
    }

    /// The hosts of all ranks.
    pub(crate) fn hosts(&self) -> Vec<Arc<str>> {
        let host = |peer: &Peer| peer.hello.as_ref().map_or("", |hello| &hello.host).into();
        self.peers.iter().map(host).collect()
    }

    /// Begins a run: a new common order, in which all ranks take part.
    pub(crate) fn begin(&mut self, run: u32, settings: Settings) {
        (self.run, self.settings) = (run, settings);
        (self.next_sequence, self.current) = (0, None);
        self.recent.clear();
        for peer in &mut self.peers {
            peer.headers.clear();
            (peer.last, peer.names) = (None, None);
            // A process that has said goodbye takes part in no later run.
            peer.left = peer.left.filter(|_| peer.said_goodbye);
        }
        for (from, envelope) in std::mem::take(&mut self.early) {
            self.handle(from, envelope);
        }
    }

    /// Tells the others that this rank starts no more collectives in this run.
    pub(crate) fn leave(&mut self) -> Result<(), CommError> {
        self.post_all(|_| Message::Leave)
    }

    /// Meets all ranks at the next collective and checks that all have come for the same. Returns the
    /// headers of all ranks; what this rank sends to another is described by `parts`.
    ///
    /// # Errors
    /// When ranks disagree, fail, have left or do not come in time.
    pub(crate) fn meet(
        &mut self,
        side: &Side,
        parts: impl Fn(usize) -> Vec<(Form, u64)>,
    ) -> Result<Vec<Header>, CommError> {
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
            Message::Header(Header { sequence, side: side.clone(), parts: parts(rank) })
        })?;
        let own = Header { sequence, side: side.clone(), parts: parts(self.rank()) };
        let rank = self.rank();
        self.wait_until(|link| {
            let missing = |peer: &Peer| peer.headers.is_empty();
            let missing: Vec<_> = link.ranks(missing);
            // Several ranks may notice at once: each leaves those before it the time to report.
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

    /// Sends `outgoing`, each to a rank, and returns what `incoming` describes.
    ///
    /// # Errors
    /// When a rank fails or time is up.
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

    /// Handles what has arrived meanwhile.
    ///
    /// # Errors
    /// What ended the run.
    pub(crate) fn listen(&mut self) -> Result<(), CommError> {
        if let Err(error) = self.receive() {
            let cause = self.broken(error);
            self.announce(&cause);
            return Err(cause);
        }
        if self.last_look.elapsed() >= LOOK_INTERVAL {
            self.last_look = Instant::now();
            while let Some(rank) = self.neighbours.ended() {
                self.peers[rank].ended = Some(Instant::now());
            }
            self.report_deaths();
        }
        let Some(cause) = self.status.cause() else { return Ok(()) };
        self.announce(&cause);
        Err(cause)
    }

    /// Says goodbye and ends MPI. Nobody is left waiting: MPI is ended when all have said goodbye.
    ///
    /// # Errors
    /// When a rank does not come, or MPI fails.
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

    /// Whether all live ranks know of the failure of this run. Messages to a process that has died are
    /// never sent.
    pub(crate) fn has_announced(&self) -> bool {
        let sent = |(to, _): &(usize, Posted)| self.peers[*to].ended.is_some();
        self.announced && self.outbox.iter().all(sent)
    }

    /// Takes control messages that have arrived, and frees those that have been sent.
    fn receive(&mut self) -> Result<(), MpiError> {
        let mut failure = None;
        let mpi = &self.mpi;
        self.outbox.retain_mut(|(_, posted)| {
            let complete = posted.is_complete(mpi);
            !complete.unwrap_or_else(|error| {
                failure.get_or_insert(error);
                // Kept, because MPI may still read it.
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
                        "{} bytes of rank {} are no message ({error})",
                        bytes.len(),
                        arrived.from
                    );
                    return Err(MpiError::Call { call: "reading a control message", reason });
                }
            }
        }
        Ok(())
    }

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
                // A ping is answered as far as possible; who does not hear of it asks again.
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

    /// Ends the run if a process of this host has ended while others still needed it.
    fn report_deaths(&mut self) {
        let dead: Vec<_> = self.ranks(|peer| peer.ended.is_some() && peer.left.is_none());
        let Some(&rank) = dead.first() else { return };
        // The end of a process is seen on its host alone.
        let host = |rank: usize| self.peers[rank].hello.as_ref().map(|hello| &hello.host);
        let reports = |other: &usize| !dead.contains(other) && host(*other) == host(rank);
        let alive_before = (0..self.rank()).filter(reports).count() as u32;
        let since = self.peers[rank].ended.map(|ended| ended.elapsed()).unwrap_or_default();
        // Its last words, and the report of a rank that comes first, may be on their way.
        if since < REPORT_DELAY * (1 + alive_before) {
            return;
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
    }

    /// Tells the others, once, that the run has failed.
    fn announce(&mut self, cause: &CommError) {
        if std::mem::replace(&mut self.announced, true) || !self.status.is_reporter(self.rank()) {
            return;
        }
        // Ranks that this does not reach notice the failure on their own.
        let _ = self.post_all(|_| Message::Failed(cause.clone()));
    }

    /// The error of all ranks where two of them disagree, with the names of both sides' arrays.
    fn mismatch(&mut self, headers: &[Header], left: usize, right: usize) -> CommError {
        let names = |header: &Header| -> Vec<String> {
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
        // All ranks know; one reports.
        self.status.fail(left, cause.clone());
        cause
    }

    /// Waits until `poll` says `Ok(Ok(..))`; until then it names the ranks that are missing.
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
            // A process that was stopped, wherever in this loop, cannot say that others are late.
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

    /// In a run without a time-out, asks ranks that others wait for whether they are alive, and returns
    /// one that does not answer. The communication thread of a rank that is busy does.
    fn find_silent(&mut self, absent: &[usize]) -> Option<usize> {
        if self.last_ping.elapsed() < PING_INTERVAL {
            return None;
        }
        // A process that was stopped has not heard the answers.
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

    /// Tells the rank whom it waits for, as far as is known: calls of MPI that follow may take seconds
    /// where the process of a peer is gone.
    fn note_wait(&self, absent: &[usize]) {
        let (call, absent) = (self.current.clone(), self.absences(absent));
        self.status.set_wait(Some(Wait { call, absent }));
    }

    /// The same collective as this rank knows it, with the names of arrays, if it has come to it.
    fn with_names(&self, call: Call) -> Call {
        self.recent.iter().find(|own| **own == call).cloned().unwrap_or(call)
    }

    fn absences(&self, ranks: &[usize]) -> Vec<Absence> {
        let seen = |&rank: &usize| {
            let Peer { hello, last, .. } = &self.peers[rank];
            let host = hello.as_ref().map(|hello| hello.host.clone());
            Absence { rank, host, last: last.clone().map(|call| self.with_names(call)) }
        };
        ranks.iter().map(seen).collect()
    }

    /// Ends the run because ranks did not come.
    fn late(&mut self, absent: &[usize], waited: Duration) -> CommError {
        let rank = self.rank();
        let absent = self.absences(absent);
        self.failed(match self.current.clone() {
            Some(call) => CommError::Timeout { rank, call: Box::new(call), waited, absent },
            None => CommError::Unconnected { rank, waited, absent },
        })
    }

    /// Ends the run with a failure that this rank has found, and returns what ended it.
    fn failed(&mut self, cause: CommError) -> CommError {
        self.status.fail(self.rank(), cause.clone());
        let cause = self.status.cause().unwrap_or(cause);
        self.announce(&cause);
        cause
    }

    fn broken(&self, error: impl Display) -> CommError {
        let cause = CommError::Transport { rank: self.rank(), reason: error.to_string() };
        self.status.fail(self.rank(), cause.clone());
        cause
    }

    fn post_all(&mut self, message: impl Fn(usize) -> Message) -> Result<(), CommError> {
        let own = self.rank();
        (0..self.world_size())
            .filter(|rank| *rank != own)
            .try_for_each(|rank| self.post(rank, message(rank)))
    }

    fn post(&mut self, to: usize, message: Message) -> Result<(), CommError> {
        let envelope = Envelope { run: self.run, message };
        let bytes = envelope.encode().map_err(|error| self.broken(error))?;
        let posted = Posted::send(&self.mpi, bytes, to).map_err(|error| self.broken(error))?;
        self.outbox.push((to, posted));
        Ok(())
    }

    /// The ranks of other hosts for which `holds` is true. The end of a process on this host is detected at once.
    fn remote_ranks(&self, holds: impl Fn(&Peer) -> bool) -> Vec<usize> {
        let host = |rank: usize| self.peers[rank].hello.as_ref().map(|hello| &hello.host);
        let own = host(self.rank());
        let mut ranks = self.ranks(holds);
        ranks.retain(|rank| host(*rank) != own);
        ranks
    }

    /// The other ranks of which `holds` is true.
    fn ranks(&self, holds: impl Fn(&Peer) -> bool) -> Vec<usize> {
        let own = self.rank();
        let others = self.peers.iter().enumerate().filter(|(rank, _)| *rank != own);
        others.filter(|(_, peer)| holds(peer)).map(|(rank, _)| rank).collect()
    }
}
