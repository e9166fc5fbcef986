//! The rendezvous of rank threads: sequence numbers, the comparison of calls, waiting, and the end
//! of all groups.
//!
//! There is one [`Rendezvous`] for the world and all of its subgroups. It does not depend on
//! element types. Arrays are stored as type-erased [`Deposit`]s, and results are computed by
//! closures. All payload types can therefore share one order of collectives.
//!
//! The n-th collective of a group on every rank is *round* n of the group. A rank never blocks when
//! it deposits its arrays. It blocks when it needs the result and a deposit is missing. The wait
//! ends when all deposits have been made, a rank has failed, a missing rank has left the group or
//! waits for this rank, or the time-out has expired. All but the first of these cases end the group
//! for all ranks, because a rank that misses a round can never be in step with the other ranks
//! again.
//!
//! Lock discipline: one mutex protects all state. No payload is computed, copied or dropped while
//! the mutex is held, because payloads may run device code, also in `Drop`. The mutex also provides
//! memory ordering: everything that a rank wrote before its deposit is visible to the ranks that
//! read the deposit.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::letter::Letter;
use super::round::{Deposit, Round, RoundKey};
use super::wait::{ActingThreads, WaitTarget};
use crate::{
    Absence, Call, CommError, GroupFailure, GroupId, GroupRanks, Mailbox, MessageContents,
    MessageDirection, MessageRoute, MessageTag, ReceiveId, Side, Statistics, Waiting, panic,
};

/// The rendezvous of all ranks, in the world and in its subgroups.
#[derive(Debug)]
pub(crate) struct Rendezvous {
    timeout: Duration,
    state: Mutex<RendezvousState>,
    /// Whether `state.failure` is set. This flag exists because every tensor op of every rank
    /// checks for failures and would otherwise have to lock the mutex.
    has_failed: AtomicBool,
    /// By world rank, notified when a round of the rank completes, a result is ready, a message for
    /// the rank arrives, a rank leaves or the groups end. Every rank has its own condition
    /// variable, so that a message between two ranks does not wake the others.
    changed: Vec<Condvar>,
}

#[derive(Debug, Default)]
struct RendezvousState {
    ranks: Vec<RankProgress>,
    /// The rounds of all groups, by group and sequence number. Groups with the same identity have
    /// the same rounds only if they have the same members.
    rounds: HashMap<RoundKey, Round>,
    /// The messages of all groups.
    letters: Mailbox<Letter>,
    failure: Option<GroupFailure>,
}

/// The progress of one rank.
#[derive(Debug, Default)]
struct RankProgress {
    /// The number of collectives started in each group.
    started: HashMap<GroupId, u64>,
    /// The members of the subgroups that the rank has created, by name.
    subgroups: HashMap<&'static str, Vec<GroupRanks>>,
    last: Option<Call>,
    has_left: bool,
    statistics: Statistics,
    /// The threads that act as this rank.
    threads: ActingThreads,
    /// What its sleeping thread waits for.
    wait: Option<WaitTarget>,
}

impl Rendezvous {
    pub(crate) fn new(world_size: usize, timeout: Duration) -> Self {
        let ranks = (0..world_size).map(|_| RankProgress::default()).collect();
        let state = RendezvousState { ranks, ..RendezvousState::default() };
        Self {
            timeout,
            state: Mutex::new(state),
            has_failed: AtomicBool::new(false),
            changed: (0..world_size).map(|_| Condvar::new()).collect(),
        }
    }

    pub(crate) fn statistics(&self, rank: usize) -> Statistics {
        self.lock().ranks[rank].statistics.clone()
    }

    pub(crate) fn failure(&self) -> Option<GroupFailure> {
        // Relaxed ordering is sufficient, because the failure is read under the mutex. A rank that
        // reads an outdated `false` here only computes one more op.
        if !self.has_failed.load(Ordering::Relaxed) {
            return None;
        }
        self.lock().failure.clone()
    }

