//! Errors in the combination of a Learner and a plan, found before training starts.
//!
//! Burn's `Learner` and a DeepSpeed configuration both describe a training run. If a setting exists
//! in both, only one of them is used. If the other one would be ignored silently, it is an error.
//! The checks run before any rank starts, so a mistake costs no training time.

use burn_train::{LearningComponentsTypes, TrainingComponents};
use deepburn::config::{Plan, SchedulePlan};

/// The reason why a Learner and a plan cannot be combined.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Refusal {
    #[error(
        "the plan trains in fp16 (fp16.enabled or torch_autocast.dtype), which scales the loss, but \
         `TrainStep::step` does not expose its loss: use bf16, or train with deepburn::Engine"
    )]
    /// fp16 needs a loss scale, and the loss is inside the program's `TrainStep`.
    Fp16,
    #[error(
        "the plan has a learning-rate schedule, and so has the Learner: remove `scheduler` from the \
         configuration (a Learner without a schedule takes a number as its scheduler)"
    )]
    /// Both have a learning-rate schedule.
    Schedule,
    /// A key of the configuration that has no effect with a Learner.
    #[error("the configuration has `{key}`, which has no effect here, because {reason}: remove it")]
    Unsupported { key: &'static str, reason: &'static str },
    #[error(
        "the plan accumulates {plan} micro-batches per optimizer step and the Learner {learner}: \
         call `grads_accumulation({plan})` or set gradient_accumulation_steps to {learner}"
    )]
    /// The two numbers of micro-batches per optimizer step differ.
    Accumulation { plan: usize, learner: usize },
    #[error(
        "`with_file_checkpointer` cannot save a sharded model: replace it by \
         `ShardedStrategy::checkpoints(folder)`, which also saves the optimizer states of all ranks"
    )]
    /// Burn's checkpointer would save complete states, which no rank has.
    FileCheckpointer,
    #[error(
        "{launcher} started {world_size} processes, and a Learner's ranks are threads of one process: \
         start one process, or train with deepburn::Engine, whose ranks may be processes"
    )]
    /// A launcher has started several processes.
    Launched { launcher: deepburn::comm::Launcher, world_size: usize },
    /// The environment of a launcher is contradictory.
    #[error(transparent)]
    Placement(#[from] deepburn::comm::PlacementError),
    #[error(
        "training was to resume after epoch {epoch}, and the strategy has no folder of checkpoints: \
         call `ShardedStrategy::checkpoints(folder)`"
    )]
    /// Training is to resume, and there is no folder to resume from.
    NoFolder { epoch: usize },
    /// The training data is empty.
    #[error("the training data loader has no items: give it a data set with at least one")]
    NoData,
    #[error(
        "the Learner's optimizer differs from the plan's, which does the updates. {difference} The \
         plan's optimizer is {plan}; the Learner's is {learner}: give both the same settings"
    )]
    /// The two optimizers update weights differently.
    Optimizer { difference: String, plan: String, learner: String },
    #[error(
        "the plan's optimizer is {plan}, which depends on whole tensors, and a Learner's optimizer cannot be compared with \
         it: use another optimizer, or train with `deepburn::initialize`"
    )]
    /// The plan's optimizer depends on whole tensors, so it cannot be compared.
    NotElementwise { plan: String },
}

/// Returns an error if the plan has settings that a Learner does not support.
///
/// # Errors
/// Returns the first such setting.
pub(crate) fn check_plan(plan: &Plan) -> Result<(), Refusal> {
    if plan.precision.uses_fp16() {
        return Err(Refusal::Fp16);
    }
    if !matches!(plan.schedule, SchedulePlan::Constant { .. }) {
        return Err(Refusal::Schedule);
    }
    let loaders = "the Learner's data loaders make the batches";
    let metrics = "the Learner's metrics and loggers record the run";
    let monitor = &plan.outputs.monitor;
    let unsupported = [
        (
            plan.data_efficiency.dynamic_batching.is_some(),
            "data_efficiency.data_sampling.dynamic_batching",
            loaders,
        ),
        (plan.data_efficiency.curriculum.is_some(), "curriculum_learning", loaders),
        (monitor.tensorboard.is_some(), "tensorboard", metrics),
        (monitor.csv.is_some(), "csv_monitor", metrics),
        (monitor.wandb.is_some(), "wandb", metrics),
        (monitor.profile.is_some(), "pytorch_profiler", metrics),
        (monitor.flops.is_some(), "flops_profiler", metrics),
    ];
    match unsupported.into_iter().find(|(asked, ..)| *asked) {
        Some((_, key, reason)) => Err(Refusal::Unsupported { key, reason }),
        None => Ok(()),
    }
}

/// Returns an error if settings of the Learner contradict the plan or the strategy.
///
/// # Errors
/// Returns the first contradiction.
pub(crate) fn check_settings<LC: LearningComponentsTypes>(
    plan: &Plan,
    settings: &TrainingComponents<LC>,
    has_folder: bool,
) -> Result<(), Refusal> {
    let plan = plan.batch.gradient_accumulation_steps;
    let learner = settings.grad_accumulation.unwrap_or(1);
    if plan != learner {
        return Err(Refusal::Accumulation { plan, learner });
    }
    if settings.checkpointer.is_some() {
        return Err(Refusal::FileCheckpointer);
    }
    match settings.checkpoint {
        Some(epoch) if !has_folder => Err(Refusal::NoFolder { epoch }),
        _ => Ok(()),
    }
}
