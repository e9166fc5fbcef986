//! The tiers of a rank's offloaded model states, and the size of their file.
//!
//! Main types: `StateTiers` and `ShardTiers`, which assign a tier to each array. Both the run and
//! the check of free disk space call them with all parameters in module order, so both use the same
//! rule.
//!
//! ```text
//!                     device          host memory        NVMe
//! offload_optimizer   first params    the rest (ratio)   or all of it
//! gradient sums       with the states of the same parameter
//! offload_param       -               all, or the first  the rest
//!                                     `max_in_cpu`
//! ```

use deepburn_comm::Partition;
use deepburn_config::{OptimizerOffload, ParameterOffload, Precision, PrecisionPlan, ZeroPlan};

use crate::ledger::Tier;
use crate::offload::{CHUNK, ChunkLayout};
use crate::sharding::ParameterSize;

/// Assigns a tier to the optimizer states and gradient sum of each trainable parameter, in module
/// order.
#[derive(Debug, Clone)]
pub(crate) struct StateTiers {
    /// The tier of offloaded states; the device without offload.
    offloaded: Tier,
    /// The number of elements whose states may stay on the device.
    kept: usize,
    /// The number of elements of the preceding trainable parameters.
    before: usize,
}

impl StateTiers {
    /// Returns the tiers of a model with these parameters.
    ///
    /// With a `ratio` below 1, the states of the first parameters stay on the device, up to
    /// `1 - ratio` of all elements. All parameters from the first one that does not fit are
    /// offloaded. DeepSpeed's `stage3.py` applies the same rule to sub-groups of `sub_group_size`
    /// elements, with `i >= int((1 - ratio) * count)`. Elements are counted without padding, so the
    /// result does not depend on the number of ranks.
    pub(crate) fn new(parameters: &[ParameterSize], zero: &ZeroPlan) -> Self {
        let trainable = parameters.iter().filter(|parameter| parameter.is_trainable());
        let total = trainable.fold(0, |sum: u64, parameter| sum.saturating_add(parameter.numel));
        let (offloaded, ratio) = match zero.optimizer_states {
            OptimizerOffload::Device => (Tier::Device, 1.0),
            OptimizerOffload::Host { ratio, .. } => (Tier::Host, ratio),
            OptimizerOffload::Nvme(_) => (Tier::Disk, 1.0),
        };
        // In floating point, `(1 - ratio) * total` falls below an integer more often.
        let kept = total as f64 - (ratio * total as f64).ceil();
        Self { offloaded, kept: kept as usize, before: 0 }
    }

    /// Returns the tier for the next trainable parameter, which has `numel` elements.
    pub(crate) fn next(&mut self, numel: usize) -> Tier {
        self.before = self.before.saturating_add(numel);
        if self.before > self.kept { self.offloaded } else { Tier::Device }
    }
}

/// Assigns a tier to the shard of each parameter, in module order.
#[derive(Debug, Clone)]
pub(crate) struct ShardTiers {
    /// The offload target of the plan; the device below stage 3.
    offload: ParameterOffload,
    /// The number of elements of the preceding shards.
    before: usize,
}

impl ShardTiers {
    /// Returns the tiers of a model under `zero`.
    pub(crate) fn new(zero: &ZeroPlan) -> Self {
        let offload = match zero.stage.shards_parameters() {
            true => zero.parameter_shards,
            false => ParameterOffload::Device,
        };
        Self { offload, before: 0 }
    }

    /// Returns the tier of the next shard of `len` elements, including padding.
    ///
    /// With NVMe, the first `max_in_cpu` elements stay in host memory. All preceding shards count,
    /// even ones that did not fit, as in DeepSpeed (`_create_fp16_partitions_with_defragmentation`
    /// of `stage3.py`). DeepSpeed counts groups of `sub_group_size` elements; here each shard is
    /// counted separately.
    pub(crate) fn next(&mut self, len: usize) -> Tier {
        self.before = self.before.saturating_add(len);
        match self.offload {
            ParameterOffload::Device => Tier::Device,
            ParameterOffload::Host => Tier::Host,
            ParameterOffload::Nvme { max_in_cpu, .. } if self.before > max_in_cpu => Tier::Disk,
            ParameterOffload::Nvme { device_is_host: true, .. } => Tier::Device,
            ParameterOffload::Nvme { device_is_host: false, .. } => Tier::Host,
        }
    }
}

/// Returns the largest element size of an accumulated gradient in bytes. With one micro-batch, the
/// gradient may be in the communication type.
pub(crate) fn gradient_bytes(precision: &PrecisionPlan) -> usize {
    precision.communication.bytes().max(precision.accumulation.bytes())
}

/// Returns the size in bytes of the file in which each rank stores its offloaded states; 0 without
/// NVMe offload.
///
/// The file contains shards on NVMe, masters, moments and accumulated gradients. Each array is
/// padded to the alignment of direct I/O. All ranks have files of the same size, because shards are
/// padded to the same length.
///
/// # Panics
/// Panics if `ranks` is 0.
pub fn swap_bytes(
    parameters: &[ParameterSize],
    zero: &ZeroPlan,
    ranks: usize,
    precision: &PrecisionPlan,
) -> u64 {
    let OptimizerOffload::Nvme(nvme) = &zero.optimizer_states else { return 0 };
    let masters = usize::from(precision.compute != Precision::Fp32);
    let chunk = CHUNK.min(nvme.sub_group_size);
    // The same rule as while sharding. It depends on the order, so all parameters are passed to it.
    let mut tiers = ShardTiers::new(zero);
    let of_one = |parameter: &ParameterSize| {
        let shards = if zero.stage.shards_optimizer() { ranks } else { 1 };
        let len = Partition::new(parameter.numel as usize, shards).shard_len();
        let layout = |element_bytes| ChunkLayout { len, chunk, element_bytes };
        let values = match tiers.next(len) {
            Tier::Disk => layout(precision.compute.bytes()).file_bytes(),
            Tier::Device | Tier::Host => 0,
        };
        let Some(moments) = parameter.moments else { return values };
        let arrays = (moments + masters) as u64;
        let states = layout(size_of::<f32>()).file_bytes().saturating_mul(arrays);
        let gradient = layout(gradient_bytes(precision)).file_bytes();
        values.saturating_add(states).saturating_add(gradient)
    };
    parameters.iter().map(of_one).fold(0, u64::saturating_add)
}
