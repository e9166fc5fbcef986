//! Runs a function on every rank.
//!
//! [`run_ranks`] runs ranks as threads, and [`run_rank`] runs the single rank of a process. Both
//! end the group as soon as a rank fails, and return the first failure as a [`RankFailure`].
//! Failures of other ranks that are consequences of the first failure are dropped.

use std::fmt::{self, Debug, Display};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

use crate::{CommError, Member, RankHandle, panic};

/// The stack size of a rank thread in bytes. Backward passes recurse deeply. The system only
/// allocates memory for the part of the stack that is used.
const STACK_SIZE: usize = 64 << 20;

/// The first failure in a group of ranks.
///
/// `Debug` prints the same text as `Display`, because Rust prints an error returned from `main`
/// with `Debug`.
#[derive(Clone, PartialEq)]
pub struct RankFailure<E> {
    /// The failed rank. If a collective failed, this is the rank that detected the failure.
    pub rank: usize,
    /// Its host; `None` for rank threads.
    pub host: Option<Arc<str>>,
    /// The cause of the failure.
    pub cause: FailureCause<E>,
}

/// The cause of a rank's failure.
#[derive(Debug, Clone, PartialEq)]
pub enum FailureCause<E> {
    /// It returned an error.
    Error(E),
    /// It panicked.
    Panic {
        /// The message of the panic.
        message: String,
        /// File, line and column, if known.
        location: Option<String>,
    },
    /// A collective failed although no rank failed: ranks started different collectives, or a rank
    /// ended early or did not reach a collective in time.
    Comm(CommError),
}

impl<E: Display> Display for RankFailure<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, cause, .. } = self;
        match &self.host {
            Some(host) => write!(f, "rank {rank} on {host} failed: {cause}"),
            None => write!(f, "rank {rank} failed: {cause}"),
        }
    }
}

impl<E: Display> Debug for RankFailure<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Display::fmt(self, f)
    }
}

impl<E: Display> Display for FailureCause<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Error(error) => Display::fmt(error, f),
            Self::Panic { message, location: Some(place) } => {
                write!(f, "panic at {place}: {message}")
            }
            Self::Panic { message, location: None } => write!(f, "panic: {message}"),
            Self::Comm(error) => Display::fmt(error, f),
        }
    }
}

impl<E: Display> std::error::Error for RankFailure<E> {}

/// Runs `body` on `world_size` threads, each with a [`Member`] of a new group, and returns the
/// results by rank.
///
/// If a rank returns an error or panics, the group ends. Ranks that are inside a collective return
/// immediately; other ranks return when they next start or wait for a collective. A panic with a
/// [`CommError`] as its payload is treated as that error, because tensor ops cannot return errors.
/// Panics of rank threads are not printed; the first panic is returned.
///
/// `timeout` is the maximum time that a rank waits for other ranks; see [`Member::group`].
///
/// # Errors
/// Returns the first failure.
pub fn run_ranks<R, E>(
    world_size: usize,
    timeout: Duration,
    body: impl Fn(Member) -> Result<R, E> + Sync,
) -> Result<Vec<R>, RankFailure<E>>
where
    R: Send,
    E: Display + Send,
{
    let members = Member::group(world_size, timeout).map_err(|error| RankFailure {
        rank: 0,
        host: None,
        cause: FailureCause::Comm(error),
    })?;
    // Scoped threads may borrow `body`, and cannot outlive this call, whichever rank fails.
    let endings = thread::scope(|scope| {
        let start = |member: &Member| {
            let (own, body) = (member.clone(), &body);
            let name = format!("rank {}", own.rank());
            let thread = thread::Builder::new().name(name).stack_size(STACK_SIZE);
            thread.spawn_scoped(scope, move || end_of(&own, || body(own.clone()))).map_err(
                |error| {
                    let cause = format!("its thread could not be started: {error}");
                    Ending::comm(member, CommError::PeerFailed { rank: member.rank(), cause })
                },
            )
        };
        // All threads are started before the first is joined.
        let threads: Vec<_> = members.iter().map(start).collect();
        let endings = threads.into_iter().map(|thread| thread.map_or_else(Err, join));
        endings.collect::<Vec<_>>()
    });
    results_or_failure(&members[0], endings)
}

