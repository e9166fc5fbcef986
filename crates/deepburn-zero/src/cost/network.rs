//! How long collectives take.
//!
//! Main type: [`Network`]. Its rules follow the collectives of `deepburn-mpi` and of rank threads
//! (`deepburn-comm/src/in_process/README.md`).

use deepburn_comm::Operation;

use super::Machine;
use super::group::Collective;

/// What connects the ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Network {
    /// Links between processes. A communication thread runs collectives while the rank computes.
    Links(Links),
    /// The memory of one process whose threads are the ranks. They share the cores, so no collective is hidden.
    Threads {
        /// Seconds for each other rank of a collective: to wake its thread, and for that to get a core.
        latency: f64,
    },
}

/// The links of a cluster.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Links {
    /// Bytes per second that leave a machine, and as many that arrive, shared by its ranks.
    pub bandwidth: f64,
    /// Seconds of a message.
    pub latency: f64,
    /// Ranks of a machine.
    pub ranks_per_machine: u64,
    /// Bytes per second that one rank sends to others of its machine.
    pub local_bandwidth: f64,
}

impl Network {
    /// Whether collectives run while the rank computes.
    pub(super) fn overlaps(&self) -> bool {
        matches!(self, Self::Links(_))
    }

    /// Seconds of a collective of `ranks` ranks, on the `machine` of each.
    pub(super) fn seconds(&self, collective: &Collective, ranks: u64, machine: &Machine) -> f64 {
        match self {
            _ if ranks < 2 => 0.0,
            Self::Links(links) => links.seconds(collective, ranks, machine),
            Self::Threads { latency } => {
                let moved = bytes_by_threads(collective, ranks);
                (ranks - 1) as f64 * latency + machine.transfer_seconds(moved)
            }
        }
    }
}

impl Links {
    fn seconds(&self, collective: &Collective, ranks: u64, machine: &Machine) -> f64 {
        let Collective { operation, arrays, sent, result, .. } = *collective;
        // Every rank tells every other what it is about to send.
        let meeting = (ranks - 1) as f64 * self.latency;
        // The owner of a part reads the contributions of all ranks.
        let reduction = || self.exchange(arrays, sent, ranks) + machine.transfer_seconds(sent);
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

    /// Seconds in which every rank sends its part of arrays of `bytes` bytes to every other rank.
    fn exchange(&self, arrays: u64, bytes: u64, ranks: u64) -> f64 {
        let of_machine = self.ranks_per_machine.clamp(1, ranks);
        let (neighbours, remote) = (of_machine - 1, ranks - of_machine);
        let part = bytes as f64 / ranks as f64;
        let local = neighbours as f64 * part / self.local_bandwidth;
        let outside = (remote * of_machine) as f64 * part / self.bandwidth;
        // Both kinds of links work at the same time.
        (arrays * (ranks - 1)) as f64 * self.latency + local.max(outside)
    }
}

/// Bytes that a rank thread reads and writes for a collective.
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