    /// Creates this rank's next subgroup with this name. Never waits for other ranks.
    ///
    /// # Errors
    /// Returns an error if the arguments are invalid, if the groups have ended, or if another
    /// member has created the group with different members.
    pub(crate) fn subgroup(
        &self,
        ranks: &GroupRanks,
        name: &'static str,
        members: &[usize],
    ) -> Result<GroupRanks, CommError> {
        let mut state = self.lock();
        state.check()?;
        let own = ranks.world_rank();
        let created = state.ranks[own].subgroups.entry(name).or_default();
        let index = created.len();
        let group = ranks.subgroup(name, index as u32, members)?;
        created.push(group.clone());
        // Only members that have created their n-th group of this name are compared. Later ones
        // compare themselves with this one.
        let disagreement = state.ranks.iter().enumerate().find_map(|(other, progress)| {
            let theirs = progress.subgroups.get(name)?.get(index)?;
            group.disagreement(other, theirs.members())
        });
        match disagreement {
            None => Ok(group),
            Some(cause) => Err(self.fail(state, own, cause)),
        }
    }

    /// Deposits the arrays of `side.rank` for its next round in the group `ranks`. Never waits for
    /// other ranks.
    ///
    /// # Errors
    /// Returns an error if the groups have ended, if the rank has left, or if another rank started
    /// a different collective for the same round.
    pub(crate) fn post(
        this: &Arc<Self>,
        ranks: &GroupRanks,
        side: Side,
        deposit: Deposit,
    ) -> Result<Ticket, CommError> {
        let mut guard = this.lock();
        // One borrow of the guard, so that ranks and rounds can be borrowed separately.
        let state = &mut *guard;
        state.check()?;
        let call = state.ranks[side.rank].start(ranks.id(), &side)?;
        // Disjoint groups may have the same identity, but never the same first member.
        let key = (ranks.members()[0], ranks.id().clone(), call.sequence);
        let round = state.rounds.entry(key.clone()).or_insert_with(|| Round::new(ranks.len()));
        if let Some(other) = round.disagreement(&side) {
            let (left, rank) = (Box::new(other.clone()), side.rank);
            let cause =
                CommError::Mismatch { sequence: call.sequence, left, right: Box::new(side) };
            return Err(this.fail(guard, rank, cause));
        }
        // An incomplete round wakes nobody, because no wait can end with it.
        if round.deposit(ranks.rank(), side, deposit) {
            this.wake(ranks.members());
        }
        Ok(Ticket { rendezvous: this.clone(), ranks: ranks.clone(), key, call })
    }

    /// Puts a message into the queue of its receiver. Never waits.
    ///
    /// # Errors
    /// Returns an error if the groups have ended or the sender has left.
    pub(crate) fn send(&self, route: MessageRoute, letter: Letter) -> Result<(), CommError> {
        let mut state = self.lock();
        state.check_message(&route, MessageDirection::Send)?;
        let bytes = letter.sent_bytes;
        state.ranks[route.from].record_message(MessageDirection::Send, &route.tag, bytes);
        let to = route.to;
        let unwanted = state.letters.deliver(route, letter);
        drop(state);
        self.wake(&[to]);
        drop(unwanted); // A payload is dropped without the lock.
        Ok(())
    }

    /// Claims the next message of a route. Never waits. `bytes` is the size of the arrays that the
    /// receiver expects.
    ///
    /// # Errors
    /// Returns an error if the groups have ended or the receiver has left.
    pub(crate) fn receive(
        this: &Arc<Self>,
        route: MessageRoute,
        bytes: usize,
    ) -> Result<LetterTicket, CommError> {
        let mut state = this.lock();
        state.check_message(&route, MessageDirection::Receive)?;
        state.ranks[route.to].record_message(MessageDirection::Receive, &route.tag, bytes);
        let id = state.letters.receive(route.clone());
        Ok(LetterTicket { rendezvous: this.clone(), route, id })
    }

    /// Returns true if a message has arrived that no receive has claimed.
    pub(crate) fn has_arrived(&self, route: &MessageRoute) -> bool {
        self.lock().letters.has_message(route)
    }

    pub(crate) fn abort(&self, reporter: usize, cause: CommError) {
        self.fail(self.lock(), reporter, cause);
    }

    pub(crate) fn leave(&self, rank: usize) {
        // Any rank may wait for this one, in any group, so all are woken below.
        self.lock().ranks[rank].has_left = true;
        self.wake_all();
    }

    /// Ends all groups, unless they have already ended, and returns the first failure.
    fn fail(
        &self,
        mut state: MutexGuard<'_, RendezvousState>,
        reporter: usize,
        cause: CommError,
    ) -> CommError {
        let failure = GroupFailure { reporter, at: Instant::now(), cause };
        // Later failures are consequences of the first one, which every rank returns.
        let GroupFailure { reporter, cause, .. } = state.failure.get_or_insert(failure).clone();
        // Set after the failure, under the lock, so that a rank that sees the flag also finds the
        // failure.
        self.has_failed.store(true, Ordering::Relaxed);
        let abandoned = (std::mem::take(&mut state.rounds), state.letters.reset());
        drop(state);
        self.wake_all();
        tracing::debug!(reporter, %cause, "the process group has ended");
        drop(abandoned); // after the lock: these are payloads
        cause
    }