/// The failure of a rank and its time.
struct Ending<E> {
    at: Instant,
    cause: FailureCause<E>,
}

impl<E> Ending<E> {
    /// Returns the ending of a rank whose thread or group failed.
    fn comm(member: &Member, error: CommError) -> Self {
        let at = Instant::now();
        member.abort(error.clone());
        Self { at, cause: FailureCause::Comm(error) }
    }

    /// Returns the ending of a rank that panicked with `payload`.
    fn panic(payload: Box<dyn std::any::Any + Send>) -> Self {
        let panic::PanicRecord { location, at } = panic::take_record();
        let cause = match payload.downcast::<CommError>() {
            Ok(error) => FailureCause::Comm(*error),
            Err(payload) => FailureCause::Panic { message: panic::message(&*payload), location },
        };
        Self { at, cause }
    }
}

/// Runs `body` on the calling thread as the single rank of this process.
///
/// Errors and panics end the group as in [`run_ranks`].
///
/// # Errors
/// Returns the first failure that is known to this process. All processes return the same failure,
/// so only the process of the failed `rank` has to report it.
pub fn run_rank<R, E: Display>(
    handle: &impl RankHandle,
    body: impl FnOnce() -> Result<R, E>,
) -> Result<R, RankFailure<E>> {
    let rank = handle.rank();
    end_of(handle, body).map_err(|Ending { at, cause }| {
        first_of(handle, at, RankFailure { rank, host: None, cause })
    })
}

/// Runs the body of a rank. On return the rank has left the group, or the group has ended.
fn end_of<R, E: Display>(
    member: &impl RankHandle,
    body: impl FnOnce() -> Result<R, E>,
) -> Result<R, Ending<E>> {
    panic::watch_this_thread();
    // `member` outlives the body, so that a failed rank is not mistaken for a rank that has left
    // the group.
    let ending = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(result)) => {
            member.leave();
            return Ok(result);
        }
        Ok(Err(error)) => Ending { at: Instant::now(), cause: FailureCause::Error(error) },
        // Taken on the thread of the panic, where the hook has stored its location.
        Err(payload) => Ending::panic(payload),
    };
    member.abort(match &ending.cause {
        FailureCause::Comm(error) => error.clone(),
        cause => CommError::PeerFailed { rank: member.rank(), cause: cause.to_string() },
    });
    Err(ending)
}

/// Joins a rank thread. A panic outside the body also becomes an ending.
fn join<R, E>(thread: ScopedJoinHandle<'_, Result<R, Ending<E>>>) -> Result<R, Ending<E>> {
    thread.join().unwrap_or_else(|payload| Err(Ending::panic(payload)))
}

/// Returns the results of all ranks, or the earliest failure.
///
/// If a collective fails (time-out, mismatch), the group ends before any rank can fail as a
/// consequence. If a rank fails, its failure is recorded before it ends the group. In both cases,
/// the earliest failure is the cause of the other failures.
fn results_or_failure<R, E>(
    member: &Member,
    endings: Vec<Result<R, Ending<E>>>,
) -> Result<Vec<R>, RankFailure<E>> {
    let mut results = Vec::with_capacity(endings.len());
    let mut first: Option<(Instant, RankFailure<E>)> = None;
    for (rank, ending) in endings.into_iter().enumerate() {
        match ending {
            Ok(result) => results.push(result),
            // By time and not by rank: the cause comes first, and its consequences have any rank.
            Err(Ending { at, cause }) if first.as_ref().is_none_or(|(first, _)| at < *first) => {
                first = Some((at, RankFailure { rank, host: None, cause }));
            }
            Err(_) => {}
        }
    }
    match first {
        None => Ok(results),
        Some((at, failure)) => Err(first_of(member, at, failure)),
    }
}

/// Returns the rank's failure, or the group's failure if it occurred earlier.
fn first_of<E>(handle: &impl RankHandle, at: Instant, failure: RankFailure<E>) -> RankFailure<E> {
    match handle.failure() {
        // The group failed before this rank did, so the rank's error only reports that failure.
        Some(group) if group.at < at => {
            RankFailure { rank: group.reporter, host: None, cause: FailureCause::Comm(group.cause) }
        }
        _ => failure,
    }
}
