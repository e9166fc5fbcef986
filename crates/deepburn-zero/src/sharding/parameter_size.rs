//! The properties of a parameter that determine its memory.

use deepburn_config::OptimizerPlan;

use crate::optimizer::state_count;

/// The size of a parameter. Tied parameters are listed once.
///
/// It has no name and no shape, because memory depends only on the number of elements and on the
/// optimizer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParameterSize {
    /// The number of elements.
    pub numel: u64,
    /// The number of optimizer arrays without the master; `None` for a frozen parameter, which has
    /// no gradient either.
    pub moments: Option<usize>,
}

impl ParameterSize {
    /// Returns the size of a parameter that `optimizer` updates. `None` means that the parameter is
    /// frozen.
    pub fn new(numel: u64, optimizer: Option<&OptimizerPlan>) -> Self {
        let moments = optimizer.map(state_count);
        Self { numel, moments }
    }

    /// Returns true if the parameter has a gradient and optimizer states.
    pub fn is_trainable(&self) -> bool {
        self.moments.is_some()
    }
}
