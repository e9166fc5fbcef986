//! The state of a run that both threads of a process share.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use deepburn_comm::{Absence, Call, CommError, GroupFailure};

/// The time that a rank may continue to compute after its run has failed, before its process is
/// ended. A rank detects a failure at its next op. Without this limit, a hanging rank would never
/// end.
const LAST_OP: Duration = Duration::from_millis(1200);
/// The maximum time that a failing process waits until the other ranks have been informed of the
/// failure.
const ANNOUNCE_TIMEOUT: Duration = Duration::from_millis(500);
/// The exit status of a process whose run has failed.
pub(crate) const FAILED: i32 = 1;

/// The state of a run that both threads of a process share.
#[derive(Debug, Default)]
pub(crate) struct RunStatus {
    state: Mutex<LockedStatus>,
    changed: Condvar,
}

/// The state behind the lock.
#[derive(Debug, Default)]
struct LockedStatus {
    /// The first failure of the run; later failures are ignored.
    failure: Option<GroupFailure>,
    /// Whether the other ranks have been informed of the failure.
    announced: bool,
    /// Whether the rank's own code is running.
    running: bool,
    /// The last step that the rank has started, from 1.
    steps: Option<Arc<AtomicU64>>,
    /// Set when the launcher ends this process.
    terminated: Option<Arc<AtomicBool>>,
    /// The current wait of the communication thread.
    wait: Option<Wait>,
    /// The last collective in which the communication thread waited.
    last_call: Option<Call>,
    /// The ranks for which it waited last. A wait may begin with all of them there.
    last_absent: Vec<Absence>,
}

impl LockedStatus {
    /// Returns the rank's current step as the prefix of an error message.
    fn step(&self) -> String {
        let step = self.steps.as_ref().map(|steps| steps.load(Ordering::Relaxed));
        step.map(|step| format!("step {step}: ")).unwrap_or_default()
    }
}

/// The collective in which a rank waits, and the ranks for which it waits.
#[derive(Debug, Clone)]
pub(crate) struct Wait {
    /// The collective; `None` while the ranks connect or this rank waits for a message.
    pub(crate) call: Option<Call>,
    /// The missing ranks, with their last known collectives.
    pub(crate) absent: Vec<Absence>,
}

impl RunStatus {
    /// Sets the counter of the rank's steps.
    pub(crate) fn set_steps(&self, steps: Arc<AtomicU64>) {
        self.lock().steps = Some(steps);
    }

    /// Sets the flag that signals termination by the launcher.
    pub(crate) fn set_terminated(&self, terminated: Arc<AtomicBool>) {
        self.lock().terminated = Some(terminated);
    }

    /// Records that the rank's own code is running, or has ended.
    pub(crate) fn set_running(&self, running: bool) {
        let mut state = self.lock();
        state.running = running;
        // A wait of an earlier run says nothing about this one.
        state.last_absent.clear();
    }

    /// Returns true if the rank's own code is running.
    pub(crate) fn is_running(&self) -> bool {
        self.lock().running
    }

    /// Ends the run, unless it has already failed. Afterwards this process exchanges no more data.
    pub(crate) fn fail(&self, reporter: usize, cause: CommError) {
        let failure = GroupFailure { reporter, at: Instant::now(), cause };
        let mut state = self.lock();
        if state.failure.is_none() {
            tracing::debug!(reporter, cause = %failure.cause, "the process group has ended");
            state.failure = Some(failure);
        }
    }

    /// Records the ranks for which the communication thread waits.
    pub(crate) fn set_wait(&self, wait: Option<Wait>) {
        let mut state = self.lock();
        if let Some(Wait { call, absent }) = &wait {
            if let Some(call) = call {
                state.last_call = Some(call.clone());
            }
            if !absent.is_empty() {
                state.last_absent.clone_from(absent);
            }
        }
        state.wait = wait;
    }

    /// Returns the last collective that this rank has reached.
    pub(crate) fn last_call(&self) -> Option<Call> {
        self.lock().last_call.clone()
    }

    /// Returns the rank's current step as the prefix of an error message.
    pub(crate) fn step(&self) -> String {
        self.lock().step()
    }

