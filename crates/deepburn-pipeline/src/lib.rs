//! Pipeline parallelism as data: which blocks a stage holds, and in which order it runs its passes.
//!
//! ```text
//! blocks in execution order ── cut ──► stages ─┐
//!                                              ├─ simulate ──► seconds, idle fraction, passes in flight
//! schedule, micro-batches ── orders ──► passes ┘
//! ```
//!
//! - [`cut`] divides the blocks of a model into stages of consecutive [`Block`]s.
//! - A [`PassSchedule`] lists the passes of each stage.
//! - [`simulate`] predicts the time of a step from the times of the passes.
//!
//! ```
//! use deepburn_pipeline::{PassSchedule, StageTime, simulate};
//!
//! let orders = PassSchedule::OneForwardOneBackward.orders(4, 8);
//! let times = [StageTime { forward: 1.0, backward: 2.0 }; 4];
//! let step = simulate(&orders, &times, 0.0).unwrap();
//! // (p - 1) / (m + p - 1)
//! assert!((step.idle_fraction() - 3.0 / 11.0).abs() < 1e-12);
//! assert_eq!(step.in_flight, [4, 3, 2, 1]);
//! ```
//!
//! The crate knows neither tensors nor ranks. Its users measure blocks and run the passes.

#![forbid(unsafe_code)]

mod block;
mod cut;
mod deepspeed;
mod method;
mod schedule;
mod simulation;

pub use block::Block;
pub use cut::{CutError, PipelineStep, StageBlocks, cut};
pub use deepspeed::{partition_balanced, partition_uniform};
pub use method::CutMethod;
pub use schedule::{Action, PassSchedule};
pub use simulation::{Simulation, StageTime, simulate};
