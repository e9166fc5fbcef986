//! Checks whether the processes of other ranks are alive: by their handles on this host, and by
//! pings in a run without a time-out.

use std::time::{Duration, Instant};

use deepburn_comm::CommError;

use super::{Link, Peer, REPORT_DELAY};
use crate::control::ControlMessage;
use crate::library::MpiError;
use crate::neighbors::Neighbors;

/// The interval at which the processes on this host are checked.
const LOOK_INTERVAL: Duration = Duration::from_millis(5);
/// The interval of pings in a run without a time-out.
///
/// In such a run a rank may download or compile something for hours, so a late rank is not a
/// failure. The communication thread of a working rank answers within milliseconds. A process that
/// is stopped or hangs does not answer.
const PING_INTERVAL: Duration = Duration::from_secs(2);
/// The time within which a rank must answer a ping.
const PING_TIMEOUT: Duration = Duration::from_secs(30);
/// The number of polls after which a message that is in shared memory has been received. A poll of
/// Open MPI without a result moves such messages into the queue that the next poll searches.
const POLLS: usize = 16;

/// The processes of this host, and the times of the last checks.
pub(super) struct ProcessWatch {
    /// The processes of this host.
    pub(super) neighbors: Neighbors,
    /// The time of the last check of the processes of this host.
    last_look: Instant,
    /// The time of the last round of pings.
    last_ping: Instant,
}

impl Default for ProcessWatch {
    fn default() -> Self {
        let now = Instant::now();
        Self { neighbors: Neighbors::default(), last_look: now, last_ping: now }
    }
}

impl Link {
    /// Checks the processes of this host at intervals. Ends the run if one of them has ended
    /// although other ranks still needed it.
    ///
    /// # Errors
    /// Returns an error if MPI fails or a message cannot be decoded.
    pub(super) fn look(&mut self) -> Result<(), MpiError> {
        if self.watch.last_look.elapsed() < LOOK_INTERVAL {
            return Ok(());
        }
        self.watch.last_look = Instant::now();
        while let Some(rank) = self.watch.neighbors.ended() {
            self.peers[rank].ended = Some(Instant::now());
        }
        // A process may exit after its rank has left the run.
        let is_dead = |peer: &Peer| peer.ended.is_some() && peer.left.is_none();
        let Some(&rank) = self.ranks(is_dead).first() else { return Ok(()) };
        let since = self.peers[rank].ended.map(|ended| ended.elapsed()).unwrap_or_default();
        // The last message of the process may still be in flight.
        if since < REPORT_DELAY
            || self.status.cause().is_some()
            || !self.watch.neighbors.claim_report()
        {
            return Ok(());
        }
        // A process that held the claim before, and has exited, has sent its report.
        for _ in 0..POLLS {
            self.receive()?;
        }
        let Peer { hello, last, .. } = &self.peers[rank];
        let host = hello.as_ref().map(|hello| hello.host.clone()).unwrap_or_default();
        let cause = CommError::Died {
            rank,
            host,
            last: last.clone().map(|call| Box::new(self.run.with_names(call))),
            reporter: self.rank(),
            call: self.run.current.clone().map(Box::new),
        };
        self.status.fail(self.rank(), cause);
        Ok(())
    }

    /// Looks for a rank that does not answer pings, in a run without a time-out, among the ranks
    /// `absent` that the current collective waits for and the senders of messages that the rank
    /// waits for.
    ///
    /// # Errors
    /// Returns the failure that ends the run.
    pub(crate) fn ping(&mut self, absent: &[usize]) -> Result<(), CommError> {
        // With a time-out, a rank that hangs is late soon enough.
        if self.run.settings.timeout != Duration::MAX {
            return Ok(());
        }
        let waits = self.letters.waits();
        let mut ranks: Vec<_> = absent.to_vec();
        ranks.extend(waits.iter().map(|route| route.from));
        let Some(silent) = self.find_silent(&ranks) else { return Ok(()) };
        let Some(route) = waits.into_iter().find(|route| route.from == silent) else {
            return Err(self.late(&[silent], PING_TIMEOUT));
        };
        let sender = self.absences(&[silent]).remove(0);
        let unclaimed = self.letters.unclaimed(&route);
        Err(self.failed(CommError::MessageTimeout {
            route: Box::new(route),
            waited: PING_TIMEOUT,
            sender: Box::new(sender),
            unclaimed,
        }))
    }

    /// Pings missing ranks in a run without a time-out. Returns a rank that does not answer within
    /// [`PING_TIMEOUT`]. The communication thread of a busy rank answers.
    fn find_silent(&mut self, absent: &[usize]) -> Option<usize> {
        if self.watch.last_ping.elapsed() < PING_INTERVAL {
            return None;
        }
        // If this process was stopped, it could not receive the answers, so the time is restarted.
        let heard = self.watch.last_ping.elapsed() < 2 * PING_INTERVAL;
        self.watch.last_ping = Instant::now();
        for &rank in absent {
            if !heard {
                self.peers[rank].asked = None;
            }
            let asked = *self.peers[rank].asked.get_or_insert_with(Instant::now);
            if asked.elapsed() > PING_TIMEOUT {
                return Some(rank);
            }
            let _ = self.post(rank, ControlMessage::Ping);
        }
        None
    }
}
