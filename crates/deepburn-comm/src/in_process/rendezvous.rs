//! The rendezvous of rank threads: sequence numbers, the comparison of calls,
//! waiting, and the end of the group.
//!
//! [`Rendezvous`] does not depend on element types. Arrays are stored as
//! type-erased [`Deposit`]s, and results are computed by closures. All payload
//! types can therefore share one order of collectives.
//!
//! The n-th collective of every rank is *round* n. A rank never blocks when it
//! deposits its arrays. It blocks when it needs the result and a deposit is
//! missing. The wait ends when all deposits have been made, a rank has failed,
//! a missing rank has left the group, or the time-out has expired. The last
//! three cases end the group for all ranks, because a rank that misses a round
//! can never be in step with the other ranks again.
//!
//! Lock discipline: one mutex protects all state. No payload is computed,
//! copied or dropped while the mutex is held, because payloads may run device
//! code, also in `Drop`. The mutex also provides memory ordering: everything
//! that a rank wrote before its deposit is visible to the ranks that read the
//! deposit.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::round::{Completion, Deposit, Round};
use crate::{Absence, Call, CommError, GroupFailure, Side, Statistics, panic};

/// The rendezvous of the ranks of one group.
#[derive(Debug)]
pub(crate) struct Rendezvous {
    world_size: usize,
    timeout: Duration,
    state: Mutex<RendezvousState>,
    /// Whether `state.failure` is set. This flag exists because every tensor op
    /// of every rank checks for failures and would otherwise have to lock the
    /// mutex.
    has_failed: AtomicBool,
    /// Notified when a round completes, a result is ready, a rank leaves or the
    /// group ends. One condition variable is sufficient for all rounds, because
    /// ranks usually wait for the same round.
    changed: Condvar,
}

#[derive(Debug)]
struct RendezvousState {
    ranks: Vec<RankProgress>,
    rounds: BTreeMap<u64, Round>,
    failure: Option<GroupFailure>,
}

/// The progress of one rank.
#[derive(Debug, Default)]
struct RankProgress {
    next_sequence: u64,
    last: Option<Call>,
    has_left: bool,
    statistics: Statistics,
}

impl Rendezvous {
    pub(crate) fn new(world_size: usize, timeout: Duration) -> Self {
        let ranks = (0..world_size).map(|_| RankProgress::default()).collect();
        let state = RendezvousState { ranks, rounds: BTreeMap::new(), failure: None };
        Self {
            world_size,
            timeout,
            state: Mutex::new(state),
            has_failed: AtomicBool::new(false),
            changed: Condvar::new(),
        }
    }

    pub(crate) fn world_size(&self) -> usize {
        self.world_size
    }

    pub(crate) fn statistics(&self, rank: usize) -> Statistics {
        self.lock().ranks[rank].statistics.clone()
    }

    pub(crate) fn failure(&self) -> Option<GroupFailure> {
        // Relaxed ordering is sufficient, because the failure is read under the
        // mutex. A rank that reads an outdated `false` here only computes one
        // more op.
        if !self.has_failed.load(Ordering::Relaxed) {
            return None;
        }
        self.lock().failure.clone()
    }

    /// Deposits the arrays of `side.rank` for its next round. Never waits for
    /// other ranks.
    ///
    /// # Errors
    ///
    /// Returns an error if the group has ended, if the rank has left it, or if
    /// another rank started a different collective for the same round.
    pub(crate) fn post(
        this: &Arc<Self>,
        side: Side,
        deposit: Deposit,
    ) -> Result<Ticket, CommError> {
        let mut guard = this.lock();
        let state = &mut *guard;
        if let Some(failure) = &state.failure {
            return Err(failure.cause.clone());
        }
        let call = state.ranks[side.rank].start(&side)?;
        let new_round = || Round::new(this.world_size);
        let round = state.rounds.entry(call.sequence).or_insert_with(new_round);
        let rank = side.rank;
        if let Some(other) = round.disagreement(&side) {
            let left = Box::new(other.clone());
            let cause =
                CommError::Mismatch { sequence: call.sequence, left, right: Box::new(side) };
            return Err(this.fail(guard, rank, cause));
        }
        if round.deposit(side, deposit) == Completion::Complete {
            this.changed.notify_all();
        }
        Ok(Ticket { rendezvous: this.clone(), rank, call })
    }

    pub(crate) fn abort(&self, reporter: usize, cause: CommError) {
        self.fail(self.lock(), reporter, cause);
    }

    pub(crate) fn leave(&self, rank: usize) {
        self.lock().ranks[rank].has_left = true;
        self.changed.notify_all();
    }

    /// Ends the group, unless it has already ended, and returns the first
    /// failure.
    fn fail(
        &self,
        mut state: MutexGuard<'_, RendezvousState>,
        reporter: usize,
        cause: CommError,
    ) -> CommError {
        let failure = GroupFailure { reporter, at: Instant::now(), cause };
        let GroupFailure { reporter, cause, .. } = state.failure.get_or_insert(failure).clone();
        self.has_failed.store(true, Ordering::Relaxed);
        let abandoned = std::mem::take(&mut state.rounds);
        drop(state);
        self.changed.notify_all();
        tracing::debug!(reporter, %cause, "the process group has ended");
        drop(abandoned); // after the lock: these are payloads
        cause
    }

