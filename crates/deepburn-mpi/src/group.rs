//! The process group of one run.
//!
//! [`MpiGroup`] implements the collectives of `deepburn_comm`. Starting a collective checks its
//! arguments on the calling thread, counts it, and queues it for the communication thread. The
//! communication thread runs queued collectives one at a time, in the order in which they were
//! started. All ranks must start the same collectives in this common order.
//!
//! ```text
//! rank's thread           start gather 1 | compute | start gather 2 | compute | wait 1 | wait 2
//! communication thread                   | gather 1 ...........| gather 2 .......|
//! ```

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use deepburn_comm::{
    CommError, Direction, GroupFailure, GroupId, GroupRanks, MessageTag, Payload, Pending,
    ProcessGroup, RankHandle, Side, Statistics,
};

use crate::collectives;
use crate::process::{Process, Work};
use crate::settings::Settings;

/// The time that the other ranks stay alive after a failure. The launcher ends all processes as
/// soon as the first process exits, and the rank that reports the failure needs time to print it.
const REPORT_HEAD_START: Duration = Duration::from_millis(200);

/// The interval at which a waiting rank checks whether its launcher is ending it.
const TERMINATION_INTERVAL: Duration = Duration::from_millis(20);

/// A function that runs work with arrays on the communication thread.
///
/// If a device has one queue per thread, the function must select the queue of the rank's thread.
pub type OnDevice = fn(&mut dyn FnMut());

/// The process group of one run of this rank.
///
/// All ranks must start the same collectives in the same order, across all [`Payload`] types. The
/// communication thread runs them one at a time in that order while the rank's thread computes. A
/// collective that is started early overlaps with computation, but it may still be incomplete when
/// its result is needed; [`Pending::wait`] then blocks until it is complete.
///
/// Clones share one membership; dropping the last one leaves the group.
#[derive(Debug, Clone)]
pub struct MpiGroup {
    /// Clones share the membership.
    membership: Arc<Membership>,
    ranks: GroupRanks,
}

/// The state that is shared by the clones of a group. Dropping it leaves the group.
#[derive(Debug)]
struct Membership {
    /// The process of the rank.
    process: Process,
    /// The function that runs work with arrays on the communication thread.
    on_device: OnDevice,
    /// Whether this rank starts no more collectives.
    has_left: AtomicBool,
    /// The counts of started collectives.
    statistics: Mutex<Statistics>,
}

impl Membership {
    /// Announces, at most once, that this rank starts no more collectives. The announcement must
    /// not be repeated when a group is dropped late, because it would then apply to the next run.
    fn leave_once(&self) {
        if self.has_left.swap(true, Ordering::Relaxed) {
            return;
        }
        self.process.submit(Work::Run(Box::new(|link| {
            // The error can be ignored: the other ranks are informed of failures separately.
            let _ = link.leave();
        })));
    }

    /// Waits for a result of the communication thread, or until the launcher
    /// ends this process.
    ///
    /// # Errors
    ///
    /// Returns the error of the collective, or the failure that ended the run.
    fn wait<R>(&self, answered: &Receiver<Result<R, CommError>>) -> Result<R, CommError> {
        let (status, rank) = (self.process.status(), self.process.rank());
        loop {
            match answered.recv_timeout(TERMINATION_INTERVAL) {
                Ok(result) => return result,
                Err(RecvTimeoutError::Timeout) => status.terminate(rank).map_or(Ok(()), Err)?,
                // The work or the communication thread has panicked.
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(status.cause().unwrap_or_else(|| {
                        let reason = "the communication thread has ended".to_owned();
                        CommError::Transport { rank, reason }
                    }));
                }
            }
        }
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.leave_once();
    }
}

impl Process {
    /// Starts a run and returns its process group. Every rank must call this function the same
    /// number of times. Groups of earlier runs must no longer be used.
    ///
    /// After a run has failed, all later runs fail with the same error, because messages of the
    /// failed run could still arrive and be mistaken for messages of the new run. `on_device` runs
    /// the work with arrays on the communication thread.
    pub fn group(&self, settings: Settings, on_device: OnDevice) -> MpiGroup {
        self.begin_run(settings);
        let (process, has_left) = (self.clone(), AtomicBool::new(false));
        let membership = Membership { process, on_device, has_left, statistics: Mutex::default() };
        let ranks = GroupRanks::world(self.rank(), self.world_size());
        MpiGroup { membership: Arc::new(membership), ranks }
    }
}

