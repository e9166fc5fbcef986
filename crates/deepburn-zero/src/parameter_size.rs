//! The size of a parameter, as far as memory depends on it.

use deepburn_config::OptimizerPlan;

use crate::optimizer::{DirectionMemory, direction_memory, state_arrays};

/// The size of a parameter. Tied parameters are listed once.
///
/// It has no name and no shape, because memory depends on the number of
/// elements and the optimizer alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParameterSize {
    /// The number of elements.
    pub numel: u64,
    /// The number of optimizer arrays without the master; `None` for a frozen
    /// parameter, which has no gradient either.
    pub moments: Option<usize>,
    /// The part of the update direction that an update holds.
    pub direction: DirectionMemory,
    /// Whether ranks keep compression errors for it.
    pub keeps_errors: bool,
}

impl ParameterSize {
    /// Returns the size of a parameter that `optimizer` updates; without an
    /// optimizer it is frozen.
    pub fn new(numel: u64, optimizer: Option<&OptimizerPlan>) -> Self {
        let direction = optimizer.map_or(DirectionMemory::None, direction_memory);
        let keeps_errors = optimizer.is_some_and(OptimizerPlan::exchanges_momentum);
        let moments = optimizer.map(|plan| state_arrays(plan).len());
        Self { numel, moments, direction, keeps_errors }
    }

    /// Returns true if it has a gradient and optimizer states.
    pub fn is_trainable(&self) -> bool {
        self.moments.is_some()
    }
}