    fn lock(&self) -> MutexGuard<'_, RendezvousState> {
        // A poisoned state is still consistent, because no payload code runs
        // under the lock and no change is interrupted by code that could panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sleeps until the state changes or the deadline passes.
    fn sleep<'a>(
        &self,
        state: MutexGuard<'a, RendezvousState>,
        deadline: Option<Instant>,
    ) -> MutexGuard<'a, RendezvousState> {
        match deadline {
            None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            Some(deadline) => {
                let rest = deadline.saturating_duration_since(Instant::now());
                let woken = self.changed.wait_timeout(state, rest);
                woken.unwrap_or_else(PoisonError::into_inner).0
            }
        }
    }
}

impl RankProgress {
    /// Assigns the next sequence number of the rank.
    fn start(&mut self, side: &Side) -> Result<Call, CommError> {
        let Side { rank, operation, ref tag, .. } = *side;
        let tag = tag.clone();
        if self.has_left {
            return Err(CommError::AfterLeave { rank, operation, tag });
        }
        self.statistics.record(operation, &tag, side.signature.as_ref());
        let call = Call { sequence: self.next_sequence, operation, tag };
        self.next_sequence += 1;
        self.last = Some(call.clone());
        Ok(call)
    }
}

/// A rank's claim to the result of one round. Dropping it releases the claim.
#[derive(Debug)]
pub(crate) struct Ticket {
    rendezvous: Arc<Rendezvous>,
    rank: usize,
    call: Call,
}

impl Ticket {
    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    /// Waits for the deposits of all ranks and returns them by rank.
    pub(crate) fn deposits(&self) -> Result<Vec<Deposit>, CommError> {
        self.wait_until(Round::deposits)
    }

    /// Returns the results of this round with the indices `wanted`, in that
    /// order.
    ///
    /// Each result is computed once, by the first rank that needs it. A rank
    /// that has dropped its handle, or is computing something else, therefore
    /// does not delay other ranks.
    pub(crate) fn results(
        &self,
        wanted: &[usize],
        compute: impl Fn(usize) -> Deposit,
    ) -> Result<Vec<Deposit>, CommError> {
        while let Some(index) = self.wait_until(|round| round.claim(wanted, self.rank))? {
            let result = self.compute(|| compute(index));
            let mut state = self.rendezvous.lock();
            if let Some(round) = state.rounds.get_mut(&self.call.sequence) {
                round.finish(index, result.clone());
            }
            drop(state);
            self.rendezvous.changed.notify_all();
        }
        self.wait_until(|round| round.results(wanted))
    }

    /// Runs payload code. A panic ends the group immediately, because other
    /// ranks may wait for the result of this rank. The panic then continues to
    /// unwind.
    pub(crate) fn compute<R>(&self, work: impl FnOnce() -> R) -> R {
        catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|payload| {
            let cause = format!("panic in {}: {}", self.call, panic::message(&*payload));
            self.rendezvous.abort(self.rank, CommError::PeerFailed { rank: self.rank, cause });
            resume_unwind(payload)
        })
    }

    /// Blocks until `poll` returns a value. Until then `poll` returns the
    /// missing ranks.
    fn wait_until<R>(
        &self,
        poll: impl Fn(&mut Round) -> Result<R, Vec<usize>>,
    ) -> Result<R, CommError> {
        let rendezvous = &*self.rendezvous;
        let deadline = Instant::now().checked_add(rendezvous.timeout);
        let mut state = rendezvous.lock();
        loop {
            if let Some(failure) = &state.failure {
                return Err(failure.cause.clone());
            }
            let round = state
                .rounds
                .get_mut(&self.call.sequence)
                .expect("a round stays until its last ticket is dropped or the group has failed");
            let absent = match poll(round) {
                Ok(answer) => return Ok(answer),
                Err(absent) => absent,
            };
            // The deadline is checked after `poll`, so a deposit that arrives
            // exactly at the deadline is accepted.
            if let Some(cause) = self.wait_failure(&state, absent, deadline) {
                return Err(rendezvous.fail(state, self.rank, cause));
            }
            state = rendezvous.sleep(state, deadline);
        }
    }

    /// Returns an error if waiting for the ranks `absent` must end; `None` if
    /// they may still deposit.
    fn wait_failure(
        &self,
        state: &RendezvousState,
        absent: Vec<usize>,
        deadline: Option<Instant>,
    ) -> Option<CommError> {
        let call = Box::new(self.call.clone());
        // A rank that is computing a result of a complete round may already
        // have left the group, but it will still finish the result.
        let missing = state.rounds.get(&call.sequence).map(Round::missing).unwrap_or_default();
        if let Some(&rank) = missing.iter().find(|rank| state.ranks[**rank].has_left) {
            return Some(CommError::Left { rank, waiting: self.rank, call });
        }
        deadline.is_some_and(|deadline| deadline <= Instant::now()).then(|| {
            let seen = |rank| Absence { rank, host: None, last: state.ranks[rank].last.clone() };
            let absent = absent.into_iter().map(seen).collect();
            CommError::Timeout { rank: self.rank, call, waited: self.rendezvous.timeout, absent }
        })
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut state = self.rendezvous.lock();
        let finished = match state.rounds.get_mut(&self.call.sequence).map(Round::release) {
            Some(Completion::Complete) => state.rounds.remove(&self.call.sequence),
            _ => None,
        };
        drop(state);
        drop(finished); // Payloads are dropped without the lock.
    }
}
