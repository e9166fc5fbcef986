//! The process group of one run, from the view of its rank.
//!
//! [`MpiGroup`] implements the collectives of `deepburn_comm`. Starting a
//! collective checks its arguments on the calling thread, counts it, and queues
//! it for the communication thread. The thread runs queued collectives one at a
//! time, in the order in which they were started; this is the common order,
//! which must be the same on all ranks.
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
    CollectiveTag, CommError, GroupFailure, Payload, Pending, ProcessGroup, RankHandle, ReduceOp,
    Side, Statistics,
};
use tracing::{Span, trace_span};

use crate::collectives;
use crate::link::Link;
use crate::process::{Process, Work};
use crate::settings::Settings;

/// The time that the other ranks stay alive after a failure. The launcher ends
/// all processes as soon as the first one has exited, and the rank that reports
/// the failure must be able to print it.
const REPORT_HEAD_START: Duration = Duration::from_millis(200);

/// The interval at which a waiting rank checks whether its launcher ends it.
const TERMINATION_INTERVAL: Duration = Duration::from_millis(20);

/// Runs work with arrays on the communication thread.
///
/// On a device with one queue per thread, the communication thread must use the
/// queue of the rank.
pub type OnDevice = fn(&mut dyn FnMut());

/// The process group of one run of this rank.
///
/// It exchanges every [`Payload`], in one common order. A collective is queued
/// for the communication thread, which runs it while the rank computes, so a
/// gather that was started early is complete when the rank needs it. Clones are
/// the same rank. When the last clone is dropped, the rank leaves.
#[derive(Debug, Clone)]
pub struct MpiGroup {
    /// Clones share the membership.
    membership: Arc<Membership>,
}

/// The state that the clones of a group share. Dropping it leaves the group.
#[derive(Debug)]
struct Membership {
    /// The process of the rank.
    process: Process,
    /// Runs work with arrays on the communication thread.
    on_device: OnDevice,
    /// Whether this rank starts no more collectives.
    has_left: AtomicBool,
    /// The counts of started collectives.
    statistics: Mutex<Statistics>,
}