    fn lock(&self) -> MutexGuard<'_, RendezvousState> {
        // A poisoned state is still consistent, because no payload code runs under the lock and no
        // change is interrupted by code that could panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes the threads that wait as these world ranks.
    fn wake(&self, ranks: &[usize]) {
        ranks.iter().for_each(|rank| self.changed[*rank].notify_all());
    }

    /// Wakes the waiting threads of all ranks.
    fn wake_all(&self) {
        self.changed.iter().for_each(Condvar::notify_all);
    }

    /// Blocks rank `rank` until `poll` returns a value or an error. An error ends all groups. Until
    /// then `poll` returns the ranks for which it waits, of which `late` makes an error after the
    /// time-out. `wait` describes the wait, of which other ranks learn while this one sleeps.
    fn wait_until<R>(
        &self,
        rank: usize,
        wait: impl Fn() -> WaitTarget,
        mut poll: impl FnMut(&mut RendezvousState) -> Result<R, Blocked>,
        late: impl Fn(&RendezvousState, Vec<usize>) -> CommError,
    ) -> Result<R, CommError> {
        // The time-out counts from the start of the wait and not from the last change.
        let deadline = Instant::now().checked_add(self.timeout);
        let mut state = self.lock();
        loop {
            state.check()?;
            let cause = match poll(&mut state) {
                Ok(answer) => return Ok(answer),
                Err(Blocked::Forever(cause)) => Some(cause),
                // The deadline is checked after `poll`, so what arrives exactly at the deadline is
                // accepted.
                Err(Blocked::By(absent)) => deadline
                    .is_some_and(|deadline| deadline <= Instant::now())
                    .then(|| late(&state, absent)),
            };
            // The search for a circle comes last, because it is the most expensive check and is
            // only needed before sleeping.
            let Some(cause) = cause.or_else(|| state.block(rank, wait())) else {
                state = self.sleep(state, rank, deadline);
                // From here on the rank runs, and other ranks must not count it as waiting.
                state.ranks[rank].wait = None;
                continue;
            };
            return Err(self.fail(state, rank, cause));
        }
    }

    /// Sleeps until the state changes for `rank` or the deadline passes.
    fn sleep<'a>(
        &self,
        state: MutexGuard<'a, RendezvousState>,
        rank: usize,
        deadline: Option<Instant>,
    ) -> MutexGuard<'a, RendezvousState> {
        let changed = &self.changed[rank];
        match deadline {
            // There is no deadline if the time-out is longer than an `Instant` can count, as
            // `Duration::MAX` is.
            None => changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            Some(deadline) => {
                let rest = deadline.saturating_duration_since(Instant::now());
                let woken = changed.wait_timeout(state, rest);
                woken.unwrap_or_else(PoisonError::into_inner).0
            }
        }
    }
}

/// Why a wait cannot end now.
enum Blocked {
    /// It can never end.
    Forever(CommError),
    /// It needs these world ranks.
    By(Vec<usize>),
}

impl RendezvousState {
    /// Checks that the groups have not failed.
    fn check(&self) -> Result<(), CommError> {
        self.failure.as_ref().map_or(Ok(()), |failure| Err(failure.cause.clone()))
    }

    /// Checks that a rank can still send or receive.
    fn check_message(
        &self,
        route: &MessageRoute,
        direction: MessageDirection,
    ) -> Result<(), CommError> {
        self.check()?;
        let rank = if direction == MessageDirection::Send { route.from } else { route.to };
        match self.ranks[rank].has_left {
            true => Err(route.clone().after_leave(direction)),
            false => Ok(()),
        }
    }

    /// Records that the current thread will sleep as `rank`. Returns an error if it could never be
    /// woken, because a rank for which it waits is waiting for this rank.
    ///
    /// Only the last rank of a circle can find it, because the ranks for which a sleeping rank
    /// waits become fewer, and never more.
    fn block(&mut self, rank: usize, wait: WaitTarget) -> Option<CommError> {
        self.ranks[rank].threads.note_current();
        self.ranks[rank].wait = Some(wait);
        let mut circle = Vec::new();
        let mut seen = vec![false; self.ranks.len()];
        if !self.closes_circle(rank, rank, &mut seen, &mut circle) {
            return None;
        }
        let waiting = circle.into_iter().filter_map(|(rank, absent)| {
            let awaited = self.ranks[rank].wait.as_ref()?.awaited();
            Some(Waiting { rank, awaited, absent })
        });
        Some(CommError::Deadlock { circle: waiting.collect() })
    }

