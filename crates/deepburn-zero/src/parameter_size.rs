//! The properties of a parameter that determine its memory.

use deepburn_config::OptimizerPlan;

use crate::optimizer::{DirectionMemory, direction_memory, state_arrays};

/// The size of a parameter. Tied parameters are listed once.
///
/// It has no name and no shape, because memory depends only on the number of
/// elements and on the optimizer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParameterSize {
    /// The number of elements.
    pub numel: u64,
    /// The number of optimizer arrays without the master; `None` for a frozen
    /// parameter, which has no gradient either.
    pub moments: Option<usize>,
    /// The memory for the update direction.
    pub direction: DirectionMemory,
    /// Whether ranks keep compression errors for it.
    pub keeps_errors: bool,
}

impl ParameterSize {
    /// Returns the size of a parameter that `optimizer` updates. `None` means
    /// that the parameter is frozen.
    pub fn new(numel: u64, optimizer: Option<&OptimizerPlan>) -> Self {
        let direction = optimizer.map_or(DirectionMemory::None, direction_memory);
        let keeps_errors = optimizer.is_some_and(OptimizerPlan::exchanges_momentum);
        let moments = optimizer.map(|plan| state_arrays(plan).len());
        Self { numel, moments, direction, keeps_errors }
    }

    /// Returns true if the parameter has a gradient and optimizer states.
    pub fn is_trainable(&self) -> bool {
        self.moments.is_some()
    }
}
