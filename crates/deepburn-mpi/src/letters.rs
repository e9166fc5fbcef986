//! The messages of a rank, shared by both threads of its process.
//!
//! The rank's thread queues messages, and claims those that it receives. The communication thread
//! encodes and sends the former, and delivers the latter (`link/letters.rs`), also while it waits
//! in a collective.
//!
//! ```text
//! rank's thread        communication thread           another process
//!   send  ------------> encode, Letter, data  ------>   receives at once, into a mailbox
//!   receive   <-------- mailbox  <------------------    send
//! ```

use std::collections::{HashMap, VecDeque};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use deepburn_comm::{
    Call, Encoded, Form, GroupRanks, Mailbox, MessageContents, MessageRoute, MessageTag, ReceiveId,
    Received,
};

/// The time for which the communication thread polls without long pauses after the rank has asked
/// for an arrival.
const WATCH_TIME: Duration = Duration::from_millis(20);

/// The messages of a rank.
#[derive(Debug, Default)]
pub(crate) struct Letters {
    state: Mutex<LettersState>,
    /// Notified when a message arrives or a sender has left.
    changed: Condvar,
}

/// The state behind the lock.
#[derive(Debug, Default)]
struct LettersState {
    /// The run of the rank's thread. The communication thread may still be in an earlier one.
    run: u32,
    /// What the communication thread has to send, with its run.
    outgoing: VecDeque<(u32, Outgoing)>,
    /// The messages of the run that have arrived.
    mailbox: Mailbox<ReceivedLetter>,
    /// Messages of runs that have not started on this rank.
    early: Vec<(u32, MessageRoute, ReceivedLetter)>,
    /// The messages for which threads of this rank wait.
    waits: Vec<MessageRoute>,
    /// The time until which the rank is interested in arrivals.
    watched_until: Option<Instant>,
    /// What is known about other ranks.
    senders: HashMap<usize, Sender>,
}

/// What is known about another rank.
#[derive(Debug, Default)]
struct Sender {
    /// The last collective that it has reached.
    last: Option<Call>,
    /// The time since which it sends nothing more in this run, and all that it has sent is in the
    /// mailbox.
    left: Option<Instant>,
    /// Whether its process is about to exit.
    said_goodbye: bool,
}

/// An array of a message as bytes, with the size of its elements.
pub(crate) type EncodedArray = (Encoded, usize);

/// Something that the communication thread sends without waiting for other ranks.
pub(crate) enum Outgoing {
    /// A subgroup that this rank has created.
    Subgroup(GroupRanks),
    /// A message.
    Letter {
        route: MessageRoute,
        contents: MessageContents,
        /// Encodes the arrays.
        encode: Box<dyn FnOnce() -> Vec<EncodedArray> + Send>,
    },
}

impl std::fmt::Debug for Outgoing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Subgroup(ranks) => write!(f, "Subgroup({:?})", ranks.id()),
            Self::Letter { route, .. } => write!(f, "Letter({route})"),
        }
    }
}

/// A message that has arrived.
#[derive(Debug)]
pub(crate) struct ReceivedLetter {
    /// The types and sizes that its sender named.
    pub(crate) contents: MessageContents,
    /// The encoded arrays.
    pub(crate) arrays: Vec<(Form, Received)>,
}

/// The state of a receive.
#[derive(Debug)]
pub(crate) enum Receipt {
    /// The message has arrived.
    Arrived(ReceivedLetter),
    /// It may still arrive.
    Expected,
    /// Its sender has left without sending it, for this time.
    Left(Duration),
}

impl Letters {
    /// Starts a run. Messages of earlier runs are dropped.
    pub(crate) fn begin(&self, run: u32) {
        let mut guard = self.lock();
        let state = &mut *guard;
        state.run = run;
        let unreceived = state.mailbox.reset();
        for sender in state.senders.values_mut() {
            sender.last = None;
            sender.left = sender.left.filter(|_| sender.said_goodbye);
        }
        for (of, route, letter) in std::mem::take(&mut state.early) {
            if of == run {
                state.mailbox.deliver(route, letter);
            } else if of > run {
                state.early.push((of, route, letter));
            }
        }
        drop(guard);
        drop(unreceived);
    }

    /// Queues something for the communication thread.
    pub(crate) fn submit(&self, outgoing: Outgoing) {
        let mut state = self.lock();
        let run = state.run;
        state.outgoing.push_back((run, outgoing));
    }

    /// Takes the next item to send in `run`; `None` if there is none.
    pub(crate) fn next_outgoing(&self, run: u32) -> Option<Outgoing> {
        let mut state = self.lock();
        let is_due = state.outgoing.front().is_some_and(|(of, _)| *of <= run);
        is_due.then(|| state.outgoing.pop_front()).flatten().map(|(_, outgoing)| outgoing)
    }