    /// If the launcher is ending this process, ends the run of the waiting `rank` and returns the
    /// failure. `own` is a wait of the rank's own thread; `None` if it waits for the communication
    /// thread.
    ///
    /// This does not use the communication thread, because an Open MPI call on a broken connection
    /// may block that thread for seconds. If it is blocked between two collectives, it has not
    /// noted the new wait, and it reports the ranks of the last one. The ranks can no longer agree
    /// on one reporter, so every rank that waits for all other ranks reports the failure.
    pub(crate) fn terminate(&self, rank: usize, own: Option<Wait>) -> Option<CommError> {
        let (wait, is_noted) = {
            let mut state = self.lock();
            if !state.terminated.as_ref()?.load(Ordering::Relaxed) {
                return None;
            }
            // A rank that is blocked while it sends to a rank which has arrived waits for nobody.
            let noted = own.or_else(|| state.wait.clone()).filter(|it| !it.absent.is_empty());
            let is_noted = noted.is_some();
            let last = || Wait { call: None, absent: state.last_absent.clone() };
            let wait = Some(noted.unwrap_or_else(last)).filter(|it| !it.absent.is_empty())?;
            // Nobody has to be informed: the launcher ends the other ranks too.
            state.announced = true;
            (wait, is_noted)
        };
        let is_absent = |rank: &usize| wait.absent.iter().any(|absence| absence.rank == *rank);
        // The ranks of the last wait need not be absent now, so nothing is left to them.
        let others = if is_noted { 0..rank } else { 0..0 };
        let reporter = others.into_iter().find(|other| !is_absent(other)).unwrap_or(rank);
        let Wait { call, absent } = wait;
        self.fail(reporter, CommError::Terminated { rank, call: call.map(Box::new), absent });
        self.cause()
    }

    /// Returns the first failure of the run with its reporter and time.
    pub(crate) fn failure(&self) -> Option<GroupFailure> {
        self.lock().failure.clone()
    }

    /// Returns the failure that ended the run.
    pub(crate) fn cause(&self) -> Option<CommError> {
        self.failure().map(|failure| failure.cause)
    }

    /// Checks that the run has not failed.
    ///
    /// # Errors
    /// Returns the cause of the failure.
    pub(crate) fn check(&self) -> Result<(), CommError> {
        self.cause().map_or(Ok(()), Err)
    }

    /// Returns true if `rank` has to report the failure.
    pub(crate) fn is_reporter(&self, rank: usize) -> bool {
        self.failure().is_some_and(|failure| failure.reporter == rank)
    }

    /// Records that the other ranks have been informed of the failure, and wakes the thread that
    /// waits for this.
    pub(crate) fn set_announced(&self) {
        self.lock().announced = true;
        self.changed.notify_all();
    }

    /// Waits until the other ranks have been informed of the failure, for at most
    /// `ANNOUNCE_TIMEOUT`.
    pub(crate) fn wait_announced(&self) {
        let waiting = |state: &mut LockedStatus| !state.announced;
        drop(self.changed.wait_timeout_while(self.lock(), ANNOUNCE_TIMEOUT, waiting));
    }

    /// Ends the process if its rank has not detected the failure of the run in time.
    pub(crate) fn end_overdue(&self, rank: usize, hosts: impl FnOnce() -> Vec<Arc<str>>) {
        let state = self.lock();
        let Some(failure) = state.failure.as_ref().filter(|_| state.running) else { return };
        if failure.at.elapsed() < LAST_OP {
            return;
        }
        if failure.reporter == rank {
            let host = &hosts()[rank];
            eprintln!("error: rank {rank} on {host} failed: {}{}", state.step(), failure.cause);
        }
        // SAFETY: ends the process without running anything else of it; its rank is stuck.
        unsafe { libc::_exit(FAILED) }
    }

    /// Locks the state. The state is valid even if another thread panicked while it held the lock.
    fn lock(&self) -> MutexGuard<'_, LockedStatus> {
        // No change is interrupted by code that could panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Open MPI may block the communication thread between two collectives, before it has noted the
    /// wait of the second one.
    #[test]
    fn a_rank_that_is_ended_between_collectives_names_the_ranks_of_the_last_one() {
        let (status, terminated) = (RunStatus::default(), Arc::new(AtomicBool::new(false)));
        status.set_terminated(terminated.clone());
        let absent = vec![Absence { rank: 2, host: Some("other".to_owned()), last: None }];
        status.set_wait(Some(Wait { call: None, absent: absent.clone() }));
        // The next wait begins with all ranks there.
        status.set_wait(Some(Wait { call: None, absent: vec![] }));
        assert_eq!(status.terminate(1, None), None, "nothing ends the process");
        terminated.store(true, Ordering::Relaxed);
        let cause = CommError::Terminated { rank: 1, call: None, absent };
        assert_eq!(status.terminate(1, None), Some(cause));
        assert!(status.is_reporter(1), "rank 0 may be the one that has died");
        let status = RunStatus::default();
        status.set_terminated(terminated);
        status.set_wait(None);
        assert_eq!(status.terminate(1, None), None, "it has not waited yet");
    }
}
