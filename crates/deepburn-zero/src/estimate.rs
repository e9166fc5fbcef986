//! Predicts the memory of one rank before anything is allocated.
//!
//! Main type: [`Estimate`], the bytes of model states (parameters, gradients,
//! optimizer states) and of ZeRO's buffers, for a list of parameter sizes, a
//! plan and a number of ranks.
//!
//! The estimate is a sum over parameters, not a multiple of the total parameter
//! count, because the rules apply to each parameter: each shard is padded to
//! `ceil(numel / ranks)`, small parameters may be persistent, frozen parameters
//! have no gradient, and each optimizer keeps a different number of arrays. The
//! categories are the same as in the [`Ledger`](crate::Ledger), and tests check
//! that estimate and ledger are equal to the byte.
//!
//! The activation memory depends on the batch. [`PassPlan`] computes it from an
//! [`ActivationGraph`]. [`formula`] is the formula of the ZeRO paper (16 bytes
//! per element with Adam) without padding.
//!
//! ```text
//! estimate(parameters, zero, ranks, bytes)
//!    states.rs    permanent: parameters, gradients, optimizer states, by tier
//!    buffers.rs   temporary: buckets, directions, gathered parameters
//! PassPlan::peak(graph)
//!    pass.rs      a training pass: activations, gradients and gathered parameters together
//! ```

mod activations;
mod buffers;
mod element_bytes;
mod pass;
mod states;
mod table;
#[cfg(test)]
mod tests;

use deepburn_config::{OptimizerOffload, Stage, ZeroPlan};

use crate::ledger::Tier;
use crate::states::error_bytes;
use buffers::{Gathering, bucket_elements, direction_elements};
use element_bytes::FP32;
use states::{ParameterShards, StateBytes};

pub(crate) use activations::GraphOp;
pub use activations::{
    ActivationGraph, ActivationId, ActivationOp, BackwardOp, GradientTiming, KeptTensor,
    ReadParameter,
};
pub use element_bytes::{ElementBytes, formula};
pub(crate) use pass::{BucketedNumel, PassEvent};
pub use pass::{PassPeak, PassPlan};

pub use crate::optimizer::DirectionMemory;
pub use crate::parameter_size::ParameterSize;
pub use crate::recompute::SHORT_SUM;

/// The bytes of model states on one rank.
///
/// Only bytes on the device are included. For offloaded states see
/// [`Estimate::host`] and [`Estimate::disk`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelStateBytes {
    /// Parameters or their shards, and the persistent copies at stage 3.
    pub parameters: u64,
    /// Accumulated gradients on the device.
    pub gradients: u64,
    /// Optimizer states on the device: moments, momentum, accumulated squares
    /// and master weights.
    pub optimizer: u64,
}

impl ModelStateBytes {
    /// Returns the total of all model states.
    pub fn total(&self) -> u64 {
        self.parameters.saturating_add(self.gradients).saturating_add(self.optimizer)
    }
}

/// The bytes of temporary buffers on one rank. All are 0 on a single rank that
/// keeps its states on the device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Buffers {
    /// The peak of the gradient buckets, including buckets that are being
    /// reduced.
    pub buckets: u64,
    /// The peak of update directions and their temporary values during the
    /// optimizer step, when buckets are empty. 0 for element-wise optimizers.
    pub directions: u64,
    /// The size of the largest gathered parameter, the minimum that stage 3
    /// needs.
    pub largest_gathered: u64,
    /// The limit for all gathered parameters together
    /// (`stage3_max_live_parameters`).
    pub gathered_limit: u64,
}

/// The estimated memory of one rank. `Display` prints it as a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Estimate {
    /// The ZeRO stage.
    pub stage: Stage,
    /// The number of ranks.
    pub ranks: u64,
    /// Permanent model states.
    pub states: ModelStateBytes,
    /// The bytes of the module's buffers ([`Buffer`](crate::Buffer)). Every
    /// rank keeps a complete copy, which the ledger counts as parameters. 0
    /// unless [`with_module_buffers`](Self::with_module_buffers) was called.
    pub module_buffers: u64,
    /// Temporary buffers.
    pub buffers: Buffers,
    /// The peak in bytes while the model is sharded: parameters, optimizer
    /// states, and one complete fp32 copy of the largest parameter. Rank
    /// threads share this copy.
    pub starting: u64,
    /// The bytes of model states in host memory, including compression errors,
    /// which are always in host memory. No other field includes these bytes.
    pub host: u64,
    /// The bytes of model states on NVMe, without padding to blocks.
    pub disk: u64,
    /// The peak of a training pass; `None` if the activations of the model are
    /// unknown.
    pub pass: Option<PassPeak>,
}