impl MpiGroup {
    /// Returns the rank, from 0.
    pub fn rank(&self) -> usize {
        self.membership.process.rank()
    }

    /// Returns the number of ranks.
    pub fn world_size(&self) -> usize {
        self.membership.process.world_size()
    }

    /// Returns the counts of the collectives that this rank has started.
    pub fn statistics(&self) -> Statistics {
        self.membership.statistics.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl RankHandle for MpiGroup {
    fn rank(&self) -> usize {
        self.rank()
    }

    /// Ends the run with this rank's failure. Waits briefly until the other ranks have been
    /// informed, and gives the reporting rank time to print the failure.
    fn abort(&self, cause: CommError) {
        let status = self.membership.process.status();
        status.end();
        status.fail(self.rank(), cause);
        status.wait_announced();
        if !status.is_reporter(self.rank()) {
            thread::sleep(REPORT_HEAD_START);
        }
    }

    /// Announces that this rank starts no more collectives. Pending collectives
    /// can still be completed.
    fn leave(&self) {
        self.membership.process.status().end();
        self.membership.leave_once();
    }

    /// Returns the first failure of the run.
    fn failure(&self) -> Option<GroupFailure> {
        self.membership.process.status().failure()
    }
}

impl MpiGroup {
    fn unsupported(&self, direction: Direction, tag: MessageTag) -> CommError {
        let reason =
            "messages between processes are not supported yet; use rank threads".to_owned();
        CommError::InvalidMessage {
            rank: self.rank(),
            direction,
            tag: Box::new(tag),
            group: GroupId::World,
            reason,
        }
    }
}

impl<T: Payload> ProcessGroup<T> for MpiGroup {
    fn ranks(&self) -> &GroupRanks {
        &self.ranks
    }

    fn send(&self, _to: usize, tag: MessageTag, _arrays: Vec<T>) -> Result<(), CommError> {
        Err(self.unsupported(Direction::Send, tag))
    }

    fn receive(&self, _: usize, tag: MessageTag, _like: Vec<T>) -> Result<Pending<T>, CommError> {
        Err(self.unsupported(Direction::Receive, tag))
    }

    fn has_arrived(&self, _from: usize, _tag: &MessageTag) -> bool {
        false
    }

    /// Queues the collective for the communication thread at the next position of the common order.
    ///
    /// The arrays are moved to the communication thread, which drops them when the collective is
    /// complete. Dropping the handle does not cancel the collective, because the other ranks take
    /// part in it.
    ///
    /// # Errors
    ///
    /// Returns the failure of the run, or an error if this rank has left the
    /// group.
    fn start(&self, side: Side, arrays: Vec<T>) -> Result<Pending<T>, CommError> {
        if let Some(cause) = self.membership.process.status().cause() {
            return Err(cause);
        }
        if self.membership.has_left.load(Ordering::Relaxed) {
            let Side { rank, operation, tag, .. } = side;
            return Err(CommError::AfterLeave { rank, operation, tag });
        }
        let span = side.span();
        let mut statistics =
            self.membership.statistics.lock().unwrap_or_else(PoisonError::into_inner);
        statistics.record(side.operation, &side.tag, side.signature.as_ref());
        // The lock is released before the collective is queued, so that readers of the statistics
        // never wait for the queue.
        drop(statistics);

        let (answer, answered) = mpsc::sync_channel(1);
        let on_device = self.membership.on_device;
        self.membership.process.submit(Work::Run(Box::new(move |link| {
            // `on_device` takes an `FnMut`, but the collective can run only once.
            let mut arrays = Some(arrays);
            on_device(&mut || {
                if let Some(arrays) = arrays.take() {
                    // The rank may have dropped its handle.
                    let _ = answer.send(collectives::run(link, &side, arrays));
                }
            });
        })));
        let membership = self.membership.clone();
        Ok(Pending::new(move || span.in_scope(|| membership.wait(&answered))))
    }

    /// Returns the failure of the run without waiting. Computing ranks call this function at every
    /// op to detect failures.
    fn check(&self) -> Result<(), CommError> {
        self.membership.process.status().cause().map_or(Ok(()), Err)
    }

    /// Records the failure; the communication thread announces it.
    fn abort(&self, cause: CommError) {
        self.membership.process.status().fail(self.rank(), cause);
    }
}
