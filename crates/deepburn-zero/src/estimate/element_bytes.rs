//! Bytes of model states per element of a parameter.
//!
//! Main type: [`ElementBytes`]. [`formula`] is the published rule, without padding.

use deepburn_config::{OptimizerPlan, Precision, PrecisionPlan, Stage};

use super::ModelStateBytes;
use crate::optimizer::state_arrays;

/// The size of an fp32 element in bytes.
pub(super) const FP32: u64 = 4;

/// The bytes of each model state per element of a parameter. With Adam the sum
/// is 16, both in fp32 and in mixed precision with 16-bit gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ElementBytes {
    /// The parameter in the type of forward and backward.
    pub parameter: u64,
    /// The accumulated gradient.
    pub gradient: u64,
    /// The optimizer states, including the master. Muon's value is for a matrix.
    pub optimizer: u64,
    /// The fp32 master of a 16-bit parameter.
    pub master: u64,
}

impl ElementBytes {
    /// Returns the bytes for these element types. 16-bit parameters have fp32
    /// masters. With fp32 accumulation, the default, mixed precision takes 18
    /// bytes. It takes 16 if a step has a single micro-batch, whose gradient
    /// stays in the communication type.
    pub fn new(optimizer: &OptimizerPlan, precision: &PrecisionPlan, micro_batches: usize) -> Self {
        let master = if precision.compute == Precision::Fp32 { 0 } else { FP32 };
        let gradient = match micro_batches {
            1 => precision.accumulation.bytes().min(precision.communication.bytes()),
            _ => precision.accumulation.bytes(),
        };
        Self {
            parameter: precision.compute.bytes() as u64,
            gradient: gradient as u64,
            optimizer: master + state_arrays(optimizer).len() as u64 * FP32,
            master,
        }
    }
}

/// Applies the formula of Rajbhandari et al. 2020: stage 1 divides the
/// optimizer's bytes by the number of ranks, stage 2 also the gradients', stage
/// 3 all. Padding and persistent parameters are not included.
///
/// # Panics
///
/// Panics if `ranks` is 0.
pub fn formula(psi: u64, stage: Stage, ranks: u64, bytes: ElementBytes) -> ModelStateBytes {
    let share = |per_element, sharded| {
        psi.saturating_mul(per_element).div_ceil(if sharded { ranks } else { 1 })
    };
    ModelStateBytes {
        parameters: share(bytes.parameter, stage.shards_parameters()),
        gradients: share(bytes.gradient, stage.shards_gradients()),
        optimizer: share(bytes.optimizer, stage.shards_optimizer()),
    }
}