impl Estimate {
    /// Sets the bytes of running statistics, integer and bool parameters.
    pub fn with_module_buffers(self, bytes: u64) -> Self {
        Self { module_buffers: bytes, ..self }
    }

    /// Sets the peak of a training pass.
    pub fn with_pass(self, pass: PassPeak) -> Self {
        Self { pass: Some(pass), ..self }
    }

    /// Returns the peak bytes on the device without activations, with every
    /// buffer at its limit.
    ///
    /// Only the larger of `buckets` and `directions` is counted, because
    /// buckets are empty during the optimizer step.
    pub fn peak(&self) -> u64 {
        self.states
            .total()
            .saturating_add(self.module_buffers)
            .saturating_add(self.buffers.buckets.max(self.buffers.directions))
            .saturating_add(self.buffers.gathered_limit)
    }
}

/// Estimates the memory of a rank for these parameters, including padding and
/// persistent parameters. The estimate is the same for every rank, because
/// shards are padded to the same length.
///
/// # Panics
///
/// Panics if `ranks` is 0.
pub fn estimate(
    parameters: &[ParameterSize],
    zero: &ZeroPlan,
    ranks: u64,
    bytes: ElementBytes,
) -> Estimate {
    let shards = ParameterShards::new(parameters, zero, ranks);
    let gathering = Gathering::new(parameters, &shards.tiers, ranks, zero);
    let shards_of = |is_sharded| if is_sharded { ranks } else { 1 };
    let gradients =
        StateBytes::new(parameters, zero, shards_of(zero.shards_gradients()), |_| bytes.gradient);
    let optimizer =
        StateBytes::new(parameters, zero, shards_of(zero.stage.shards_optimizer()), |moments| {
            bytes.master.saturating_add((moments as u64).saturating_mul(FP32))
        });
    let parameter_bytes = |elements: u64| elements.saturating_mul(bytes.parameter);

    // A rank keeps a persistent copy in addition to the shard, so both are
    // counted.
    let on_device = shards.on(Tier::Device).saturating_add(gathering.persistent);
    let states = ModelStateBytes {
        parameters: parameter_bytes(on_device),
        gradients: gradients.device,
        optimizer: optimizer.device,
    };
    let offloaded = optimizer.offloaded.saturating_add(gradients.offloaded);
    // Gradient sums are offloaded together with the optimizer states.
    let (host, disk) = match zero.optimizer_states {
        OptimizerOffload::Nvme(_) => (0, offloaded),
        OptimizerOffload::Device | OptimizerOffload::Host { .. } => (offloaded, 0),
    };
    let buffers = Buffers {
        buckets: bucket_elements(parameters, zero, ranks).saturating_mul(bytes.gradient),
        directions: direction_elements(parameters, zero, ranks).saturating_mul(FP32),
        largest_gathered: parameter_bytes(gathering.largest),
        gathered_limit: parameter_bytes(gathering.limit),
    };
    let errors = sum(parameters
        .iter()
        .filter(|parameter| parameter.keeps_errors)
        .map(|parameter| error_bytes(parameter.numel, ranks)));
    let host = host.saturating_add(errors);
    Estimate {
        stage: zero.stage,
        ranks,
        states,
        module_buffers: 0,
        buffers,
        starting: starting_bytes(parameters, states),
        host: host.saturating_add(parameter_bytes(shards.on(Tier::Host))),
        disk: disk.saturating_add(parameter_bytes(shards.on(Tier::Disk))),
        pass: None,
    }
}

/// Returns the peak bytes while a model is sharded. The largest parameter then
/// exists as a complete fp32 copy, and there are no gradients yet.
fn starting_bytes(parameters: &[ParameterSize], states: ModelStateBytes) -> u64 {
    let largest = parameters.iter().map(|parameter| parameter.numel).max().unwrap_or(0);
    let kept = states.parameters.saturating_add(states.optimizer);
    kept.saturating_add(largest.saturating_mul(FP32))
}

/// Returns the saturating sum. Sizes may come from a configuration file, so the
/// sum may exceed `u64`.
fn sum(values: impl Iterator<Item = u64>) -> u64 {
    values.fold(0, u64::saturating_add)
}