    /// Returns true if `rank` sleeps and waits for `first`, perhaps through other sleeping ranks.
    /// `circle` then has each of them with the rank for which it waits. Ranks that were `seen` do
    /// not wait for `first`.
    fn closes_circle(
        &self,
        rank: usize,
        first: usize,
        seen: &mut [bool],
        circle: &mut Vec<(usize, usize)>,
    ) -> bool {
        let RankProgress { threads, wait, .. } = &self.ranks[rank];
        // Another thread of a rank could do what its sleeping thread does not.
        let Some(wait) = wait.as_ref().filter(|_| threads.are_one()) else { return false };
        seen[rank] = true;
        for absent in wait.absent(&self.rounds, &self.letters) {
            circle.push((rank, absent));
            // A depth-first search in which each rank is visited once, so its cost is bounded by
            // the ranks and their waits.
            if absent == first || (!seen[absent] && self.closes_circle(absent, first, seen, circle))
            {
                return true;
            }
            circle.pop();
        }
        false
    }

    /// Returns a missing rank with the last collective that it started, for an error message.
    fn absence(&self, rank: usize) -> Absence {
        Absence { rank, host: None, last: self.ranks[rank].last.clone() }
    }
}

impl RankProgress {
    /// Counts a message that the current thread sends or receives as this rank.
    fn record_message(&mut self, direction: MessageDirection, tag: &MessageTag, bytes: usize) {
        self.threads.note_current();
        self.statistics.record_message(direction, tag, bytes);
    }

    /// Assigns the next sequence number of the rank in a group.
    fn start(&mut self, group: &GroupId, side: &Side) -> Result<Call, CommError> {
        let Side { rank, operation, ref tag, .. } = *side;
        let tag = tag.clone();
        if self.has_left {
            return Err(CommError::AfterLeave { rank, operation, tag });
        }
        self.threads.note_current();
        self.statistics.record(operation, &tag, side.signature.as_ref());
        // The identity of a group is cloned only for its first collective.
        let started = match self.started.get_mut(group) {
            Some(started) => started,
            None => self.started.entry(group.clone()).or_default(),
        };
        let call = Call { sequence: *started, operation, tag };
        *started += 1;
        self.last = Some(call.clone());
        Ok(call)
    }
}

/// A rank's claim to the result of one round. Dropping it releases the claim.
#[derive(Debug)]
pub(crate) struct Ticket {
    rendezvous: Arc<Rendezvous>,
    ranks: GroupRanks,
    key: RoundKey,
    call: Call,
}

impl Ticket {
    /// Returns the rank in the group of the round.
    pub(crate) fn rank(&self) -> usize {
        self.ranks.rank()
    }

    /// Waits for the deposits of all ranks and returns them by rank.
    pub(crate) fn deposits(&self) -> Result<Vec<Deposit>, CommError> {
        self.wait_until(Round::deposits)
    }

    /// Returns the results of this round with the indices `wanted`, in that order.
    ///
    /// Each result is computed once, by the first rank that needs it. A rank that has dropped its
    /// handle, or is computing something else, therefore does not delay other ranks.
    pub(crate) fn results(
        &self,
        wanted: &[usize],
        compute: impl Fn(usize) -> Deposit,
    ) -> Result<Vec<Deposit>, CommError> {
        // The lock is not held while a result is computed. The claim keeps other ranks from
        // computing it too.
        while let Some(index) = self.wait_until(|round| round.claim(wanted, self.rank()))? {
            let result = self.compute(|| compute(index));
            let mut state = self.rendezvous.lock();
            // The round is gone if the groups have failed meanwhile, and the next wait returns that
            // failure.
            if let Some(round) = state.rounds.get_mut(&self.key) {
                round.finish(index, result.clone());
            }
            drop(state);
            self.rendezvous.wake(self.ranks.members());
        }
        self.wait_until(|round| round.results(wanted))
    }

