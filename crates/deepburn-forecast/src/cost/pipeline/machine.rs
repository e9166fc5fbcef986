//! The machines that run the stages of a pipeline.

use super::{Network, RankSpeed};

/// The cores of a machine whose rank threads run all stages.
///
/// With fewer ranks than cores, the ranks share one thread pool, so a rank computes faster while
/// others wait. Otherwise each rank computes on its own thread, and therefore on one core
/// (`deepburn::cores`): a core whose rank waits is only useful if there are more ranks than cores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SharedCores {
    /// The number of cores.
    pub cores: u64,
}

/// The ranks of a pipeline, their hardware and their network.
#[derive(Debug, Clone, Copy)]
pub(super) struct PipelineMachine<'a> {
    /// The number of ranks of all stages together.
    pub(super) ranks: u64,
    /// The number of stages.
    pub(super) stages: u64,
    /// The speed of a rank while all ranks compute.
    pub(super) speed: RankSpeed,
    /// The network between the ranks.
    pub(super) network: &'a Network,
    /// The cores that all ranks share; `None` if each rank has hardware of its own.
    pub(super) cores: Option<SharedCores>,
}

/// How long a message takes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct MessageTime {
    /// The seconds in which the message occupies the sender's link.
    pub(super) sending: f64,
    /// The seconds from its end on the link to its arrival.
    pub(super) latency: f64,
}

impl PipelineMachine<'_> {
    /// Returns the number of ranks of a stage.
    pub(super) fn replicas(&self) -> u64 {
        (self.ranks / self.stages.max(1)).max(1)
    }

    /// Returns how much faster than `speed` a rank is while `busy` stages compute, of which there
    /// is at least one.
    pub(super) fn gain(&self, busy: usize) -> f64 {
        let Some(SharedCores { cores }) = self.cores else { return 1.0 };
        let active = busy as u64 * self.replicas();
        // A rank with a thread of its own uses one core at most.
        let least = if self.ranks < cores { 1 } else { cores.max(1) };
        self.ranks as f64 / active.max(least) as f64
    }

    /// Returns the time of a message of `bytes` from a rank of `stage` to the rank `to`.
    pub(super) fn message(&self, stage: usize, to: u64, bytes: u64) -> MessageTime {
        match self.network {
            // Threads exchange references, so a message only wakes its receiver.
            Network::Threads { latency } => MessageTime { sending: 0.0, latency: *latency },
            Network::Links(links) => {
                let of_machine = links.ranks_per_machine.max(1);
                let from = stage as u64 * self.replicas();
                let bandwidth = match from / of_machine == to / of_machine {
                    true => links.local_bandwidth,
                    // The replicas of a stage on this machine send at the same time.
                    false => links.bandwidth / of_machine.min(self.replicas()) as f64,
                };
                MessageTime { sending: bytes as f64 / bandwidth, latency: links.latency }
            }
        }
    }

    /// Returns true if a group of `ranks` ranks, whose numbers are `stride` apart, has ranks of
    /// several stages.
    pub(super) fn spans_stages(&self, ranks: u64, stride: u64) -> bool {
        // The groups of the first rank of a stage begin with it, or have ranks of all stages.
        ranks.saturating_sub(1).saturating_mul(stride) >= self.replicas()
    }
}
