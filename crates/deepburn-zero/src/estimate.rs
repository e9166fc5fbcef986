//! Predicts the memory of one rank before anything is allocated.
//!
//! Main type: [`Estimate`], the bytes of model states (parameters, gradients,
//! optimizer states) and of ZeRO's own buffers, for a list of parameter sizes,
//! a plan and a number of ranks.
//!
//! The prediction sums over parameters instead of multiplying their total,
//! because rounding happens per parameter: each shard is padded to `ceil(numel
//! / ranks)`, small parameters may be persistent, frozen ones have no gradient,
//! and each optimizer keeps a different number of arrays. It counts the same
//! categories as the [`Ledger`](crate::Ledger), and tests compare both to the
//! byte.
//!
//! Activations depend on the batch, and [`PassPlan`] computes them from an
//! [`ActivationGraph`]. [`formula`] is the published rule of 16 bytes per
//! element without padding.
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
/// Only bytes on the device count. Offloaded states are in [`Estimate::host`]
/// and [`Estimate::disk`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelStateBytes {
    /// Parameters or their shards, and the persistent copies at stage 3.
    pub parameters: u64,
    /// Accumulated gradients on the device.
    pub gradients: u64,
    /// Moments, momentum, accumulated squares and masters on the device.
    pub optimizer: u64,
}

impl ModelStateBytes {
    /// Returns the sum.
    pub fn total(&self) -> u64 {
        self.parameters.saturating_add(self.gradients).saturating_add(self.optimizer)
    }
}

/// Temporary bytes on one rank besides the model states. All are 0 on a single
/// rank that keeps its states on the device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Buffers {
    /// The peak of gradients in buckets and in reduction.
    pub buckets: u64,
    /// The peak of update directions and their temporary values; 0 for
    /// element-wise optimizers. Buckets are empty at that time.
    pub directions: u64,
    /// The largest gathered parameter, which stage 3 always needs.
    pub largest_gathered: u64,
    /// The limit for all gathered parameters together
    /// (`stage3_max_live_parameters`).
    pub gathered_limit: u64,
}

/// The memory of one rank. `Display` prints it as a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Estimate {
    /// The ZeRO stage.
    pub stage: Stage,
    /// The number of ranks.
    pub ranks: u64,
    /// Permanent model states.
    pub states: ModelStateBytes,
    /// The bytes of the module's buffers ([`Buffer`](crate::Buffer)), of which
    /// every rank keeps a complete copy. 0 unless
    /// [`with_module_buffers`](Self::with_module_buffers) was called. The
    /// ledger counts them as parameters.
    pub module_buffers: u64,
    /// Temporary buffers.
    pub buffers: Buffers,
    /// The peak while the model is sharded: parameters, optimizer states, and
    /// the largest parameter complete in fp32. Rank threads share that
    /// parameter.
    pub starting: u64,
    /// Model states in host memory, including compression errors, which are
    /// always there. Not part of the other numbers, which cover the device.
    pub host: u64,
    /// Model states on NVMe, without padding to blocks.
    pub disk: u64,
    /// The peak of a training pass; `None` if the activations of the model are
    /// not known.
    pub pass: Option<PassPeak>,
}

impl Estimate {
    /// Adds the size of running statistics, integer and bool parameters.
    pub fn with_module_buffers(self, bytes: u64) -> Self {
        Self { module_buffers: bytes, ..self }
    }

    /// Adds the peak of a training pass.
    pub fn with_pass(self, pass: PassPeak) -> Self {
        Self { pass: Some(pass), ..self }
    }

    /// Returns the bytes with every buffer at its limit, without activations.
    ///
    /// Buckets and directions share the larger of both values, because buckets
    /// are empty during the optimizer step.
    pub fn peak(&self) -> u64 {
        self.states
            .total()
            .saturating_add(self.module_buffers)
            .saturating_add(self.buffers.buckets.max(self.buffers.directions))
            .saturating_add(self.buffers.gathered_limit)
    }
}

/// Predicts the memory of a rank for these parameters, including padding and
/// persistent parameters. Every rank needs the same, because shards are padded
/// to the same length.
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

    // A persistent copy exists beside the shard, so both count.
    let on_device = shards.on(Tier::Device).saturating_add(gathering.persistent);
    let states = ModelStateBytes {
        parameters: parameter_bytes(on_device),
        gradients: gradients.device,
        optimizer: optimizer.device,
    };
    let offloaded = optimizer.offloaded.saturating_add(gradients.offloaded);
    // Gradient sums follow the optimizer states.
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

/// Returns the peak bytes while a model is sharded: its largest parameter is whole in fp32, and there are no gradients
/// yet.
fn starting_bytes(parameters: &[ParameterSize], states: ModelStateBytes) -> u64 {
    let largest = parameters.iter().map(|parameter| parameter.numel).max().unwrap_or(0);
    let kept = states.parameters.saturating_add(states.optimizer);
    kept.saturating_add(largest.saturating_mul(FP32))
}

/// Adds up without overflow. Sizes may come from a configuration file.
fn sum(values: impl Iterator<Item = u64>) -> u64 {
    values.fold(0, u64::saturating_add)
}
