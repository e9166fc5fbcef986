//! Errors of an engine and of the training loop.

use std::path::{Path, PathBuf};

use deepburn_comm::CommError;
use deepburn_config::counted;
use deepburn_zero::ZeroError;

use crate::batch_schedule::BatchSizeError;
use crate::loss_scale::ScaleExhausted;

/// An error of the engine. Every such error ends the run, because the other ranks would otherwise
/// wait for this rank.
#[derive(Debug, Clone, thiserror::Error)]
pub enum EngineError {
    /// Sharded training failed.
    #[error(transparent)]
    Zero(#[from] ZeroError),
    /// The number of ranks in the group differs from the plan.
    #[error(
        "the plan was made for {} and the group has {actual}: resolve the configuration for the group \
         that runs it",
        counted(*planned, "rank")
    )]
    WorldSize {
        /// The number of ranks in the plan.
        planned: usize,
        /// The number of ranks in the group.
        actual: usize,
    },
    /// The number of pipeline stages in the layout differs from the plan.
    #[error(
        "the plan has {} and the layout of the model {actual}: make the layout for the plan, and pass it to \
         `initialize_pipeline`",
        counted(*planned, "pipeline stage")
    )]
    Stages {
        /// The number of stages in the plan.
        planned: usize,
        /// The number of stages in the layout.
        actual: usize,
    },
    /// The batch size, or its schedule, is not supported.
    #[error(transparent)]
    BatchSize(#[from] BatchSizeError),
    /// `no_sync` was called at a stage that partitions gradients.
    #[error(
        "no_sync keeps complete gradients on every rank, which contradicts ZeRO stage {stage}: \
         use stage 0 or 1, or accumulate gradients with synchronization"
    )]
    NoSync {
        /// The stage.
        stage: u8,
    },
    /// Gradients overflow at the smallest loss scale.
    #[error(
        "{cause}: current loss scale already at minimum - cannot decrease scale anymore. The first \
         gradient that is not finite belongs to parameter {path}: lower the learning rate or \
         fp16.min_loss_scale (torch_autocast has no such key), or train in bf16"
    )]
    LossScale {
        /// Module path of the parameter.
        path: String,
        /// The smallest loss scale, which was reached.
        cause: ScaleExhausted,
    },
    /// Every step is skipped for an overflow, and the loss scale is static and cannot be lowered.
    #[error(
        "{steps} steps in a row were skipped: the gradient of parameter {path} is not finite, and \
         nothing is learnt any more. Lower the learning rate or a fixed fp16.loss_scale (0 makes it \
         dynamic), and look for NaN in the weights that training started from"
    )]
    Stuck {
        /// Module path of the first parameter whose gradient is not finite.
        path: String,
        /// The number of consecutive skipped steps.
        steps: u64,
    },
    /// `train_pass` was called in fp16, which requires a scaled loss.
    #[error(
        "train_pass cannot train in fp16: the closure runs the backward pass itself, so its loss is \
         not multiplied by the loss scale. Set bf16.enabled instead of fp16.enabled, or call \
         forward and backward"
    )]
    ScaledLoss,
    /// The closure of `train_pass` did not run exactly one backward pass.
    #[error(
        "the closure of train_pass ran {passes} backward passes on the module; it must call \
         `backward` exactly once, on a loss that it computed from the module that it was given"
    )]
    BackwardPasses {
        /// The number of backward passes that reported gradients of this model.
        passes: u64,
    },
    /// The learning rate is negative or not finite.
    #[error("the learning rate is {rate}; it must be a finite number of at least 0")]
    LearningRate {
        /// The rate.
        rate: f64,
    },
    /// The weight of a loss is not finite.
    #[error(
        "the weight of the loss is {weight}; it must be a finite number. A step without any target, \
         whose total is 0, has nothing to learn from: leave it out on all ranks"
    )]
    LossWeight {
        /// The weight.
        weight: f64,
    },
    /// The engine's functions were called in the wrong order.
    #[error("{call} was called {when}: the order is forward, backward, step")]
    Order {
        /// The name of the function.
        call: &'static str,
        /// The situation in which it was called, as in the error message.
        when: &'static str,
    },
    /// An earlier call of `train_batch` failed between the passes of a pipeline.
    #[error(
        "a pass of an earlier train_batch failed, and the pipeline stages are now at different passes: start \
         again from a checkpoint. It failed with: {cause}"
    )]
    BrokenSchedule {
        /// The message of the error that the call returned.
        cause: String,
    },
    /// The loss has several elements. Autodiff would differentiate the sum of the elements.
    #[error(
        "the loss has {numel} elements, but `Engine::backward` takes one: the mean over the \
         micro-batch, shape [1]; call `mean()` on it"
    )]
    LossElements {
        /// The number of elements.
        numel: usize,
    },
    /// The loss has no gradient. Autodiff would panic.
    #[error(
        "the loss depends on no trainable parameter, so it has no gradient: compute it from the \
         output of the module that `Engine::forward` passes, without `detach` or `inner`"
    )]
    DetachedLoss,
}

impl From<CommError> for EngineError {
    fn from(error: CommError) -> Self {
        Self::Zero(error.into())
    }
}

/// A failure of the training loop and the step in which it occurred.
#[derive(Debug, thiserror::Error)]
#[error("step {step}: {cause}")]
pub struct TrainError {
    /// The number of the optimizer step, from 1.
    pub step: u64,
    /// The cause of the failure.
    #[source]
    pub cause: Cause,
}

/// The cause of a [`TrainError`].
#[derive(Debug, thiserror::Error)]
pub enum Cause {
    /// The engine failed.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// A task or a hook failed.
    #[error(transparent)]
    Outside(BoxError),
    /// The data of a rank cannot be read.
    #[error("{cause}{}", saved_before(checkpoint.as_deref()))]
    Data {
        /// The error of the data source.
        cause: BoxError,
        /// The checkpoint of the last complete step; `None` if no step was taken or the save
        /// failed.
        checkpoint: Option<PathBuf>,
    },
}

fn saved_before(checkpoint: Option<&Path>) -> String {
    let describe = |path: &Path| format!("; the last complete step is saved in {}", path.display());
    checkpoint.map_or_else(String::new, describe)
}

/// Any error, such as of a data source, a task or a hook.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;
