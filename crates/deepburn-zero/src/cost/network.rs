//! How long collectives take.
//!
//! Main type: [`Network`]. Its rules follow the collectives of `deepburn-mpi` and of rank threads
//! (`deepburn-comm/src/in_process/README.md`).
//!
//! With `p` ranks, a latency of `a` seconds per message, `n` arrays of `B` bytes in all and a
//! bandwidth of `W` bytes per second, links between processes take
//!
//! ```text
//! meeting           (p - 1) a                        every rank announces what it sends
//! all-gather        n (p - 1) a + (p - 1)/p B / W
//! reduce-scatter    the same, and B / memory bandwidth to add up the contributions
//! all-reduce        reduce-scatter, then all-gather
//! ```
//!
//! Messages inside a machine and between machines use different links at the same time, so the
//! slower of the two counts.

use deepburn_comm::Operation;

use super::RankSpeed;
use super::collective::Collective;

/// The connection of the ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Network {
    /// Links between processes. A communication thread runs collectives while the rank computes.
    Links(Links),
    /// The memory of one process whose threads are the ranks. They share the cores, so no collective is hidden.
    Threads {
        /// The seconds per other rank of a collective: the time to wake its thread and to get a
        /// core for it.
        latency: f64,
    },
}

/// The links of a cluster.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Links {
    /// Bytes per second that leave a machine, and as many that arrive. Its ranks share them.
    pub bandwidth: f64,
    /// The seconds that a message takes besides its bytes.
    pub latency: f64,
    /// The number of ranks on a machine.
    pub ranks_per_machine: u64,
    /// Bytes per second that one rank sends to other ranks of its machine.
    pub local_bandwidth: f64,
}

impl Network {
    /// Returns true if collectives run while the rank computes.
    pub(super) fn overlaps(&self) -> bool {
        matches!(self, Self::Links(_))
    }

    /// Returns the seconds of a collective of `ranks` ranks, each of this `speed`. One rank
    /// exchanges nothing.
    pub(super) fn seconds(&self, collective: &Collective, ranks: u64, speed: &RankSpeed) -> f64 {
        match self {
            _ if ranks < 2 => 0.0,
            Self::Links(links) => links.seconds(collective, ranks, speed),
            Self::Threads { latency } => {
                let moved = bytes_by_threads(collective, ranks);
                (ranks - 1) as f64 * latency + speed.transfer_seconds(moved)
            }
        }
    }
}

impl Links {
    /// Returns the seconds of a collective between processes. `speed` is the speed of the rank
    /// that adds up contributions.
    fn seconds(&self, collective: &Collective, ranks: u64, speed: &RankSpeed) -> f64 {
        let Collective { operation, arrays, sent, result, .. } = *collective;
        // Every rank tells every other what it is about to send.
        let meeting = (ranks - 1) as f64 * self.latency;
        // The owner of a part reads the contributions of all ranks.
        let reduction = || self.exchange(arrays, sent, ranks) + speed.transfer_seconds(sent);
        meeting
            + match operation {
                Operation::ReduceScatter(_) => reduction(),
                Operation::AllReduce(_) => reduction() + self.exchange(arrays, result, ranks),
                Operation::AllGather | Operation::AllToAll | Operation::Broadcast { .. } => {
                    self.exchange(arrays, result, ranks)
                }
                Operation::Barrier => 0.0,
            }
    }

    /// Returns the seconds in which every rank sends its part of arrays of `bytes` bytes to every
    /// other rank. All ranks of a machine share its outside bandwidth.
    fn exchange(&self, arrays: u64, bytes: u64, ranks: u64) -> f64 {
        let of_machine = self.ranks_per_machine.clamp(1, ranks);
        let (neighbours, remote) = (of_machine - 1, ranks - of_machine);
        // Each rank owns one part and sends the other parts to their owners, or its own part to
        // all.
        let part = bytes as f64 / ranks as f64;
        let local = neighbours as f64 * part / self.local_bandwidth;
        let outside = (remote * of_machine) as f64 * part / self.bandwidth;
        // Both kinds of links work at the same time.
        (arrays * (ranks - 1)) as f64 * self.latency + local.max(outside)
    }
}

/// Returns the bytes that a rank thread reads and writes in memory for a collective. Threads
/// exchange references, so only additions and copies count.
fn bytes_by_threads(collective: &Collective, ranks: u64) -> u64 {
    let Collective { operation, sent, result, .. } = *collective;
    // A rank reads its part of what all ranks have, and writes it.
    let reduction = sent + result / ranks;
    match operation {
        Operation::ReduceScatter(_) => reduction,
        // Then it makes its own copy of the whole.
        Operation::AllReduce(_) => reduction + 2 * result,
        // One rank copies for all, which share the result.
        Operation::AllGather | Operation::Broadcast { .. } => 2 * result / ranks,
        Operation::AllToAll => 2 * result,
        Operation::Barrier => 0,
    }
}
