//! The process group of one run.
//!
//! [`MpiGroup`] implements the collectives of `deepburn_comm`. Starting a collective checks its
//! arguments on the calling thread, counts it, and queues it for the communication thread. The
//! communication thread runs queued collectives one at a time, in the order in which they were
//! started. All ranks must start the same collectives in this common order. The thread runs the
//! collectives of all groups one after the other, so ranks that share several groups must start
//! theirs in consistent orders.
//!
//! ```text
//! rank's thread           start gather 1 | compute | start gather 2 | compute | wait 1 | wait 2
//! communication thread                   | gather 1 ...........| gather 2 .......|
//! ```

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use deepburn_comm::{
    Absence, CommError, GroupFailure, GroupRanks, MessageContents, MessageDirection, MessageRoute,
    MessageTag, Payload, Pending, ProcessGroup, RankHandle, ReceiveId, Side, Statistics, Subgroup,
};

use crate::collectives;
use crate::deadline::Deadline;
use crate::letters::{EncodedArray, Outgoing, Receipt, ReceivedLetter};
use crate::link::{GroupLink, turn};
use crate::process::{Process, QueuedWork};
use crate::settings::Settings;
use crate::status::Wait;

/// The time that the other ranks stay alive after a failure. The launcher ends all processes as
/// soon as the first process exits, and the rank that reports the failure needs time to print it.
const REPORT_HEAD_START: Duration = Duration::from_millis(200);

/// The interval at which a waiting rank checks whether its launcher is ending it.
const TERMINATION_INTERVAL: Duration = Duration::from_millis(20);

/// A function that runs work with arrays on the communication thread.
///
/// If a device has one queue per thread, the function must select the queue of the rank's thread.
pub type OnDevice = fn(&mut dyn FnMut());

/// The process group of one run of this rank: the world or a [`Subgroup`].
///
/// All ranks must start the same collectives in the same order, across all [`Payload`] types. The
/// communication thread runs the collectives of all groups one at a time, in the order in which
/// they were started, while the rank's thread computes. A collective that is started early overlaps
/// with computation, but it may still be incomplete when its result is needed; [`Pending::wait`]
/// then blocks until it is complete.
///
/// Messages between two ranks do not wait for collectives, nor collectives for messages.
///
/// Clones and subgroups share one membership; dropping the last handle leaves all groups.
#[derive(Debug, Clone)]
pub struct MpiGroup {
    /// Clones and subgroups share the membership.
    membership: Arc<Membership>,
    ranks: GroupRanks,
}

/// The state that is shared by the clones and subgroups of a group. Dropping it leaves all groups.
#[derive(Debug)]
struct Membership {
    /// The process of the rank.
    process: Process,
    /// The function that runs work with arrays on the communication thread.
    on_device: OnDevice,
    /// The time that a message is waited for.
    timeout: Duration,
    /// Whether this rank starts no more collectives and messages.
    has_left: AtomicBool,
    /// The counts of started collectives and messages.
    statistics: Mutex<Statistics>,
    /// The number of subgroups created with each name.
    created: Mutex<HashMap<&'static str, u32>>,
}

impl Membership {
    /// Announces, at most once, that this rank starts no more collectives. The announcement must
    /// not be repeated when a group is dropped late, because it would then apply to the next run.
    fn leave_once(&self) {
        if self.has_left.swap(true, Ordering::Relaxed) {
            return;
        }
        self.process.submit(QueuedWork::Run(Box::new(|link| {
            // The error can be ignored: the other ranks are informed of failures separately.
            let _ = link.leave();
        })));
    }

