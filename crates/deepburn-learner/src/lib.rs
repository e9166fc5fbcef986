//! The training engine: a sharded model with its optimizer, schedules, checkpoints and training
//! loop.
//!
//! [`initialize`] creates an [`Engine`] from any Burn module. Its `forward`, `backward` and `step`
//! are enough for a custom training loop. [`train`] is a complete training loop for a [`Task`] and
//! a [`BatchSource`]. [`Hook`]s observe the loop, and [`metrics`] defines the rows of
//! `metrics.jsonl`. [`schedule`] computes learning rates.
//!
//! ```text
//! train (task, source, hooks)            the loop: data, steps, evaluation, checkpoints
//!   └─ Engine                            one optimizer step: forward, backward, step
//!        ├─ LossScaler, Schedule         the loss scale and the learning rate of each step
//!        └─ deepburn-zero ModelStates    parameters, gradients and optimizer states of this rank
//! ```
//!
//! Every rank has its own engine, in its own thread or process, and all ranks make the same calls
//! in the same order. If one rank fails, the run ends on all ranks.

mod accumulation;
mod answers;
mod batch_schedule;
mod best;
mod checkpoint;
mod confusion_matrix;
mod engine;
mod error;
mod evaluation;
mod exchange;
mod final_model;
mod hook;
mod interval;
mod loss_scale;
mod save;
mod saving;
pub mod schedule;
mod settings;
mod source;
mod step_state;
mod task;
mod train;
mod train_batch;
mod train_pass;
mod whole_module;

pub use answers::{AbsoluteErrors, Answers, LabelSetCounts, RewardSums};
pub use batch_schedule::{BatchSchedule, BatchSizeError};
pub use best::{BestEvaluation, BestMetric, BestPlan, EarlyStopping, LoopState};
pub use checkpoint::{
    ClientStates, LoadPlan, SaveInProgress, SaveRequest, TrainingCheckpointError,
    check_deepspeed_checkpoint, check_optimizer_states,
};
pub use confusion_matrix::ConfusionMatrix;
pub use deepburn_monitor::{GeneratedText, metrics};
pub use engine::{Engine, PhaseTimes, Step, initialize, initialize_pipeline};
pub use error::{BoxError, Cause, EngineError, TrainError};
pub use evaluation::{
    EvaluationEnd, EvaluationProgress, Measured, data_failure, evaluate, evaluate_until,
};
pub use exchange::FailureElsewhere;
pub use final_model::{FinalModel, TrainingEnd};
pub use hook::Hook;
pub use interval::Interval;
pub use loss_scale::{LossScaler, ScaleExhausted, ScalerState};
pub use save::{HalfPrecision, SaveError};
pub use saving::{CheckpointPlan, Interrupt, Outcome};
pub use settings::pass_schedule;
pub use source::{BatchSource, EvaluationStream, NextStep, StepBatches, StepSize};
pub use task::{Batch, Evaluation, GeneratedTexts, Task};
pub use train::{TrainPlan, train};
pub use train_batch::{MicroBatches, TrainedBatch};