impl Membership {
    /// Tells the others, once, that this rank starts no more collectives. A
    /// group that is dropped late must not leave the next run.
    fn leave_once(&self) {
        if self.has_left.swap(true, Ordering::Relaxed) {
            return;
        }
        self.process.submit(Work::Run(Box::new(|link| {
            // The others learn of a failure in another way.
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
    /// Starts a run with all ranks; every rank must call this the same number
    /// of times. The group of an earlier run must no longer be used.
    ///
    /// After a failed run, every later one fails with the same error, because
    /// messages of the failed run could still arrive and be mistaken for
    /// messages of the new one. `on_device` runs the work with arrays on the
    /// communication thread.
    pub fn group(&self, settings: Settings, on_device: OnDevice) -> MpiGroup {
        self.begin_run(settings);
        let (process, has_left) = (self.clone(), AtomicBool::new(false));
        let membership = Membership { process, on_device, has_left, statistics: Mutex::default() };
        MpiGroup { membership: Arc::new(membership) }
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

    /// Queues `work` for the communication thread at the next position of the
    /// common order. `span` is open while the rank waits for the result.
    ///
    /// The arrays move to the communication thread, which drops them when the
    /// collective is complete. A handle that is dropped does not cancel the
    /// collective, because the other ranks take part in it.
    ///
    /// # Errors
    ///
    /// Returns the failure of the run, or an error if this rank has left the
    /// group.
    fn start<T: Payload>(
        &self,
        side: Side,
        span: Span,
        work: impl FnOnce(&mut Link, &Side) -> Result<Vec<T>, CommError> + Send + 'static,
    ) -> Result<Pending<T>, CommError> {
        if let Some(cause) = self.membership.process.status().cause() {
            return Err(cause);
        }
        if self.membership.has_left.load(Ordering::Relaxed) {
            let Side { rank, operation, tag, .. } = side;
            return Err(CommError::AfterLeave { rank, operation, tag });
        }
        let mut statistics =
            self.membership.statistics.lock().unwrap_or_else(PoisonError::into_inner);
        statistics.record(side.operation, &side.tag, side.signature.as_ref());
        // Unlocked before the collective is queued, so that a reader of the counts never waits for
        // the queue.
        drop(statistics);

        let (answer, answered) = mpsc::sync_channel(1);
        let on_device = self.membership.on_device;
        self.membership.process.submit(Work::Run(Box::new(move |link| {
            // `on_device` takes an `FnMut`, but the work can run only once.
            let mut work = Some(work);
            on_device(&mut || {
                if let Some(work) = work.take() {
                    // The rank may have dropped its handle.
                    let _ = answer.send(work(link, &side));
                }
            });
        })));
        let membership = self.membership.clone();
        Ok(Pending::new(move || span.in_scope(|| membership.wait(&answered))))
    }
}

impl RankHandle for MpiGroup {
    fn rank(&self) -> usize {
        self.rank()
    }

    /// Ends the run with this rank's failure. Waits for a short time until the
    /// others know of it, and gives the rank that reports it a head start.
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

/// Every collective checks its arguments before anything is exchanged, and
/// opens a trace span with its name and tag.
impl<T: Payload> ProcessGroup<T> for MpiGroup {
    fn rank(&self) -> usize {
        self.rank()
    }

    fn world_size(&self) -> usize {
        self.world_size()
    }

    fn all_reduce(
        &self,
        tag: CollectiveTag,
        arrays: Vec<T>,
        op: ReduceOp,
    ) -> Result<Pending<T>, CommError> {
        let side = Side::all_reduce(self.rank(), tag, &arrays, op)?;
        let span = trace_span!("all_reduce", tag = %side.tag);
        self.start(side, span, move |link, side| collectives::all_reduce(link, side, &arrays, op))
    }

    fn reduce_scatter(
        &self,
        tag: CollectiveTag,
        arrays: Vec<T>,
        op: ReduceOp,
    ) -> Result<Pending<T>, CommError> {
        let side = Side::reduce_scatter(self.rank(), tag, &arrays, op)?;
        let span = trace_span!("reduce_scatter", tag = %side.tag);
        self.start(side, span, move |link, side| {
            collectives::reduce_scatter(link, side, &arrays, op)
        })
    }

    fn all_gather(
        &self,
        tag: CollectiveTag,
        chunks: Vec<T>,
        numels: Vec<usize>,
    ) -> Result<Pending<T>, CommError> {
        let side = Side::all_gather(self.rank(), self.world_size(), tag, &chunks, &numels)?;
        let span = trace_span!("all_gather", tag = %side.tag);
        self.start(side, span, move |link, side| {
            collectives::all_gather(link, side, &chunks, &numels)
        })
    }

    fn all_to_all(&self, tag: CollectiveTag, arrays: Vec<T>) -> Result<Pending<T>, CommError> {
        let side = Side::all_to_all(self.rank(), tag, &arrays)?;
        let span = trace_span!("all_to_all", tag = %side.tag);
        self.start(side, span, move |link, side| collectives::all_to_all(link, side, &arrays))
    }

    fn broadcast(
        &self,
        tag: CollectiveTag,
        arrays: Vec<T>,
        root: usize,
    ) -> Result<Pending<T>, CommError> {
        let side = Side::broadcast(self.rank(), self.world_size(), tag, &arrays, root)?;
        let span = trace_span!("broadcast", tag = %side.tag);
        self.start(side, span, move |link, side| collectives::broadcast(link, side, arrays, root))
    }

    /// Waits on the calling thread, unlike the other collectives.
    fn barrier(&self, tag: CollectiveTag) -> Result<(), CommError> {
        let side = Side::barrier(self.rank(), tag);
        let span = trace_span!("barrier", tag = %side.tag);
        let pending: Pending<T> = self.start(side, span, |link, side| {
            collectives::barrier(link, side)?;
            Ok(Vec::new())
        })?;
        pending.wait().map(drop)
    }

    /// Returns the failure of the run without waiting. A computing rank calls
    /// this at its ops, so that it notices a failure.
    fn check(&self) -> Result<(), CommError> {
        self.membership.process.status().cause().map_or(Ok(()), Err)
    }

    /// Records the failure; the communication thread announces it.
    fn abort(&self, cause: CommError) {
        self.membership.process.status().fail(self.rank(), cause);
    }
}
