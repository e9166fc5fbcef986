//! Sharded training for Burn models that do not fit on one device.
//!
//! DeepBurn partitions parameters, gradients and optimizer states over ranks, as DeepSpeed's ZeRO
//! stages 1 to 3 do, and reads existing DeepSpeed JSON files. Model code does not change: any Burn
//! module that is generic over its backend can be trained sharded.
//!
//! # Train your own model on two ranks
//! ```
//! use burn::module::Module;
//! use burn::nn::{Linear, LinearConfig};
//! use burn::tensor::{Distribution, Tensor, activation::relu, backend::Backend};
//! use burn_flex::{Flex, FlexDevice};
//! use deepburn::prelude::*;
//!
//! #[derive(Module, Debug)]
//! struct Mlp<B: Backend> {
//!     up: Linear<B>,
//!     down: Linear<B>,
//! }
//!
//! impl<B: Backend> Mlp<B> {
//!     fn loss(&self, x: Tensor<B, 2>) -> Tensor<B, 1> {
//!         let y = self.down.forward(relu(self.up.forward(x.clone())));
//!         (y - x).powf_scalar(2.0).mean()
//!     }
//! }
//!
//! let plan = deepburn::plan(r#"{"train_micro_batch_size_per_gpu": 8,
//!     "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
//!     "zero_optimization": {"stage": 3}}"#, 2)?;
//! let losses = deepburn::run_ranks(2, |group| {
//!     let model = Mlp::<Training<Flex>> {
//!         up: LinearConfig::new(16, 64).init(&FlexDevice),
//!         down: LinearConfig::new(64, 16).init(&FlexDevice),
//!     };
//!     let mut engine = deepburn::initialize(model, &plan, group)?;
//!     let mut last = 0.0;
//!     for _ in 0..20 {
//!         let x = Tensor::random([8, 16], Distribution::Default, &FlexDevice);
//!         let loss = engine.forward(|model| model.loss(x))?;
//!         last = loss.clone().into_scalar();
//!         engine.backward(loss)?;
//!         engine.step()?;
//!     }
//!     Ok(last)
//! })?;
//! assert!(losses.iter().all(|loss| *loss < 0.3));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The folder `examples` contains complete programs: an MLP (`mlp`), an image classifier with batch
//! normalization in bf16 (`images`), a GAN with two engines (`gan`) and a training loop that
//! resumes from a checkpoint (`training_loop`).

mod cores;
#[cfg(doctest)]
mod documentation;
pub mod lora;
mod machine;
mod ranks;
pub mod tune;

pub use cores::{HostCores, divide_cores, start_threads};
pub use deepburn_checkpoint as checkpoint;
pub use deepburn_comm as comm;
pub use deepburn_config as config;
pub use deepburn_deepspeed as deepspeed;
pub use deepburn_forecast::{
    Forecast, ForecastError, MemoryPeaks, Meta, MetaDevice, Peaks, cost, forecast, forecast_stages,
    on_simulated_rank, pipeline_layout,
};
pub use deepburn_kernels as kernels;
pub use deepburn_learner::{
    AbsoluteErrors, Answers, Batch, BatchSchedule, BatchSizeError, BatchSource, BestEvaluation,
    BestMetric, BestPlan, BoxError, Cause, CheckpointPlan, ClientStates, ConfusionMatrix,
    EarlyStopping, Engine, EngineError, Evaluation, EvaluationEnd, EvaluationProgress,
    EvaluationStream, FailureElsewhere, FinalModel, GeneratedText, GeneratedTexts, HalfPrecision,
    Hook, Interrupt, Interval, LabelSetCounts, LoadPlan, LoopState, LossScaler, Measured,
    MicroBatches, NextStep, Outcome, PhaseTimes, RewardSums, SaveError, SaveInProgress,
    SaveRequest, Step, StepBatches, StepSize, Task, TrainError, TrainPlan, TrainedBatch,
    TrainingCheckpointError, TrainingEnd, check_deepspeed_checkpoint, check_optimizer_states,
    data_failure, evaluate, evaluate_until, initialize, initialize_pipeline, metrics, schedule,
    train,
};
pub use deepburn_ops as ops;
pub use deepburn_weights as weights;
pub use deepburn_zero as zero;
pub use deepburn_zero::{PipelineLayout, activation_checkpoint};
pub use machine::{
    MeasuredSizes, dtype_of, machine_speed, shared_by_threads, shared_cores, thread_latency,
};
pub use ranks::{COLLECTIVE_TIMEOUT, Ranks, RanksError, run_ranks};

pub use tune::tune;

use std::fmt;

use deepburn_config::{ConfigError, ConfigReport, Plan, RawConfig, RunContext, Severity, resolve};

/// The names that most programs need.
pub mod prelude {
    pub use deepburn_config::Plan;
    pub use deepburn_learner::{Engine, initialize};
    pub use deepburn_zero::{Group, Training, Zero};
}

/// Resolves a DeepSpeed JSON configuration for `world_size` ranks on the CPU.
///
/// Fills in all defaults and resolves `"auto"` values. Warnings and notes about the configuration
/// are logged through `tracing`.
///
/// # Errors
/// Returns all problems of the configuration in one message.
pub fn plan(json: &str, world_size: usize) -> Result<Plan, PlanError> {
    let written = RawConfig::from_json(json)?;
    let resolved = resolve(&written, &RunContext::on_host(world_size))?;
    for note in &resolved.notes {
        match note.severity {
            Severity::Warning => tracing::warn!("{note}"),
            _ => tracing::info!("{note}"),
        }
    }
    Ok(resolved.plan)
}

/// An error of [`plan`].
#[derive(thiserror::Error)]
pub enum PlanError {
    /// The configuration is not valid JSON or not a JSON object.
    #[error(transparent)]
    Unreadable(#[from] ConfigError),
    /// The configuration is readable, but has unknown keys, wrong values or unsupported settings.
    #[error(transparent)]
    Refused(#[from] ConfigReport),
}

/// Prints the message, because a program whose `main` returns the error prints this form.
impl fmt::Debug for PlanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
