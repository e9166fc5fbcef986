//! Pipeline parallelism as data: which blocks a stage holds, and in which order it runs its passes.
//!
//! ```text
//! blocks in execution order ── cut ──────► stages
//! schedule, micro-batches ──── actions ──► passes
//! ```
//!
//! - [`cut`] divides the blocks of a model into stages of consecutive [`Block`]s.
//! - A [`PassSchedule`] lists the passes of each stage.
//!
//! Tests simulate the schedules: the time of a step from the times of the passes.
//!
//! The crate knows neither tensors nor ranks. Its users measure blocks and run the passes.

#![forbid(unsafe_code)]

mod block;
mod cut;
mod deepspeed;
mod method;
mod schedule;

pub use block::Block;
pub use cut::{CutError, PipelineStep, StageBlocks, cut};
pub use deepspeed::{partition_balanced, partition_uniform};
pub use method::CutMethod;
pub use schedule::{Action, PassSchedule};
