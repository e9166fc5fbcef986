//! The queues of messages between ranks.
//!
//! A [`Mailbox`] matches messages with receives by their route, in the order in which both came. It
//! does not block and has no lock; the engines put it behind theirs.

use std::collections::{HashMap, VecDeque};

use crate::{MessageRoute, MessageTag};

/// The number of tags that [`Mailbox::unclaimed`] returns at most.
const MAX_UNCLAIMED: usize = 3;

/// Messages that have arrived and receives that wait, by route.
///
/// The n-th receive of a route gets the n-th message of that route, whichever comes first, also if
/// the receives are completed in another order or given up.
#[derive(Debug)]
pub struct Mailbox<M> {
    /// The unmatched messages or receives of each route. Routes without any are removed, because
    /// tags may be used once.
    queues: HashMap<MessageRoute, Queue<M>>,
    /// The messages of receives that have not taken them yet.
    matched: HashMap<ReceiveId, M>,
    /// The number of receives so far.
    num_receives: u64,
}

/// Identifies a receive of a [`Mailbox`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ReceiveId(u64);

/// What a route has too many of. There is never a message and a receive of the same route.
#[derive(Debug)]
enum Queue<M> {
    /// Messages that no receive has claimed, oldest first.
    Messages(VecDeque<M>),
    /// Receives that wait, oldest first; `None` for those that were given up.
    Receives(VecDeque<Option<ReceiveId>>),
}

impl<M> Default for Mailbox<M> {
    fn default() -> Self {
        Self { queues: HashMap::new(), matched: HashMap::new(), num_receives: 0 }
    }
}

impl<M> Mailbox<M> {
    /// Removes everything and returns it. Receives that were started before stay unknown.
    pub fn reset(&mut self) -> Self {
        // Numbering continues, so that a receive of an earlier run can never take a message of a
        // later one.
        let fresh = Self { num_receives: self.num_receives, ..Self::default() };
        std::mem::replace(self, fresh)
    }

    /// Adds a message. Returns it if its receive was given up, so that the caller can drop it
    /// outside of its lock.
    pub fn deliver(&mut self, route: MessageRoute, message: M) -> Option<M> {
        match self.queues.get_mut(&route) {
            None => {
                self.queues.insert(route, Queue::Messages(VecDeque::from([message])));
                None
            }
            Some(Queue::Messages(messages)) => {
                messages.push_back(message);
                None
            }
            Some(Queue::Receives(receives)) => {
                // A receive that was given up still takes its turn, and its message is dropped.
                // Otherwise later receives would get messages that were meant for it.
                let receive = receives.pop_front().flatten();
                if receives.is_empty() {
                    self.queues.remove(&route);
                }
                match receive {
                    Some(id) => self.matched.insert(id, message),
                    None => Some(message),
                }
            }
        }
    }

    /// Adds a receive.
    pub fn receive(&mut self, route: MessageRoute) -> ReceiveId {
        let id = ReceiveId(self.num_receives);
        self.num_receives += 1;
        match self.queues.get_mut(&route) {
            None => {
                self.queues.insert(route, Queue::Receives(VecDeque::from([Some(id)])));
            }
            Some(Queue::Receives(receives)) => receives.push_back(Some(id)),
            Some(Queue::Messages(messages)) => {
                let message = messages.pop_front();
                if messages.is_empty() {
                    self.queues.remove(&route);
                }
                // There is a message, because empty queues are removed.
                self.matched.extend(message.map(|message| (id, message)));
            }
        }
        id
    }

    /// Takes the message of a receive; `None` if it has not arrived yet.
    pub fn take(&mut self, id: ReceiveId) -> Option<M> {
        self.matched.remove(&id)
    }

    /// Returns true if the message of a receive has arrived.
    pub fn is_matched(&self, id: ReceiveId) -> bool {
        self.matched.contains_key(&id)
    }

    /// Gives up a receive. Its message counts as received. Returns the message if it has arrived
    /// and was not taken.
    pub fn cancel(&mut self, route: &MessageRoute, id: ReceiveId) -> Option<M> {
        if let Some(Queue::Receives(receives)) = self.queues.get_mut(route)
            && let Some(receive) = receives.iter_mut().find(|receive| **receive == Some(id))
        {
            // Its place in the queue is kept, as `deliver` counts receives.
            *receive = None;
        }
        self.take(id)
    }

