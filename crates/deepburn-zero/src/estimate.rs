//! Memory of one rank, predicted before anything is allocated.
//!
//! Main type: [`Estimate`], the bytes of model states (parameters, gradients, optimizer) and of the
//! buffers that ZeRO adds to them, for a list of parameter sizes, a plan and a number of ranks.
//! Activations depend on the batch: [`PassPlan`] computes them for an [`ActivationGraph`]. [`formula`]
//! is the published rule of 16 bytes an element, without padding; [`deepspeed`] has the estimators that
//! DeepSpeed users know, which count 2 bytes more.

mod activations;
mod buffers;
pub mod deepspeed;
mod element_bytes;
mod pass;
mod states;
mod table;
#[cfg(test)]
mod tests;

use deepburn_config::{OptimizerOffload, OptimizerPlan, Stage, ZeroPlan};

use crate::ledger::Tier;
use crate::optimizer::{direction_memory, state_arrays};
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

pub use crate::recompute::SHORT_SUM;

/// One parameter; tied parameters are listed once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParameterSize {
    /// Elements.
    pub numel: u64,
    /// How many arrays the optimizer keeps of it, its master aside. A frozen one has `None`, and no gradient either.
    pub moments: Option<usize>,
    /// What an update holds of its direction.
    pub direction: DirectionMemory,
    /// Whether ranks keep compression errors of it.
    pub keeps_errors: bool,
}

/// What the update of a parameter holds until its direction is final.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DirectionMemory {
    /// Nothing: each element is updated at once.
    None,
    /// The elements that a rank owns, until the norms of the whole are known, or ranks have agreed on it.
    Owned,
    /// The elements that a rank owns of all such parameters together, until ranks have agreed on them.
    AllOwned,
    /// All elements, which one rank orthogonalises.
    Whole,
}

impl ParameterSize {
    /// A parameter of `numel` elements that `optimizer` updates; without one it is frozen.
    pub fn new(numel: u64, optimizer: Option<&OptimizerPlan>) -> Self {
        let direction = optimizer.map_or(DirectionMemory::None, direction_memory);
        let keeps_errors = optimizer.is_some_and(OptimizerPlan::exchanges_momentum);
        let moments = optimizer.map(|plan| state_arrays(plan).len());
        Self { numel, moments, direction, keeps_errors }
    }

    /// Whether it has a gradient and optimizer states.
    pub fn is_trainable(&self) -> bool {
        self.moments.is_some()
    }
}

/// Bytes of the model states that one rank keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelStates {
    /// Whole parameters or shards of them, and the whole copies that stay at stage 3.
    pub parameters: u64,
    /// Accumulated gradients, unless they are offloaded.
    pub gradients: u64,
    /// Moments, momentum, accumulated squares and masters, unless they are offloaded.
    pub optimizer: u64,
}

impl ModelStates {
    /// Sum of the three.
    pub fn total(&self) -> u64 {
        self.parameters.saturating_add(self.gradients).saturating_add(self.optimizer)
    }
}

/// Temporary bytes on one rank besides the model states; zeros with one rank that keeps its states on
/// the device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Buffers {
    /// Gradients that are collected or on their way, at most.
    pub buckets: u64,
    /// Directions of the optimizer step and what is computed of them, at most; 0 for optimizers that depend on single
    /// elements alone. There are no buckets then.
    pub directions: u64,
    /// The largest parameter that is gathered: stage 3 cannot do with less.
    pub largest_gathered: u64,
    /// All gathered parameters together, at most (`stage3_max_live_parameters`).
    pub gathered_limit: u64,
}

/// What one rank needs; `Display` prints it as a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Estimate {
    /// What is sharded.
    pub stage: Stage,
    /// Number of ranks that share.
    pub ranks: u64,
    /// What stays.
    pub states: ModelStates,
    /// Bytes of the module's buffers ([`Buffer`](crate::Buffer)), which every rank keeps whole; 0
    /// unless [`with_module_buffers`](Self::with_module_buffers) said otherwise. The ledger counts
    /// them among the parameters.
    pub module_buffers: u64,
    /// What comes and goes.
    pub buffers: Buffers,
    /// Bytes at most while the model is sharded: parameters and optimizer states, and one parameter,
    /// the largest, whole in fp32. Ranks that are threads share that one.
    pub starting: u64,
    /// Model states that are offloaded to host memory, and compression errors, which are always there. On top of the
    /// other figures, which cover the device.
    pub host: u64,
    /// Model states that are offloaded to a disk, without what fills up blocks of it.
    pub disk: u64,
    /// The most that a training pass holds; `None` for a model whose activations are not known.
    pub pass: Option<PassPeak>,
}

impl Estimate {
    /// The estimate of a module whose running statistics, integer and bool parameters take `bytes`
    /// in all.
    pub fn with_module_buffers(self, bytes: u64) -> Self {
        Self { module_buffers: bytes, ..self }
    }

    /// The estimate of a model whose training pass peaks at `pass`.
    pub fn with_pass(self, pass: PassPeak) -> Self {
        Self { pass: Some(pass), ..self }
    }

    /// Bytes with every buffer at its limit, activations aside.
    pub fn peak(&self) -> u64 {
        self.states
            .total()
            .saturating_add(self.module_buffers)
            .saturating_add(self.buffers.buckets.max(self.buffers.directions))
            .saturating_add(self.buffers.gathered_limit)
    }
}

/// What a rank needs for these parameters, padding and persistent parameters included.
///
/// Every rank needs the same: shards are padded to one length, `ceil(numel / ranks)`.
///
/// # Panics
/// When `ranks` is 0.
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

    let on_device = shards.on(Tier::Device).saturating_add(gathering.persistent);
    let states = ModelStates {
        parameters: parameter_bytes(on_device),
        gradients: gradients.device,
        optimizer: optimizer.device,
    };
    let offloaded = optimizer.offloaded.saturating_add(gradients.offloaded);
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
fn starting_bytes(parameters: &[ParameterSize], states: ModelStates) -> u64 {
    let largest = parameters.iter().map(|parameter| parameter.numel).max().unwrap_or(0);
    let kept = states.parameters.saturating_add(states.optimizer);
    kept.saturating_add(largest.saturating_mul(FP32))
}

fn sum(values: impl Iterator<Item = u64>) -> u64 {
    values.fold(0, u64::saturating_add)
}
