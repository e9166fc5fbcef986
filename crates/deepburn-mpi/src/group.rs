//! The process group of one run, as its rank sees it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use deepburn_comm::arguments::{check_chunks, check_reduction, check_root};
use deepburn_comm::{
    CommError, Failure, Operation, Payload, Pending, ProcessGroup, RankHandle, ReduceOp, Side,
    Signature, Statistics, Tag,
};

use crate::collectives;
use crate::link::Link;
use crate::process::{Process, Work};

/// How long a rank that fails waits until the others have been told.
const ANNOUNCE_TIMEOUT: Duration = Duration::from_millis(500);

/// How long the other ranks stay after a failure: the launcher ends all processes as soon as the first
/// has ended, and the rank that reports the failure is to be heard.
const REPORT_HEAD_START: Duration = Duration::from_millis(200);

/// How work with arrays is run on the communication thread.
///
/// On a device that queues work thread by thread, the communication thread has to use the queue of
/// the rank.
pub type OnDevice = fn(&mut dyn FnMut());

/// The process group of one run of this rank.
///
/// It carries every [`Payload`], in one common order. A collective is handed to the communication
/// thread, which runs it while the rank computes: a gather that was started early is there when it
/// is waited for. Clones are the same rank; when the last is dropped the rank has left.
#[derive(Debug, Clone)]
pub struct MpiGroup {
    inner: Arc<Inner>,
}

/// What the clones of a group share; leaves when the last is gone.
#[derive(Debug)]
struct Inner {
    process: Process,
    on_device: OnDevice,
    has_left: AtomicBool,
    statistics: Mutex<Statistics>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.process.submit(Work::Run(Box::new(|link| {
            // The others learn of a failure in another way.
            let _ = link.leave();
        })));
    }
}

impl MpiGroup {
    pub(crate) fn new(process: Process, on_device: OnDevice) -> Self {
        let (has_left, statistics) = (AtomicBool::new(false), Mutex::default());
        Self { inner: Arc::new(Inner { process, on_device, has_left, statistics }) }
    }

    /// This rank, from 0.
    pub fn rank(&self) -> usize {
        self.inner.process.rank()
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.inner.process.world_size()
    }

    /// The collectives that this rank has started so far.
    pub fn statistics(&self) -> Statistics {
        self.inner.statistics.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Hands `work` to the communication thread, at its place in the common order.
    fn start<T: Payload>(
        &self,
        side: Side,
        work: impl FnOnce(&mut Link, &Side) -> Result<Vec<T>, CommError> + Send + 'static,
    ) -> Result<Pending<T>, CommError> {
        if let Some(cause) = self.inner.process.status().cause() {
            return Err(cause);
        }
        if self.inner.has_left.load(Ordering::Relaxed) {
            let Side { rank, operation, tag, .. } = side;
            return Err(CommError::AfterLeave { rank, operation, tag });
        }
        let mut statistics = self.inner.statistics.lock().unwrap_or_else(PoisonError::into_inner);
        statistics.record(side.operation, &side.tag, side.signature.as_ref());
        drop(statistics);

        let (answer, answered) = mpsc::sync_channel(1);
        let on_device = self.inner.on_device;
        self.inner.process.submit(Work::Run(Box::new(move |link| {
            let mut work = Some(work);
            on_device(&mut || {
                if let Some(work) = work.take() {
                    // Nobody may be waiting any more.
                    let _ = answer.send(work(link, &side));
                }
            });
        })));
        let inner = self.inner.clone();
        Ok(Pending::new(move || match answered.recv() {
            Ok(result) => result,
            // The work has panicked, or the communication thread has.
            Err(_) => Err(inner.process.status().cause().unwrap_or_else(|| {
                let rank = inner.process.rank();
                let reason = "the communication thread has ended".to_owned();
                CommError::Transport { rank, reason }
            })),
        }))
    }

    fn side<T>(&self, operation: Operation, tag: Tag, signature: Option<Signature>) -> Side {
        let payload = std::any::type_name::<T>().into();
        Side { rank: self.rank(), operation, tag, payload, signature }
    }

    /// Turns down a collective that cannot be done, before it takes a place in the common order.
    fn checked(
        &self,
        operation: Operation,
        tag: &Tag,
        check: Result<(), String>,
    ) -> Result<(), CommError> {
        let (rank, tag) = (self.rank(), tag.clone());
        check.map_err(|reason| CommError::InvalidArgument { rank, operation, tag, reason })
    }
}

impl RankHandle for MpiGroup {
    fn rank(&self) -> usize {
        self.rank()
    }

