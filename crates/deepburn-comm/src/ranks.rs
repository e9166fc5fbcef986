//! Running one function on every rank.
//!
//! [`run_ranks`] runs the ranks as threads, [`run_rank`] the one rank that a process is. Both end the
//! group as soon as a rank fails and return the failure that came first, a [`RankFailure`]. What
//! other ranks ran into because of it is dropped.

use std::fmt::{self, Debug, Display};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::{self, ScopedJoinHandle};
use std::time::{Duration, Instant};

use crate::{CommError, Member, panic};

/// Stack of a rank thread in bytes; backward passes recurse deeply. Memory is used only as far as
/// the stack grows.
const STACK_SIZE: usize = 64 << 20;

/// One rank's handle on its group, as its runner needs it.
pub trait RankHandle {
    /// This rank, from 0.
    fn rank(&self) -> usize;

    /// Ends the group: every present and later call of any rank fails with the cause of the first
    /// call of `abort`. The rank's own code has ended.
    fn abort(&self, cause: CommError);

    /// Declares that this rank starts no more collectives. Handles that it still holds can be
    /// waited for; ranks that wait for a collective this rank has not started get
    /// [`CommError::Left`].
    fn leave(&self);

    /// What ended the group, if something did.
    fn failure(&self) -> Option<Failure>;
}

/// What ended a group.
#[derive(Debug, Clone)]
pub struct Failure {
    /// The rank that found out, and that reports it.
    pub reporter: usize,
    /// When this process knew.
    pub at: Instant,
    /// The error that every rank gets.
    pub cause: CommError,
}

/// The failure of a group of ranks: the one that came first.
#[derive(Debug, Clone, PartialEq)]
pub struct RankFailure<E> {
    /// The rank that failed, or, if a collective failed, the rank that found out.
    pub rank: usize,
    /// Its host, where ranks are processes.
    pub host: Option<Arc<str>>,
    /// Why.
    pub cause: FailureCause<E>,
}

/// Why a rank failed.
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
    /// A collective failed for a reason of its own: ranks disagreed, one ended early or did not
    /// arrive in time.
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

impl<E: Debug + Display> std::error::Error for RankFailure<E> {}

/// Runs `body` on `world_size` threads, each with its [`Member`] of one new group, and returns
/// what they returned, by rank.
///
/// If a rank returns an error or panics, the group ends: ranks inside a collective stop at once,
/// the others when they next start or wait for one. A panic whose payload is a [`CommError`]
/// counts as that error, because code that cannot return errors (a tensor op) raises it that way.
/// Panics of rank threads are not printed; the first is part of the result.
///
/// `timeout` is how long a rank waits for others, as in [`Member::group`].
///
/// # Errors
/// The failure that came first.
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
    weigh(&members[0], endings)
}

/// How a rank failed, and when.
struct Ending<E> {
    at: Instant,
    cause: FailureCause<E>,
}

impl<E> Ending<E> {
    /// A rank that fails with a communication error.
    fn comm(member: &Member, error: CommError) -> Self {
        let at = Instant::now();
        member.abort(error.clone());
        Self { at, cause: FailureCause::Comm(error) }
    }

    /// A rank that panicked with `payload`.
    fn panic(payload: Box<dyn std::any::Any + Send>) -> Self {
        let panic::PanicRecord { location, at } = panic::take_record();
        let cause = match payload.downcast::<CommError>() {
            Ok(error) => FailureCause::Comm(*error),
            Err(payload) => FailureCause::Panic { message: panic::message(&*payload), location },
        };
        Self { at, cause }
    }
}

/// Runs `body` as the one rank that this process is, on the calling thread.
///
/// Errors and panics end the group as in [`run_ranks`].
///
/// # Errors
/// The failure that came first, as far as this process knows. Its `rank` is the one that reports it:
/// other processes return the same failure and need not show it.
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
    // `member` outlives the call, so that a body that fails does not look like one that left.
    let ending = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(result)) => {
            member.leave();
            return Ok(result);
        }
        Ok(Err(error)) => Ending { at: Instant::now(), cause: FailureCause::Error(error) },
        Err(payload) => Ending::panic(payload),
    };
    member.abort(match &ending.cause {
        FailureCause::Comm(error) => error.clone(),
        cause => CommError::PeerFailed { rank: member.rank(), cause: cause.to_string() },
    });
    Err(ending)
}

fn join<R, E>(thread: ScopedJoinHandle<'_, Result<R, Ending<E>>>) -> Result<R, Ending<E>> {
    thread.join().unwrap_or_else(|payload| Err(Ending::panic(payload)))
}

/// The results of all ranks, or the failure that came first.
///
/// A collective that failed (time-out, mismatch) ended the group before any rank could fail of
/// it; a rank that failed by itself did so before the group was ended for it. So the earliest is
/// the cause of the rest.
fn weigh<R, E>(
    member: &Member,
    endings: Vec<Result<R, Ending<E>>>,
) -> Result<Vec<R>, RankFailure<E>> {
    let mut results = Vec::with_capacity(endings.len());
    let mut first: Option<(Instant, RankFailure<E>)> = None;
    for (rank, ending) in endings.into_iter().enumerate() {
        match ending {
            Ok(result) => results.push(result),
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

/// A rank's failure, or that of its group if it came before.
fn first_of<E>(handle: &impl RankHandle, at: Instant, failure: RankFailure<E>) -> RankFailure<E> {
    match handle.failure() {
        Some(group) if group.at < at => {
            RankFailure { rank: group.reporter, host: None, cause: FailureCause::Comm(group.cause) }
        }
        _ => failure,
    }
}