    /// Returns true if a message has arrived that no receive has claimed.
    pub fn has_message(&self, route: &MessageRoute) -> bool {
        matches!(self.queues.get(route), Some(Queue::Messages(_)))
    }

    /// Returns some tags of messages that no receive has claimed, from the sender of `route` in its
    /// group. Errors show them, because the tag of a missing message is often wrong on one side.
    pub fn unclaimed(&self, route: &MessageRoute) -> Vec<MessageTag> {
        // Messages of other senders or groups would not explain what is missing.
        let like = |other: &MessageRoute| {
            (other.from, other.to, &other.group) == (route.from, route.to, &route.group)
        };
        let queues = self.queues.iter();
        let unclaimed =
            queues.filter(|(other, queue)| matches!(queue, Queue::Messages(_)) && like(other));
        let mut tags: Vec<_> = unclaimed.map(|(other, _)| other.tag.clone()).collect();
        // Sorted before the cut, so that the message of an error does not depend on hashing.
        tags.sort();
        tags.truncate(MAX_UNCLAIMED);
        tags
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::GroupId;
    use proptest::prelude::*;

    fn route(id: u64) -> MessageRoute {
        MessageRoute { group: GroupId::World, from: 1, to: 0, tag: MessageTag::new("test", id) }
    }

    #[test]
    fn messages_and_receives_meet_in_order() {
        let mut mailbox = Mailbox::default();
        let early = mailbox.receive(route(0));
        assert_eq!(mailbox.take(early), None);
        for (id, message) in [(1, 10), (0, 1), (0, 2)] {
            assert_eq!(mailbox.deliver(route(id), message), None);
        }
        assert!(mailbox.has_message(&route(0)) && mailbox.has_message(&route(1)));
        let late = mailbox.receive(route(0));
        assert!(!mailbox.has_message(&route(0)));
        assert_eq!((mailbox.take(late), mailbox.take(early)), (Some(2), Some(1)));
        assert_eq!(mailbox.unclaimed(&route(0)), [route(1).tag]);
        assert_eq!(mailbox.unclaimed(&MessageRoute { from: 2, ..route(0) }), []);
    }

    #[test]
    fn a_receive_that_was_given_up_uses_up_its_message() {
        let mut mailbox = Mailbox::default();
        let (first, second) = (mailbox.receive(route(0)), mailbox.receive(route(0)));
        assert_eq!(mailbox.cancel(&route(0), first), None);
        assert_eq!(mailbox.deliver(route(0), 'x'), Some('x'));
        assert_eq!(mailbox.deliver(route(0), 'y'), None);
        assert_eq!(mailbox.take(second), Some('y'));
        mailbox.deliver(route(0), 'z');
        let third = mailbox.receive(route(0));
        assert_eq!(mailbox.cancel(&route(0), third), Some('z'));
        assert!(mailbox.queues.is_empty() && mailbox.matched.is_empty());
    }

    #[test]
    fn a_receive_from_before_a_reset_takes_nothing() {
        let mut mailbox = Mailbox::default();
        let before = mailbox.receive(route(0));
        mailbox.deliver(route(1), 1);
        assert!(mailbox.reset().has_message(&route(1)));
        let after = mailbox.receive(route(0));
        assert_eq!(mailbox.cancel(&route(0), before), None);
        mailbox.deliver(route(0), 2);
        assert_eq!((mailbox.take(before), mailbox.take(after)), (None, Some(2)));
    }

    proptest! {
        /// Sends and receives of a few tags in any order: the n-th of one meets the n-th of the
        /// other.
        #[test]
        fn the_nth_receive_gets_the_nth_message(
            calls in prop::collection::vec((0_usize..3, any::<bool>()), 0..60),
        ) {
            let mut mailbox = Mailbox::default();
            let (mut sent, mut received, mut receives) = ([0_u32; 3], [0_u32; 3], Vec::new());
            for (id, sends) in calls {
                let route = route(id as u64);
                if sends {
                    mailbox.deliver(route.clone(), (id, sent[id]));
                    sent[id] += 1;
                } else {
                    receives.push((mailbox.receive(route.clone()), (id, received[id])));
                    received[id] += 1;
                }
                prop_assert_eq!(mailbox.has_message(&route), sent[id] > received[id]);
            }
            for (receive, expected) in receives.into_iter().rev() {
                let arrived = expected.1 < sent[expected.0];
                prop_assert_eq!(mailbox.take(receive), arrived.then_some(expected));
            }
        }
    }
}