    /// Returns true if nothing waits to be sent.
    pub(crate) fn is_empty(&self) -> bool {
        self.lock().outgoing.is_empty()
    }

    /// Adds a message of `run` that has arrived.
    pub(crate) fn deliver(&self, run: u32, route: MessageRoute, letter: ReceivedLetter) {
        let mut state = self.lock();
        let unwanted = match run.cmp(&state.run) {
            // The run of the message has ended on this rank.
            std::cmp::Ordering::Less => Some(letter),
            std::cmp::Ordering::Equal => state.mailbox.deliver(route, letter),
            std::cmp::Ordering::Greater => {
                state.early.push((run, route, letter));
                None
            }
        };
        drop(state);
        self.changed.notify_all();
        drop(unwanted);
    }

    /// Records that a rank sends nothing more in `run`.
    pub(crate) fn set_left(&self, run: u32, rank: usize, said_goodbye: bool) {
        let mut state = self.lock();
        if state.run == run || said_goodbye {
            let sender = state.senders.entry(rank).or_default();
            sender.left.get_or_insert_with(Instant::now);
            sender.said_goodbye |= said_goodbye;
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Records the collective that a rank has reached in `run`.
    pub(crate) fn set_last(&self, run: u32, rank: usize, call: &Call) {
        let mut state = self.lock();
        if state.run == run {
            state.senders.entry(rank).or_default().last = Some(call.clone());
        }
    }

    /// Returns the last known collective of a rank.
    pub(crate) fn last(&self, rank: usize) -> Option<Call> {
        self.lock().senders.get(&rank).and_then(|sender| sender.last.clone())
    }

    /// Claims the next message of a route.
    pub(crate) fn receive(&self, route: MessageRoute) -> ReceiveId {
        self.lock().mailbox.receive(route)
    }

    /// Gives up a receive.
    pub(crate) fn cancel(&self, route: &MessageRoute, id: ReceiveId) {
        let letter = self.lock().mailbox.cancel(route, id);
        drop(letter);
    }

    /// Returns true if a message has arrived that no receive has claimed. Until then the
    /// communication thread is asked to look frequently; returns `None` if it has to be woken.
    pub(crate) fn has_arrived(&self, route: &MessageRoute) -> Option<bool> {
        let mut state = self.lock();
        if state.mailbox.has_message(route) {
            return Some(true);
        }
        let now = Instant::now();
        let before = state.watched_until.replace(now + WATCH_TIME);
        before.is_some_and(|until| until > now).then_some(false)
    }

    /// Returns some tags of unclaimed messages from the sender of a route.
    pub(crate) fn unclaimed(&self, route: &MessageRoute) -> Vec<MessageTag> {
        self.lock().mailbox.unclaimed(route)
    }

    /// Waits for the message of a receive for at most `limit`.
    pub(crate) fn wait(&self, route: &MessageRoute, id: ReceiveId, limit: Duration) -> Receipt {
        let until = Instant::now() + limit;
        let mut state = self.lock();
        loop {
            // Looked for before the sender's state, because a rank may leave right after its last
            // message.
            if let Some(letter) = state.mailbox.take(id) {
                return Receipt::Arrived(letter);
            }
            let left = state.senders.get(&route.from).and_then(|sender| sender.left);
            if let Some(left) = left {
                return Receipt::Left(left.elapsed());
            }
            let rest = until.saturating_duration_since(Instant::now());
            if rest.is_zero() {
                return Receipt::Expected;
            }
            let woken = self.changed.wait_timeout(state, rest);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Records that a thread waits for a message.
    pub(crate) fn begin_wait(&self, route: &MessageRoute) {
        self.lock().waits.push(route.clone());
    }

    /// Records that a thread does not wait for a message any longer.
    pub(crate) fn end_wait(&self, route: &MessageRoute) {
        let mut state = self.lock();
        if let Some(index) = state.waits.iter().position(|wait| wait == route) {
            state.waits.swap_remove(index);
        }
    }

    /// Returns the messages for which threads of this rank wait.
    pub(crate) fn waits(&self) -> Vec<MessageRoute> {
        self.lock().waits.clone()
    }

    /// Returns true if the rank waits for a message or has just asked for one, or has something to
    /// send.
    pub(crate) fn is_urgent(&self) -> bool {
        let state = self.lock();
        let is_watched = state.watched_until.is_some_and(|until| until > Instant::now());
        is_watched || !state.waits.is_empty() || !state.outgoing.is_empty()
    }

    /// Locks the state. The state is valid even if another thread panicked while it held the lock.
    fn lock(&self) -> MutexGuard<'_, LettersState> {
        // No change is interrupted by code that could panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
