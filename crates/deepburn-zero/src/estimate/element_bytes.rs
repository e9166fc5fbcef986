//! Bytes of model states per element of a parameter.
//!
//! Main type: [`ElementBytes`]. [`formula`] is the published rule, without padding.

use deepburn_config::{OptimizerPlan, Precision, PrecisionPlan, Stage};

use super::ModelStates;
use crate::optimizer::state_arrays;

/// Bytes of an fp32 element.
pub(super) const FP32: u64 = 4;

/// Bytes of each model state per element of a parameter; with Adam 16 in all in fp32, and in mixed
/// precision with 16-bit gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ElementBytes {
    /// The parameter that forward and backward use.
    pub parameter: u64,
    /// The gradient as it is accumulated.
    pub gradient: u64,
    /// The optimizer states, including the master. Muon's value is for a matrix.
    pub optimizer: u64,
    /// The fp32 copy of a parameter that ops use in 16 bits.
    pub master: u64,
}

impl ElementBytes {
    /// What training in these types takes: 16-bit parameters have fp32 masters, which the
    /// optimizer keeps. With fp32 accumulation, the default, mixed precision takes 18 bytes, and
    /// 16 where a step has one micro-batch, whose gradient stays in the type it travels in.
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

/// The formula of Rajbhandari et al. 2020: stage 1 divides the optimizer's bytes by the number of
/// ranks, stage 2 the gradients' too, stage 3 all. Padding and persistent parameters are not in it.
///
/// # Panics
/// When `ranks` is 0.
pub fn formula(psi: u64, stage: Stage, ranks: u64, bytes: ElementBytes) -> ModelStates {
    let share = |per_element, sharded| {
        psi.saturating_mul(per_element).div_ceil(if sharded { ranks } else { 1 })
    };
    ModelStates {
        parameters: share(bytes.parameter, stage.shards_parameters()),
        gradients: share(bytes.gradient, stage.shards_gradients()),
        optimizer: share(bytes.optimizer, stage.shards_optimizer()),
    }
}
