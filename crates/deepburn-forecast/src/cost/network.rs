//! The time of collectives.
//!
//! Main type: [`Network`]. Its rules follow the collectives of `deepburn-mpi` and of rank threads
//! (`deepburn-comm/src/in_process/README.md`).
//!
//! For `p` ranks, a latency of `a` seconds per message, `n` arrays of `B` bytes in total and a
//! bandwidth of `W` bytes per second, the time of a collective between processes is
//!
//! ```text
//! headers           (p - 1) a                        every rank announces its arrays
//! all-gather        n (p - 1) a + (p - 1)/p B / W
//! reduce-scatter    the same, and B / memory bandwidth to add up the contributions
//! all-reduce        reduce-scatter, then all-gather
//! ```
//!
//! Messages inside a machine and between machines use different links at the same time, so the time
//! of the slower link counts.

use deepburn_comm::Operation;

use super::RankSpeed;
use crate::timeline::Collective;

/// The network between the ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Network {
    /// Links between processes. A communication thread runs collectives while the rank computes.
    Links(Links),
    /// Shared memory of one process, whose threads are the ranks. The threads share the cores, so
    /// no collective is hidden.
    Threads {
        /// The latency of a collective for each other rank, in seconds: the time to wake the thread
        /// of that rank and schedule it on a core.
        latency: f64,
    },
}

/// The links of a cluster.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Links {
    /// The bandwidth between machines in each direction, in bytes per second. All ranks of a
    /// machine share it.
    pub bandwidth: f64,
    /// The latency of a message, in seconds.
    pub latency: f64,
    /// The number of ranks on a machine.
    pub ranks_per_machine: u64,
    /// The bandwidth from one rank to other ranks of its machine, in bytes per second.
    pub local_bandwidth: f64,
}

impl Network {
    /// Returns true if collectives run while the rank computes.
    pub(super) fn overlaps(&self) -> bool {
        matches!(self, Self::Links(_))
    }

    /// Returns the seconds of a collective over `ranks` ranks of this `speed`. Returns 0 for a
    /// single rank.
    pub(super) fn seconds(&self, collective: &Collective, ranks: u64, speed: &RankSpeed) -> f64 {
        match self {
            _ if ranks < 2 => 0.0,
            Self::Links(links) => links.seconds(collective, ranks, speed),
            Self::Threads { latency } => {
                let moved = bytes_by_threads(collective, ranks);
                let parts = parts_by_threads(collective, ranks) as f64 * speed.op_seconds;
                (ranks - 1) as f64 * latency + parts + speed.transfer_seconds(moved)
            }
        }
    }
}

impl Links {
    /// Returns the seconds of a collective between processes. `speed` is the speed of the rank that
    /// adds up contributions.
    fn seconds(&self, collective: &Collective, ranks: u64, speed: &RankSpeed) -> f64 {
        let Collective { operation, arrays, contributed, complete, stride } = *collective;
        // Every rank sends a header to every other rank.
        let meeting = (ranks - 1) as f64 * self.latency;
        // The owner of a part reads the contributions of all ranks.
        let reduction = || {
            self.exchange(arrays, contributed, (ranks, stride))
                + speed.transfer_seconds(contributed)
        };
        meeting
            + match operation {
                Operation::ReduceScatter(_) => reduction(),
                Operation::AllReduce(_) => {
                    reduction() + self.exchange(arrays, complete, (ranks, stride))
                }
                Operation::AllGather | Operation::AllToAll | Operation::Broadcast { .. } => {
                    self.exchange(arrays, complete, (ranks, stride))
                }
                Operation::Barrier => 0.0,
            }
    }

    /// Returns the seconds for an exchange of arrays with `bytes` bytes in total. They are divided
    /// into one part per rank, and every rank sends one part to every other rank. All ranks of a
    /// machine share the bandwidth to other machines. The rank numbers of a group have a `stride`:
    /// between two members there are ranks of other groups, which run the same collective.
    fn exchange(&self, arrays: u64, bytes: u64, (ranks, stride): (u64, u64)) -> f64 {
        let senders = self.ranks_per_machine.clamp(1, ranks * stride);
        let of_machine = (senders / stride).clamp(1, ranks);
        let (neighbors, remote) = (of_machine - 1, ranks - of_machine);
        // Each rank owns one part. It sends the other parts to their owners (reduce-scatter), or
        // its own part to all ranks (all-gather).
        let part = bytes as f64 / ranks as f64;
        let local = neighbors as f64 * part / self.local_bandwidth;
        let outside = (remote * senders) as f64 * part / self.bandwidth;
        // Both kinds of links work at the same time.
        (arrays * (ranks - 1)) as f64 * self.latency + local.max(outside)
    }
}

/// Returns the bytes that a rank thread reads and writes in memory for a collective. Threads
/// exchange references, so only additions and copies count.
fn bytes_by_threads(collective: &Collective, ranks: u64) -> u64 {
    let Collective { operation, contributed, complete, .. } = *collective;
    // A rank reads its part of the arrays of all ranks and writes the result.
    let reduction = contributed + complete / ranks;
    match operation {
        Operation::ReduceScatter(_) => reduction,
        // Each rank then copies the complete result.
        Operation::AllReduce(_) => reduction + 2 * complete,
        // One rank makes a copy, and all ranks share it.
        Operation::AllGather | Operation::Broadcast { .. } => 2 * complete / ranks,
        Operation::AllToAll => 2 * complete,
        Operation::Barrier => 0,
    }
}

/// Returns the number of parts that a rank thread takes out of the arrays of other ranks, one after
/// the other. Each of them costs an op, whatever its size, so that many ranks spend more time on
/// parts than on elements.
fn parts_by_threads(collective: &Collective, ranks: u64) -> u64 {
    let others = collective.arrays * (ranks - 1);
    match collective.operation {
        Operation::ReduceScatter(_) | Operation::AllToAll => others,
        // The reduced parts of all ranks are then joined.
        Operation::AllReduce(_) => 2 * others,
        // One rank joins the parts for all.
        Operation::AllGather | Operation::Broadcast { .. } | Operation::Barrier => 0,
    }
}
