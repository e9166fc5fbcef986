//! DeepBurn trains Burn models bigger than one device.
//!
//! It shards parameters, gradients and optimizer states over ranks the way DeepSpeed's ZeRO does,
//! reads the DeepSpeed JSON that people already have, and leaves the model alone: any Burn module
//! that is generic over its backend trains sharded.
//!
//! # A model of your own on two ranks
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
//! The folder `examples` has whole programs: an MLP (`mlp`), an image classifier with batch normalization in bf16
//! (`images`), a GAN with two engines (`gan`) and a training loop that resumes from a checkpoint (`training_loop`).

mod cores;
#[cfg(doctest)]
mod documentation;
mod ranks;

pub use cores::{HostCores, divide_cores, start_threads};
pub use deepburn_checkpoint as checkpoint;
pub use deepburn_comm as comm;
pub use deepburn_config as config;
pub use deepburn_deepspeed as deepspeed;
pub use deepburn_kernels as kernels;
pub use deepburn_learner::{
    Batch, BatchSource, BestEvaluation, BestMetric, BestPlan, Cause, CheckpointPlan, ClientStates,
    Confusion, EarlyStopping, Engine, EngineError, Evaluation, EvaluationEnd, EvaluationProgress,
    EvaluationStream, HalfPrecision, Hook, Interrupt, LoadPlan, LoopState, LossScaler, Measured,
    NextStep, Outcome, OutsideError, PhaseTimes, SaveError, SaveInProgress, SaveRequest, Step,
    StepBatches, StepSize, Task, TorchModel, TrainError, TrainPlan, TrainingCheckpointError,
    check_deepspeed_checkpoint, data_failure, evaluate, evaluate_until, initialize, metrics,
    schedule, train,
};
pub use deepburn_ops as ops;
pub use deepburn_zero as zero;
pub use deepburn_zero::activation_checkpoint;
pub use ranks::{COLLECTIVE_TIMEOUT, Ranks, RanksError, run_ranks};

use deepburn_config::{ConfigError, Plan, RawConfig, Report, RunContext, Severity, resolve};

/// What most programs need.
pub mod prelude {
    pub use deepburn_config::Plan;
    pub use deepburn_learner::{Engine, initialize};
    pub use deepburn_zero::{Group, Training, Zero};
}

/// Resolves a DeepSpeed configuration, given as JSON, for ranks on the host. Warnings and notes about
/// it are logged through `tracing`.
///
/// # Errors
/// Everything that is wrong with it, in one message.
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

/// Why a configuration gives no plan.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// It cannot be read.
    #[error(transparent)]
    Unreadable(#[from] ConfigError),
    /// It can be read, and asks for what cannot be done.
    #[error(transparent)]
    Refused(#[from] Report),
}
