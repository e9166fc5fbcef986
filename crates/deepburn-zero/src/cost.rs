//! The time of a training step, predicted for any number of ranks.
//!
//! Main type: [`StepModel`]. It replays a training pass, op by op, with two clocks: one for the rank, which computes,
//! and one for its link, which runs collectives one after the other. The pass is the one whose memory
//! [`PassPlan`](crate::estimate::PassPlan) forecasts. The collectives are the same as in the engine: the same number, in the
//! same order, of as many elements.
//!
//! - *Computation*: an op takes the longer of two times: for its floating-point operations, and for the bytes
//!   which it reads and writes (the roofline model, Williams et al. 2009).
//! - *Collectives*: each message costs a latency, each byte its time on the link (the alpha-beta model, Hockney 1994).
//!   A rank exchanges parts with every other rank, as `deepburn-mpi` does; the bytes are the same as in a ring (Thakur et
//!   al. 2005), and so is the number of messages, times the arrays of the collective.
//! - *Overlap*: a collective is hidden as long as the rank does not wait for it. Reductions overlap with backward
//!   (`overlap_comm`), and gathers with the ops before the one that reads them (prefetch).
//!
//! Not supported: optimizers whose updates exchange directions, offloaded states and activations,
//! and frozen parameters ([`UnsupportedPlan`]).
//!
//! ```text
//! rank  │ op │ op │ wait │ op │ op │ op │      wait is exposed communication
//! link    │    gather    │   reduce   │          the rest is hidden behind the ops above it
//! ```
//!
//! The model assumes equal ranks with equal micro-batches, a network without other traffic, and
//! kernels that reach the machine's two figures. It leaves out data loading, checkpoints and the
//! time to start a kernel.

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
