//! Training steps without data.
//!
//! ```text
//!  Engine                 the real passes and steps
//!    Training<Meta>       the model's ops, autodiff, gathers, reductions: shapes instead of values
//!    SimulatedGroup       one rank of any world: collectives return at once and are counted
//!    Ledger               the bytes that a real run would hold, by tier and category
//! ```
//!
//! The first step records the order in which parameters are read, and later steps prefetch by it.
//! A dry run therefore takes two steps, and reports the second one.

use std::thread;

use burn::module::AutodiffModule;
use burn::tensor::Tensor;
use deepburn_comm::{CommError, SimulatedGroup, Statistics, panic_message};
use deepburn_config::Plan;
use deepburn_learner::{Engine, EngineError, initialize};
use deepburn_meta::{Meta, MetaDevice};
use deepburn_zero::{Group, ModuleOperations, Training};

use crate::memory::MemoryPeaks;

/// Optimizer steps of a dry run.
const STEPS: usize = 2;

/// What one rank needs to train.
#[derive(Debug, Clone)]
pub struct DryRun {
    /// The peaks while the model is sharded, before the first step.
    pub start: MemoryPeaks,
    /// The peaks of a training step.
    pub step: MemoryPeaks,
    /// The collectives of a training step.
    pub collectives: Statistics,
    /// The floating-point operations of a training step, by module.
    pub operations: Vec<ModuleOperations>,
}

/// The reason why a dry run did not complete.
#[derive(Debug, thiserror::Error)]
pub enum DryRunError {
    /// The engine returned an error, which a real run would return too.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The model cannot be run without data, or panics with data too.
    #[error("the model panicked in a dry run, where every tensor reads as zeros: {0}")]
    Model(String),
}

/// Runs training steps of rank 0 without data. The plan determines the number of ranks.
///
/// `build` creates the model, and `loss` computes the loss of one micro-batch of the size that is
/// to be forecast. Tensors have no values, so both should depend on shapes only: reading a tensor
/// returns zeros.
///
/// # Errors
///
/// Returns an error if the plan does not fit the model, or if the model panics.
pub fn dry_run<M: AutodiffModule<Training<Meta>>>(
    plan: &Plan,
    build: impl FnOnce(&MetaDevice) -> M + Send,
    loss: impl Fn(&M) -> Tensor<Training<Meta>, 1> + Send,
) -> Result<DryRun, DryRunError> {
    on_simulated_rank(plan.batch.world_size, move |group| {
        let model = build(&MetaDevice);
        let mut engine = initialize(model, plan, Group::new(group.clone()))?;
        let start = MemoryPeaks::of(engine.ledger());
        let micro_batches = plan.batch.gradient_accumulation_steps;
        let mut step = take_step(&mut engine, &group, micro_batches, &loss)?;
        for _ in 1..STEPS {
            step = take_step(&mut engine, &group, micro_batches, &loss)?;
        }
        Ok(DryRun { start, ..step })
    })
}

/// Calls `run` as rank 0 of a simulated group of `world_size` ranks, on a thread of its own.
///
/// Programs with several engines, or with training loops of their own, can be run in this way.
///
/// # Errors
///
/// Returns the error of `run`, or its panic.
pub fn on_simulated_rank<R: Send>(
    world_size: usize,
    run: impl FnOnce(SimulatedGroup) -> Result<R, DryRunError> + Send,
) -> Result<R, DryRunError> {
    let group = SimulatedGroup::new(0, world_size).map_err(EngineError::from)?;
    // A model is bound to its thread, and the caller's thread may have other models.
    let result = thread::scope(|scope| scope.spawn(|| run(group)).join());
    result.unwrap_or_else(|panic| {
        let message = match panic.downcast_ref::<CommError>() {
            Some(error) => error.to_string(),
            None => panic_message(&*panic),
        };
        Err(DryRunError::Model(message))
    })
}

/// Takes one optimizer step and reports it. The report has no figures of the start.
fn take_step<M: AutodiffModule<Training<Meta>>>(
    engine: &mut Engine<Meta, M>,
    group: &SimulatedGroup,
    micro_batches: usize,
    loss: &impl Fn(&M) -> Tensor<Training<Meta>, 1>,
) -> Result<DryRun, DryRunError> {
    engine.ledger().reset_peaks();
    engine.states().start_counting();
    let before = group.statistics();
    for _ in 0..micro_batches {
        let loss = engine.forward(loss)?;
        engine.backward(loss)?;
        engine.step()?;
    }
    Ok(DryRun {
        start: MemoryPeaks::default(),
        step: MemoryPeaks::of(engine.ledger()),
        collectives: group.statistics().since(&before),
        operations: engine.states().stop_counting(),
    })
}
