//! The learner: an engine around a sharded model, schedules, the training loop and its record.
//!
//! [`initialize`] makes an [`Engine`] of any Burn module; its forward, backward and step are all that a
//! loop of one's own needs. [`train`] is such a loop for a [`Task`] and a [`BatchSource`], with
//! [`Hook`]s that watch it and rows for `metrics.jsonl` ([`metrics`]). [`schedule`] has the learning
//! rates.

mod best;
mod checkpoint;
mod engine;
mod error;
mod evaluation;
mod exchange;
mod loss_scale;
mod save;
mod saving;
pub mod schedule;
mod source;
mod task;
mod train;
mod train_pass;
mod whole_module;

pub use best::{BestEvaluation, BestMetric, BestPlan, EarlyStopping, LoopState};
pub use checkpoint::{
    ClientStates, LoadPlan, SaveInProgress, SaveRequest, TorchModel, TrainingCheckpointError,
    check_deepspeed_checkpoint,
};
pub use deepburn_monitor::metrics;
pub use engine::{Engine, PhaseTimes, Step, initialize};
pub use error::EngineError;
pub use evaluation::{
    EvaluationEnd, EvaluationProgress, Measured, data_failure, evaluate, evaluate_until,
};
pub use loss_scale::{LossScaler, ScaleExhausted, ScalerState};
pub use save::{HalfPrecision, SaveError};
pub use saving::{CheckpointPlan, Interrupt, Outcome};
pub use source::{BatchSource, EvaluationStream, NextStep, StepBatches, StepSize};
pub use task::{Batch, Confusion, Evaluation, Task};
pub use train::{Cause, Hook, OutsideError, TrainError, TrainPlan, train};
