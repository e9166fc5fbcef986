//! The time of a training step, predicted for any number of ranks.
//!
//! Main type: [`StepModel`]. It replays a training pass op by op with two clocks: one for the computation of the rank,
//! and one for its network link, which runs collectives one after the other. It replays the events that
//! [`PassPlan`](crate::estimate::PassPlan) simulates to estimate memory. Number, order and sizes of the collectives are
//! the same as in the engine.
//!
//! - *Computation*: the time of an op is the maximum of two times: the time for its floating-point operations, and the
//!   time to read and write its operands in memory (roofline model, Williams et al. 2009).
//! - *Collectives*: the time of a message is a latency plus its bytes divided by the bandwidth (alpha-beta model,
//!   Hockney 1994). Each rank exchanges parts with every other rank, as in `deepburn-mpi`. A rank sends the same number
//!   of bytes as in a ring algorithm (Thakur et al. 2005), and the same number of messages for each array.
//! - *Overlap*: a collective is hidden while the rank computes, and exposed while the rank waits for it. Reductions
//!   overlap with the backward pass (`overlap_comm`). Prefetched all-gathers overlap with the ops that run before the
//!   gathered parameters are read.
//!
//! Not supported: optimizers that exchange update directions, offloaded states and activations, and frozen parameters
//! ([`UnsupportedPlan`]).
//!
//! ```text
//! rank  │ op │ op │ wait │ op │ op │ op │      wait is exposed communication
//! link    │    gather    │   reduce   │          the rest is hidden behind the ops above it
//! ```
//!
//! The model assumes identical ranks with micro-batches of the same size, a network without other traffic, and kernels
//! that reach the speed in [`RankSpeed`]. It ignores data loading, checkpoints and kernel launch overhead.

mod clock;
mod collective;
mod gathering;
mod group;
mod network;
mod rank_speed;
mod step;
#[cfg(test)]
mod tests;

pub use network::{Links, Network};
pub use rank_speed::RankSpeed;
pub use step::{StepCost, StepModel, UnsupportedPlan};