    fn abort(&self, cause: CommError) {
        let status = self.inner.process.status();
        status.end();
        status.fail(self.rank(), cause);
        status.wait_announced(ANNOUNCE_TIMEOUT);
        if !status.is_reporter(self.rank()) {
            thread::sleep(REPORT_HEAD_START);
        }
    }

    /// Handles that are still held can be waited for.
    fn leave(&self) {
        self.inner.has_left.store(true, Ordering::Relaxed);
        self.inner.process.status().end();
        self.inner.process.submit(Work::Run(Box::new(|link| {
            let _ = link.leave();
        })));
    }

    fn failure(&self) -> Option<Failure> {
        self.inner.process.status().failure()
    }
}

impl<T: Payload> ProcessGroup<T> for MpiGroup {
    fn rank(&self) -> usize {
        self.rank()
    }

    fn world_size(&self) -> usize {
        self.world_size()
    }

    fn all_reduce(&self, tag: Tag, arrays: Vec<T>, op: ReduceOp) -> Result<Pending<T>, CommError> {
        let operation = Operation::AllReduce(op);
        self.checked(operation, &tag, check_reduction(&arrays, op))?;
        let side = self.side::<T>(operation, tag, Some(Signature::of(&arrays)));
        self.start(side, move |link, side| collectives::all_reduce(link, side, &arrays, op))
    }

    fn reduce_scatter(
        &self,
        tag: Tag,
        arrays: Vec<T>,
        op: ReduceOp,
    ) -> Result<Pending<T>, CommError> {
        let operation = Operation::ReduceScatter(op);
        self.checked(operation, &tag, check_reduction(&arrays, op))?;
        let side = self.side::<T>(operation, tag, Some(Signature::of(&arrays)));
        self.start(side, move |link, side| collectives::reduce_scatter(link, side, &arrays, op))
    }

    fn all_gather(
        &self,
        tag: Tag,
        chunks: Vec<T>,
        numels: Vec<usize>,
    ) -> Result<Pending<T>, CommError> {
        let operation = Operation::AllGather;
        self.checked(operation, &tag, check_chunks(&chunks, &numels, self.world_size()))?;
        let signature = Signature::of_gather(&chunks, &numels);
        let side = self.side::<T>(operation, tag, Some(signature));
        self.start(side, move |link, side| collectives::all_gather(link, side, &chunks, &numels))
    }

    fn broadcast(&self, tag: Tag, arrays: Vec<T>, root: usize) -> Result<Pending<T>, CommError> {
        let operation = Operation::Broadcast { root };
        self.checked(operation, &tag, check_root(root, self.world_size()))?;
        let side = self.side::<T>(operation, tag, Some(Signature::of(&arrays)));
        self.start(side, move |link, side| collectives::broadcast(link, side, arrays, root))
    }

    fn barrier(&self, tag: Tag) -> Result<(), CommError> {
        let side = self.side::<()>(Operation::Barrier, tag, None);
        let pending: Pending<T> = self.start(side, |link, side| {
            collectives::barrier(link, side)?;
            Ok(Vec::new())
        })?;
        pending.wait().map(drop)
    }

    fn check(&self) -> Result<(), CommError> {
        self.inner.process.status().cause().map_or(Ok(()), Err)
    }

    fn abort(&self, cause: CommError) {
        self.inner.process.status().fail(self.rank(), cause);
    }
}
