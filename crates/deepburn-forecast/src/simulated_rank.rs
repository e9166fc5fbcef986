//! A rank of a simulated group, on a thread of its own.

use std::thread;

use deepburn_comm::{CommError, SimulatedGroup, panic_message};
use deepburn_learner::{BoxError, EngineError};

/// The reason why a dry run did not complete.
#[derive(Debug, thiserror::Error)]
pub enum ForecastError {
    /// The engine returned an error, which a real run would return too.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The model cannot be divided into the pipeline stages of the plan.
    #[error("pipeline stages: {0}")]
    Cut(#[from] deepburn_pipeline::CutError),
    /// The model could not be built, or its loss could not be computed.
    #[error(transparent)]
    Loss(BoxError),
    /// The model cannot be run without data, or panics with data too.
    #[error("the model panicked without data, where every tensor reads as zeros: {0}")]
    Model(String),
}

/// Calls `run` as rank `rank` of a simulated group of `world_size` ranks, on a thread of its own.
///
/// Programs with several engines, or with training loops of their own, can be run in this way.
///
/// # Errors
/// Returns the error of `run`, or its panic.
pub fn on_simulated_rank<R: Send>(
    rank: usize,
    world_size: usize,
    run: impl FnOnce(SimulatedGroup) -> Result<R, ForecastError> + Send,
) -> Result<R, ForecastError> {
    let group = SimulatedGroup::new(rank, world_size).map_err(EngineError::from)?;
    // A model is bound to its thread, and the caller's thread may have other models.
    let result = thread::scope(|scope| scope.spawn(|| run(group)).join());
    result.unwrap_or_else(|panic| {
        let message = match panic.downcast_ref::<CommError>() {
            Some(error) => error.to_string(),
            None => panic_message(&*panic),
        };
        Err(ForecastError::Model(message))
    })
}