    /// Waits for a result of the communication thread, or until the launcher ends this process.
    ///
    /// # Errors
    /// Returns the error of the collective, or the failure that ended the run.
    fn wait<R>(&self, answered: &Receiver<Result<R, CommError>>) -> Result<R, CommError> {
        let (status, rank) = (self.process.status(), self.process.rank());
        loop {
            match answered.recv_timeout(TERMINATION_INTERVAL) {
                Ok(result) => return result,
                Err(RecvTimeoutError::Timeout) => {
                    status.terminate(rank, None).map_or(Ok(()), Err)?
                }
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

    /// Locks the counts. They are valid even if another thread panicked while it held the lock.
    fn statistics(&self) -> MutexGuard<'_, Statistics> {
        self.statistics.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a message of `bytes`.
    ///
    /// # Errors
    /// Returns the failure of the run, or an error if this rank has left.
    fn count_message(
        &self,
        direction: MessageDirection,
        route: &MessageRoute,
        bytes: usize,
    ) -> Result<(), CommError> {
        self.process.status().check()?;
        if self.has_left.load(Ordering::Relaxed) {
            return Err(route.clone().after_leave(direction));
        }
        self.statistics().record_message(direction, &route.tag, bytes);
        Ok(())
    }

    /// Returns the sender of a message, for an error or for the launcher's end of this process.
    fn sender(&self, route: &MessageRoute) -> Absence {
        let host = self.process.hosts().get(route.from).map(|host| host.to_string());
        Absence { rank: route.from, host, last: self.process.letters().last(route.from) }
    }

    /// Waits for a message.
    ///
    /// # Errors
    /// Returns the failure that ended the run, which may be that the message does not come.
    fn wait_for_letter(
        &self,
        route: &MessageRoute,
        id: ReceiveId,
    ) -> Result<ReceivedLetter, CommError> {
        let (status, letters) = (self.process.status(), self.process.letters());
        let rank = route.to;
        let failed = |cause: CommError| {
            status.fail(rank, cause.clone());
            Err(status.cause().unwrap_or(cause))
        };
        let mut deadline = Deadline::after(self.timeout.saturating_add(turn(rank)));
        loop {
            status.check()?;
            let unclaimed = || letters.unclaimed(route);
            match letters.wait(route, id, TERMINATION_INTERVAL) {
                Receipt::Arrived(letter) => return Ok(letter),
                // Several ranks may detect this at the same time, so each of them gives lower ranks
                // time to report it first.
                Receipt::Left(since) if since >= turn(rank) => {
                    let (route, unclaimed) = (Box::new(route.clone()), unclaimed());
                    return failed(CommError::SenderLeft { route, unclaimed });
                }
                Receipt::Left(_) => thread::sleep(Duration::from_millis(1)),
                Receipt::Expected => {}
            }
            if deadline.has_passed() {
                return failed(CommError::MessageTimeout {
                    route: Box::new(route.clone()),
                    waited: self.timeout,
                    sender: Box::new(self.sender(route)),
                    unclaimed: unclaimed(),
                });
            }
            let wait = Wait { call: None, absent: vec![self.sender(route)] };
            status.terminate(rank, Some(wait)).map_or(Ok(()), Err)?;
        }
    }
}

/// A receive that this rank has started. Dropping it gives the receive up.
struct LetterClaim {
    membership: Arc<Membership>,
    route: MessageRoute,
    id: ReceiveId,
}

impl LetterClaim {
    /// Waits for the message and decodes its arrays in the memory of `like`.
    ///
    /// # Errors
    /// Returns the failure that ended the run, which may be that the message does not come, does
    /// not fit `like`, or cannot be decoded.
    fn wait<T: Payload>(&self, like: &[T]) -> Result<Vec<T>, CommError> {
        let Self { membership, route, id } = self;
        let process = &membership.process;
        process.letters().begin_wait(route);
        process.submit(QueuedWork::Wake);
        let received = membership.wait_for_letter(route, *id);
        process.letters().end_wait(route);
        let ReceivedLetter { contents, arrays } = received?;
        let decoded = contents.check(route, &MessageContents::of(like)).and_then(|()| {
            let decode = |((form, received), home): ((_, _), &T)| {
                home.decode(form, received, home.numel()).map_err(|reason| CommError::Transport {
                    rank: route.to,
                    reason: format!("{route}: {reason}"),
                })
            };
            arrays.into_iter().zip(like).map(decode).collect()
        });
        decoded.inspect_err(|cause| process.status().fail(route.to, cause.clone()))
    }
}

impl Drop for LetterClaim {
    fn drop(&mut self) {
        self.membership.process.letters().cancel(&self.route, self.id);
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
        let membership = Membership {
            process: self.clone(),
            on_device,
            timeout: settings.timeout,
            has_left: AtomicBool::new(false),
            statistics: Mutex::default(),
            created: Mutex::default(),
        };
        let ranks = GroupRanks::world(self.rank(), self.world_size());
        MpiGroup { membership: Arc::new(membership), ranks }
    }
}

impl MpiGroup {
    /// Returns the ranks of the group.
    pub fn ranks(&self) -> &GroupRanks {
        &self.ranks
    }

    /// Returns the rank in the group, from 0.
    pub fn rank(&self) -> usize {
        self.ranks.rank()
    }

    /// Returns the number of ranks in the group.
    pub fn world_size(&self) -> usize {
        self.ranks.len()
    }

    /// Returns the counts of the collectives and messages that this rank has started, in all
    /// groups.
    pub fn statistics(&self) -> Statistics {
        self.membership.statistics().clone()
    }

    /// Returns true if a message has arrived and was not received; see
    /// [`ProcessGroup::has_arrived`]. It does not require a payload type.
    pub fn has_arrived(&self, from: usize, tag: &MessageTag) -> bool {
        let route = MessageRoute::new(&self.ranks, MessageDirection::Receive, from, tag.clone());
        let Ok(route) = route else { return false };
        let process = &self.membership.process;
        process.letters().has_arrived(&route).unwrap_or_else(|| {
            process.submit(QueuedWork::Wake);
            false
        })
    }
}

/// The rank of a handle is its rank in the world, also for a subgroup.
impl RankHandle for MpiGroup {
    fn rank(&self) -> usize {
        self.ranks.world_rank()
    }

    /// Ends the run with this rank's failure. Waits briefly until the other ranks have been
    /// informed, and gives the reporting rank time to print the failure.
    fn abort(&self, cause: CommError) {
        let status = self.membership.process.status();
        status.set_running(false);
        let rank = self.ranks.world_rank();
        status.fail(rank, cause);
        status.wait_announced();
        if !status.is_reporter(rank) {
            thread::sleep(REPORT_HEAD_START);
        }
    }

    /// Announces that this rank starts no more collectives. Pending collectives can still be
    /// completed.
    fn leave(&self) {
        self.membership.process.status().set_running(false);
        self.membership.leave_once();
    }

    /// Returns the first failure of the run.
    fn failure(&self) -> Option<GroupFailure> {
        self.membership.process.status().failure()
    }
}

impl Subgroup for MpiGroup {
    /// Queues the announcement of the group, with which the other ranks compare theirs.
    fn subgroup(&self, name: &'static str, ranks: &[usize]) -> Result<Self, CommError> {
        let process = &self.membership.process;
        process.status().check()?;
        let created = self.membership.created.lock();
        let mut created = created.unwrap_or_else(PoisonError::into_inner);
        let index = created.entry(name).or_default();
        let ranks = self.ranks.subgroup(name, *index, ranks)?;
        *index += 1;
        // Under the lock, so that groups of one name are announced in the order of their numbers.
        process.letters().submit(Outgoing::Subgroup(ranks.clone()));
        drop(created);
        process.submit(QueuedWork::Wake);
        Ok(Self { membership: self.membership.clone(), ranks })
    }
}

impl<T: Payload> ProcessGroup<T> for MpiGroup {
    fn ranks(&self) -> &GroupRanks {
        &self.ranks
    }

    /// Queues the collective for the communication thread at the next position of the common order.
    ///
    /// The arrays are moved to the communication thread, which drops them when the collective is
    /// complete. Dropping the handle does not cancel the collective, because the other ranks take
    /// part in it.
    ///
    /// # Errors
    /// Returns the failure of the run, or an error if this rank has left the group.
    fn start(&self, side: Side, arrays: Vec<T>) -> Result<Pending<T>, CommError> {
        self.membership.process.status().check()?;
        if self.membership.has_left.load(Ordering::Relaxed) {
            let Side { rank, operation, tag, .. } = side;
            return Err(CommError::AfterLeave { rank, operation, tag });
        }
        let span = side.span();
        let mut statistics = self.membership.statistics();
        statistics.record(side.operation, &side.tag, side.signature.as_ref());
        // The lock is released before the collective is queued, so that readers of the statistics
        // never wait for the queue.
        drop(statistics);

        let (answer, answered) = mpsc::sync_channel(1);
        let (on_device, ranks) = (self.membership.on_device, self.ranks.clone());
        self.membership.process.submit(QueuedWork::Run(Box::new(move |link| {
            // `on_device` takes an `FnMut`, but the collective can run only once.
            let mut arrays = Some(arrays);
            on_device(&mut || {
                if let Some(arrays) = arrays.take() {
                    // The rank may have dropped its handle.
                    let _ = answer.send(collectives::run(
                        &mut GroupLink::new(link, &ranks),
                        &side,
                        arrays,
                    ));
                }
            });
        })));
        let membership = self.membership.clone();
        Ok(Pending::new(move || span.in_scope(|| membership.wait(&answered))))
    }

    /// Queues the message for the communication thread, which encodes it and sends it also while it
    /// waits in a collective.
    fn send(&self, to: usize, tag: MessageTag, arrays: Vec<T>) -> Result<(), CommError> {
        let route = MessageRoute::new(&self.ranks, MessageDirection::Send, to, tag)?;
        let (contents, on_device) = (MessageContents::of(&arrays), self.membership.on_device);
        let bytes = arrays.iter().map(T::contributed_bytes).sum();
        self.membership.count_message(MessageDirection::Send, &route, bytes)?;
        let encode = move || {
            let mut encoded: Vec<EncodedArray> = Vec::with_capacity(arrays.len());
            let encode = |array: &T| (array.encode(), array.element_size());
            on_device(&mut || encoded.extend(arrays.iter().map(encode)));
            encoded
        };
        let encode = Box::new(encode);
        let process = &self.membership.process;
        process.letters().submit(Outgoing::Letter { route, contents, encode });
        process.submit(QueuedWork::Wake);
        Ok(())
    }

    fn receive(&self, from: usize, tag: MessageTag, like: Vec<T>) -> Result<Pending<T>, CommError> {
        let route = MessageRoute::new(&self.ranks, MessageDirection::Receive, from, tag)?;
        let bytes = like.iter().map(|array| array.numel() * array.element_size()).sum();
        self.membership.count_message(MessageDirection::Receive, &route, bytes)?;
        let span = route.span();
        let id = self.membership.process.letters().receive(route.clone());
        let ticket = LetterClaim { membership: self.membership.clone(), route, id };
        Ok(Pending::new(move || span.in_scope(|| ticket.wait(&like))))
    }

    fn has_arrived(&self, from: usize, tag: &MessageTag) -> bool {
        self.has_arrived(from, tag)
    }

    /// Returns the failure of the run without waiting. Computing ranks call this function at every
    /// op to detect failures.
    fn check(&self) -> Result<(), CommError> {
        self.membership.process.status().check()
    }

    /// Records the failure; the communication thread announces it.
    fn abort(&self, cause: CommError) {
        self.membership.process.status().fail(self.ranks.world_rank(), cause);
    }
}
