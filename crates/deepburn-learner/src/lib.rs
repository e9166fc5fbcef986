//! The learner: an engine around a sharded model, schedules, the training loop and its record.

mod engine;
mod error;
pub mod metrics;
mod save;
pub mod schedule;
mod task;
mod train;

pub use engine::{Engine, PhaseTimes, Step, initialize};
pub use error::EngineError;
pub use save::{HalfPrecision, SaveError};
pub use task::{Batch, Evaluation, Task};
pub use train::{BatchSource, Cause, Hook, OutsideError, TrainError, TrainPlan, evaluate, train};
