//! Bytes of model states per element of a parameter.
//!
//! Main type: [`ElementBytes`]. [`formula`] is the formula of the ZeRO paper, without padding.

use deepburn_config::{OptimizerPlan, Precision, PrecisionPlan, Stage};

use super::ModelStateBytes;
use crate::optimizer::state_arrays;

/// The size of an fp32 element in bytes.
pub(super) const FP32: u64 = 4;

/// The bytes of each model state per parameter element. With Adam the sum of `parameter`, `gradient`
/// and `optimizer` is 16, both in fp32 and in mixed precision with 16-bit gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ElementBytes {
    /// The parameter in the compute type, which forward and backward use.
    pub parameter: u64,
    /// The accumulated gradient.
    pub gradient: u64,
    /// The optimizer states, including the master weight. With Muon, the states of a matrix.
    pub optimizer: u64,
    /// The fp32 master weight of a 16-bit parameter; 0 with fp32 parameters.
    pub master: u64,
}

impl ElementBytes {
    /// Returns the bytes for these element types. 16-bit parameters have fp32 master weights. With
    /// Adam and fp32 accumulation, the default, mixed precision takes 18 bytes in total. It takes
    /// 16 bytes if a step has a single micro-batch, because its gradient stays in the communication
    /// type.
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

/// Returns the bytes of the model states by the formula of Rajbhandari et al. 2020 (*ZeRO: Memory
/// Optimizations Toward Training Trillion Parameter Models*) for `psi` parameter elements. Stage 1
/// divides the optimizer states by the number of ranks, stage 2 also the gradients, and stage 3
/// also the parameters. Padding and persistent parameters are not included.
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
