//! The time of a training step, predicted for a machine and a network that are not at hand.
//!
//! Main type: [`StepCost`]. The timeline of a dry run is replayed with two clocks:
//! one for the computation of the rank, and one for its network link, which runs collectives one
//! after the other. Number, order and sizes of ops and collectives are the engine's own.
//!
//! - *Computation*: the time of an op is the maximum of two times: the time for its floating-point
//!   operations, and the time to read and write its operands in memory (roofline model, Williams et
//!   al. 2009).
//! - *Collectives*: the time of a message is a latency plus its bytes divided by the bandwidth
//!   (alpha-beta model, Hockney 1994). Each rank exchanges parts with every other rank, as in
//!   `deepburn-mpi`. A rank sends the same number of bytes as in a ring algorithm (Thakur et al.
//!   2005), and the same number of messages for each array.
//! - *Overlap*: a collective is hidden while the rank computes, and exposed while the rank waits for
//!   it.
//!
//! ```text
//! rank  │ op │ op │ wait │ op │ op │ op │      wait is exposed communication
//! link    │    gather    │   reduce   │          the rest is hidden behind the ops above it
//! ```
//!
//! The model assumes identical ranks with micro-batches of the same size, a network without other
//! traffic, and kernels that reach the speed in [`RankSpeed`]. It ignores data loading, the
//! collectives of the training loop, checkpoints and kernel launch overhead. It does not predict the
//! time of offload and of compressed exchanges
//! ([`UnsupportedPlan`]).

mod clock;
mod network;
mod rank_speed;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::fmt;

use deepburn_config::{ActivationOffload, OptimizerOffload, ParameterOffload, Plan};

pub use network::{Links, Network};
pub use rank_speed::RankSpeed;

use crate::timeline::{RankEvent, Stretch, Timeline};
use clock::Clock;

/// The reason why the time of a step cannot be predicted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UnsupportedPlan {
    /// The ranks compress what they exchange, which takes time on the CPU.
    Optimizer,
    /// Model states or activations are offloaded.
    Offload,
}

impl fmt::Display for UnsupportedPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Optimizer => {
                "step times are not predicted for optimizers that compress momenta (1-bit Adam, 1-bit LAMB, 0/1 \
                 Adam); use another optimizer"
            }
            Self::Offload => "step times are not predicted with offload; keep all states on the device",
        })
    }
}

impl std::error::Error for UnsupportedPlan {}

/// The time of a training step on each rank, and the bytes that the rank sends. All numbers cover
/// the complete step with all its micro-batches. `seconds` is `compute + communication - hidden`.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StepCost {
    /// The number of ranks.
    pub ranks: u64,
    /// The seconds of computation: training passes, gradient accumulation and the optimizer.
    pub compute: f64,
    /// The seconds of all collectives, including hidden ones.
    pub communication: f64,
    /// The seconds of collectives that run while the rank computes.
    pub hidden: f64,
    /// The seconds of the step.
    pub seconds: f64,
    /// The bytes that a rank sends to other ranks, without headers.
    pub bytes_sent: u64,
}

/// Returns an error if a step of this plan has parts whose time is not predicted.
pub(crate) fn check(plan: &Plan) -> Result<(), UnsupportedPlan> {
    let states_stay = plan.zero.optimizer_states == OptimizerOffload::Device
        && plan.zero.parameter_shards == ParameterOffload::Device;
    if !states_stay || plan.activations.offload != ActivationOffload::Device {
        return Err(UnsupportedPlan::Offload);
    }
    match plan.optimizer.exchanges_momentum() {
        true => Err(UnsupportedPlan::Optimizer),
        false => Ok(()),
    }
}

impl Timeline {
    /// Returns the cost of the step on each of `ranks` ranks with this `speed`.
    pub(crate) fn cost(&self, ranks: u64, speed: RankSpeed, network: &Network) -> StepCost {
        let parts = self.parts.iter().map(|part| part.cost(ranks, speed, network));
        parts.fold(StepCost { ranks, ..StepCost::default() }, |sum, part| StepCost {
            ranks,
            compute: sum.compute + part.compute,
            communication: sum.communication + part.communication,
            hidden: sum.hidden + part.hidden,
            seconds: sum.seconds + part.seconds,
            bytes_sent: sum.bytes_sent.saturating_add(part.bytes_sent),
        })
    }
}

impl Stretch {
    /// Returns the cost of all repetitions. The times of parts can be added, because the link is
    /// idle at the beginning and at the end of each.
    fn cost(&self, ranks: u64, speed: RankSpeed, network: &Network) -> StepCost {
        let mut clock = Clock::new(network.overlaps());
        let (mut started, mut bytes_sent) = (HashMap::new(), 0);
        for event in &self.events {
            match *event {
                RankEvent::Compute(work) => {
                    clock.compute(speed.seconds(work.operations, work.bytes))
                }
                RankEvent::Start { number, collective } => {
                    bytes_sent += collective.bytes_sent(ranks);
                    let seconds = network.seconds(&collective, ranks, &speed);
                    started.insert(number, clock.start(seconds));
                }
                RankEvent::Wait { number } => {
                    if let Some(started) = started.remove(&number) {
                        clock.wait(started);
                    }
                }
            }
        }
        let times = self.times as f64;
        StepCost {
            ranks,
            compute: times * clock.compute,
            communication: times * clock.communication,
            hidden: times * (clock.communication - clock.exposed).max(0.0),
            seconds: times * clock.now,
            bytes_sent: bytes_sent.saturating_mul(self.times),
        }
    }
}