    /// Runs payload code. A panic ends all groups immediately, because other ranks may wait for the
    /// result of this rank. The panic then continues to unwind.
    pub(crate) fn compute<R>(&self, work: impl FnOnce() -> R) -> R {
        catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|payload| {
            let cause = format!("panic in {}: {}", self.call, panic::message(&*payload));
            let rank = self.ranks.world_rank();
            self.rendezvous.abort(rank, CommError::PeerFailed { rank, cause });
            resume_unwind(payload)
        })
    }

    /// Blocks until `poll` returns a value. Until then `poll` returns the missing ranks of the
    /// group.
    fn wait_until<R>(
        &self,
        poll: impl Fn(&mut Round) -> Result<R, Vec<usize>>,
    ) -> Result<R, CommError> {
        let (rank, members) = (self.ranks.world_rank(), self.ranks.members());
        // Rounds number ranks within the group, and failures name ranks of the world.
        let in_world =
            |ranks: Vec<usize>| ranks.into_iter().map(|rank| members[rank]).collect::<Vec<_>>();
        let poll = |state: &mut RendezvousState| {
            let round = state
                .rounds
                .get_mut(&self.key)
                .expect("a round stays until its last ticket is dropped or the groups have failed");
            let absent = match poll(round) {
                Ok(answer) => return Ok(answer),
                Err(absent) => in_world(absent),
            };
            // A rank that is computing a result of a complete round may already have left, but it
            // will still finish the result.
            let missing = in_world(round.missing());
            match missing.into_iter().find(|rank| state.ranks[*rank].has_left) {
                Some(left) => {
                    let call = Box::new(self.call.clone());
                    let cause = CommError::Left { rank: left, waiting: rank, call };
                    Err(Blocked::Forever(cause))
                }
                None => Err(Blocked::By(absent)),
            }
        };
        let late = |state: &RendezvousState, absent: Vec<usize>| CommError::Timeout {
            rank,
            call: Box::new(self.call.clone()),
            waited: self.rendezvous.timeout,
            absent: absent.into_iter().map(|rank| state.absence(rank)).collect(),
        };
        let wait = || WaitTarget::Round {
            key: self.key.clone(),
            ranks: self.ranks.clone(),
            call: self.call.clone(),
        };
        self.rendezvous.wait_until(rank, wait, poll, late)
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut state = self.rendezvous.lock();
        let finished = match state.rounds.get_mut(&self.key).map(Round::release) {
            // The last of the tickets ends the round. After a failure, there is no round to
            // release.
            Some(true) => state.rounds.remove(&self.key),
            _ => None,
        };
        drop(state);
        drop(finished); // Payloads are dropped without the lock.
    }
}

/// A rank's claim to a message. Dropping it discards the message.
#[derive(Debug)]
pub(crate) struct LetterTicket {
    rendezvous: Arc<Rendezvous>,
    route: MessageRoute,
    id: ReceiveId,
}

impl LetterTicket {
    /// Waits for the message and returns it if it has the contents `expected`. Other contents end
    /// all groups.
    pub(crate) fn wait(&self, expected: &MessageContents) -> Result<Letter, CommError> {
        let Self { rendezvous, route, id } = self;
        let poll = |state: &mut RendezvousState| {
            // Looked for before the sender's state, because a rank may leave right after its last
            // message.
            if let Some(letter) = state.letters.take(*id) {
                return Ok(letter);
            }
            match state.ranks[route.from].has_left {
                true => Err(Blocked::Forever(CommError::SenderLeft {
                    route: Box::new(route.clone()),
                    unclaimed: state.letters.unclaimed(route),
                })),
                false => Err(Blocked::By(vec![route.from])),
            }
        };
        let late = |state: &RendezvousState, _| CommError::MessageTimeout {
            route: Box::new(route.clone()),
            waited: rendezvous.timeout,
            sender: Box::new(state.absence(route.from)),
            unclaimed: state.letters.unclaimed(route),
        };
        let wait = || WaitTarget::Message { route: route.clone(), id: *id };
        let letter = rendezvous.wait_until(route.to, wait, poll, late)?;
        match letter.contents.check(route, expected) {
            Ok(()) => Ok(letter),
            // The contents are only known now. The sender has already continued, so all ranks have
            // to end.
            Err(cause) => Err(rendezvous.fail(rendezvous.lock(), route.to, cause)),
        }
    }
}

impl Drop for LetterTicket {
    fn drop(&mut self) {
        let letter = self.rendezvous.lock().letters.cancel(&self.route, self.id);
        drop(letter); // A payload is dropped without the lock.
    }
}
