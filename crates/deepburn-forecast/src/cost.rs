//! The time of a training step, predicted for a machine and a network that are not at hand.
//!
//! Main type: [`StepCost`]. The timeline of a dry run is replayed with two clocks: one for the
//! computation of the rank, and one for its network link, which runs collectives one after the
//! other. Number, order and sizes of ops and collectives are the engine's own.
//!
//! - *Computation*: the time of an op is the maximum of two times: the time for its floating-point
//!   operations, and the time to read and write its operands in memory (roofline model, Williams et
//!   al. 2009). A kernel that packs the operands of a product does so before it multiplies, so both
//!   times of a product may be added ([`RankSpeed::operand_bandwidth`]). With few rows, this takes
//!   longer than the multiplications.
//! - *Offload*: the bytes that are copied to and from host memory, read from NVMe and written to
//!   it, divided by the bandwidth of each.
//! - *Collectives*: the time of a message is a latency plus its bytes divided by the bandwidth
//!   (alpha-beta model, Hockney 1994). Each rank exchanges parts with every other rank, as in
//!   `deepburn-mpi`. A rank sends the same number of bytes as in a ring algorithm (Thakur et al.
//!   2005), and the same number of messages for each array.
//! - *Overlap*: a collective is hidden while the rank computes, and exposed while the rank waits
//!   for it.
//!
//! ```text
//! rank  │ op │ op │ wait │ op │ op │ op │      wait is exposed communication
//! link    │    gather    │   reduce   │          the rest is hidden behind the ops above it
//! ```
//!
//! The model assumes identical ranks with micro-batches of the same size, a network without other
//! traffic, and kernels that reach the speed in [`RankSpeed`]. It ignores data loading, the
//! collectives of the training loop and checkpoints. Offloaded states and activations are assumed
//! to be transferred while the rank waits, so what the engine transfers in the background is
//! predicted too slow.

mod clock;
mod network;
mod pipeline;
mod rank_speed;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::fmt;

use deepburn_meta::Work;

pub use network::{Links, Network};
pub use pipeline::{PipelineCost, PipelineCostError, SharedCores, StageCost};
pub use rank_speed::RankSpeed;

use crate::timeline::{RankEvent, Stretch, Timeline};
use clock::Clock;

/// A bandwidth that is not known, and that the time of a step depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnknownBandwidth {
    /// Between the device and host memory ([`RankSpeed::host_bandwidth`]).
    Host,
    /// To and from the disk ([`RankSpeed::disk_bandwidth`]).
    Disk,
}

impl fmt::Display for UnknownBandwidth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Host => {
                "offload to host memory: the bandwidth between device and host is not known"
            }
            Self::Disk => "offload to NVMe: the bandwidth of the disk is not known",
        })
    }
}

impl std::error::Error for UnknownBandwidth {}

/// The time of a training step on each rank, and the bytes that the rank sends. All numbers cover
/// the complete step with all its micro-batches. `seconds` is
/// `compute + offload + communication - hidden`.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StepCost {
    /// The number of ranks.
    pub ranks: u64,
    /// The seconds of computation: training passes, gradient accumulation and the optimizer.
    pub compute: f64,
    /// The seconds of transfers to and from host memory and NVMe.
    pub offload: f64,
    /// The seconds of all collectives, including hidden ones.
    pub communication: f64,
    /// The seconds of collectives that run while the rank computes.
    pub hidden: f64,
    /// The seconds of the step.
    pub seconds: f64,
    /// The bytes that a rank sends to other ranks, without headers.
    pub bytes_sent: u64,
}

impl Timeline {
    /// Returns the cost of the step on each of `ranks` ranks with this `speed`.
    ///
    /// # Errors
    /// Returns an error if the step offloads to a tier whose bandwidth is not known.
    pub(crate) fn cost(
        &self,
        ranks: u64,
        speed: RankSpeed,
        network: &Network,
    ) -> Result<StepCost, UnknownBandwidth> {
        let mut sum = StepCost { ranks, ..StepCost::default() };
        self.parts.iter().try_for_each(|part| part.add_cost(&mut sum, speed, network))?;
        Ok(sum)
    }
}

impl Stretch {
    /// Adds the cost of all repetitions. The times of parts can be added, because the link is idle
    /// at the beginning and at the end of each.
    ///
    /// # Errors
    /// Returns an error if a tier is used whose bandwidth is not known.
    fn add_cost(
        &self,
        sum: &mut StepCost,
        speed: RankSpeed,
        network: &Network,
    ) -> Result<(), UnknownBandwidth> {
        let mut clock = Clock::new(network.overlaps());
        let (mut started, mut bytes_sent) = (HashMap::new(), 0);
        for event in &self.events {
            match *event {
                // Transfers between tiers are recorded as work of their own, which computes
                // nothing.
                RankEvent::Compute(Work { operations: 0, bytes: 0, copied, swapped }) => {
                    let work = Work { copied, swapped, ..Work::default() };
                    clock.offload(speed.offload_seconds(&work)?);
                }
                RankEvent::Compute(work) => clock.compute(speed.seconds(&work)),
                RankEvent::Start { number, collective, ranks } => {
                    bytes_sent += collective.bytes_sent(ranks);
                    let seconds = network.seconds(&collective, ranks, &speed);
                    started.insert(number, clock.start(seconds));
                }
                RankEvent::Wait { number } => {
                    if let Some(started) = started.remove(&number) {
                        clock.wait(started);
                    }
                }
                // Other pipeline stages send and receive them, which this rank alone does not
                // simulate.
                RankEvent::Send { .. } | RankEvent::Receive { .. } => {}
            }
        }
        let times = self.times as f64;
        sum.compute += times * clock.compute;
        sum.offload += times * clock.offload;
        sum.communication += times * clock.communication;
        // Both are sums of the same times in another order, so the difference may be rounded below
        // 0.
        sum.hidden += times * (clock.communication - clock.exposed).max(0.0);
        sum.seconds += times * clock.now;
        sum.bytes_sent = sum.bytes_sent.saturating_add(bytes_sent.saturating_mul(self.times));
        Ok(())
    }
}
