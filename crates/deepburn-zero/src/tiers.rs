//! The tiers of a rank's offloaded model states, and the size of their file.
//!
//! Main types: `Parking`, the store of offloaded arrays, and `StateTiers` and
//! `ShardTiers`, which assign a tier to each array. They are called with all
//! parameters in module order, both by a run and by the estimate, so the
//! forecast of memory follows the same rule.
//!
//! ```text
//!                     device          host memory        NVMe
//! offload_optimizer   first params    the rest (ratio)   or all of it
//! gradient sums       with the states of the same parameter
//! offload_param       -               all, or the first  the rest
//!                                     `max_in_cpu`
//! ```

use burn_backend::DType;
use deepburn_comm::Partition;
use deepburn_config::{
    NvmePlan, OptimizerOffload, ParameterOffload, Precision, PrecisionPlan, SwapFilePlan, ZeroPlan,
};
use deepburn_nvme::{IoPolicy, SwapError, SwapFile};

use std::sync::Arc;

use crate::error::ZeroError;
use crate::estimate::ParameterSize;
use crate::ledger::{Category, Ledger, Tier};
use crate::parked::{PIECE, ParkedArray, PieceLayout, PipelinePolicy, Store};
use crate::precision::element_type;
use crate::reduce::SumHome;

/// The store of a rank's offloaded arrays and the pipeline policy of its steps.
#[derive(Debug)]
pub(crate) struct Parking {
    /// The store of optimizer states and gradient sums, and of shards on NVMe.
    pub(crate) store: Store,
    /// Which transfers of a step overlap with its updates.
    pub(crate) policy: PipelinePolicy,
    /// The largest number of elements in a piece.
    piece: usize,
    /// The largest size of an element of an accumulated gradient, in bytes.
    gradient_bytes: usize,
}

impl Parking {
    /// Creates the store and, if the plan needs one, the file of this rank.
    /// `None` if everything is on the device.
    ///
    /// # Errors
    ///
    /// Returns an error if the folder cannot be used or has too little space.
    pub(crate) fn new(
        zero: &ZeroPlan,
        precision: &PrecisionPlan,
        bytes: u64,
    ) -> Result<Option<Self>, ZeroError> {
        let offload = &zero.optimizer_states;
        // Shards go to the store of the optimizer states, so a plan without one
        // cannot offload them.
        let needed = match zero.parameter_shards {
            ParameterOffload::Device => None,
            _ if !zero.stage.shards_parameters() => Some("stage 3"),
            ParameterOffload::Nvme { .. } if !matches!(offload, OptimizerOffload::Nvme(_)) => {
                Some("optimizer states that are offloaded to NVMe")
            }
            _ if *offload == OptimizerOffload::Device => Some("offloaded optimizer states"),
            _ => None,
        };
        if let Some(needed) = needed {
            return Err(ZeroError::ParameterOffload { needed });
        }
        let (store, reads_ahead, writes_behind) = match offload {
            OptimizerOffload::Device => return Ok(None),
            OptimizerOffload::Host { .. } => (Store::Host, false, false),
            OptimizerOffload::Nvme(nvme) => {
                let store = Store::Disk(Arc::new(create_file(nvme, bytes)?));
                (store, nvme.pipeline_read, nvme.pipeline_write)
            }
        };
        Ok(Some(Self {
            store,
            policy: PipelinePolicy { reads_ahead, writes_behind },
            piece: PIECE.min(offload.sub_group_size()),
            gradient_bytes: gradient_bytes(precision),
        }))
    }

    /// Returns the layout of an array of `len` elements of at most
    /// `element_bytes` bytes.
    ///
    /// Steps read and write one piece at a time.
    pub(crate) fn layout(&self, len: usize, element_bytes: usize) -> PieceLayout {
        PieceLayout { len, piece: self.piece, element_bytes }
    }

    /// Allocates the gradient sum of a parameter of which this rank updates
    /// `len` elements.
    ///
    /// # Errors
    ///
    /// Returns an error if the file is full.
    pub(crate) fn sum_home(&self, len: usize, ledger: &Ledger) -> Result<SumHome, SwapError> {
        let layout = self.layout(len, self.gradient_bytes);
        let array = ParkedArray::zeros(&self.store, layout, ledger, Category::Gradients)?;
        Ok(SumHome::Parked(array))
    }

    /// Allocates the shard of a parameter on `tier`, with `len` elements of
    /// type `dtype`.
    ///
    /// # Errors
    ///
    /// Returns an error if the file is full.
    pub(crate) fn shard(
        &self,
        tier: Tier,
        (len, dtype): (usize, DType),
        ledger: &Ledger,
    ) -> Result<Arc<ParkedArray>, SwapError> {
        let store = if tier == Tier::Host { &Store::Host } else { &self.store };
        let layout = self.layout(len, dtype.size());
        ParkedArray::zeros(store, layout, ledger, Category::Parameters)
    }

    /// Returns the store of offloaded arrays.
    pub(crate) fn store(&self) -> &Store {
        &self.store
    }
}

/// Assigns a tier to the optimizer states and gradient sum of each trainable
/// parameter, in module order.
#[derive(Debug, Clone)]
pub(crate) struct StateTiers {
    /// The tier of offloaded states; the device if the plan offloads nothing.
    offloaded: Tier,
    /// The number of elements whose states may stay on the device.
    kept: usize,
    /// The number of elements of the preceding trainable parameters.
    before: usize,
}

impl StateTiers {
    /// Returns the tiers of a model with these parameters.
    ///
    /// With a `ratio` below 1 the states of the first parameters stay on the
    /// device, up to the first one with which they would exceed `1 - ratio` of
    /// all elements. DeepSpeed's `stage3.py` counts sub-groups of
    /// `sub_group_size` elements in the same way, with `i >= int((1 - ratio) *
    /// count)`. Elements are counted without padding, so the result does not
    /// depend on the number of ranks.
    pub(crate) fn new(parameters: &[ParameterSize], zero: &ZeroPlan) -> Self {
        let trainable = parameters.iter().filter(|parameter| parameter.is_trainable());
        let total = trainable.fold(0, |sum: u64, parameter| sum.saturating_add(parameter.numel));
        let (offloaded, ratio) = match zero.optimizer_states {
            OptimizerOffload::Device => (Tier::Device, 1.0),
            OptimizerOffload::Host { ratio, .. } => (Tier::Host, ratio),
            OptimizerOffload::Nvme(_) => (Tier::Disk, 1.0),
        };
        // `(1 - ratio) * total` would be rounded below an integer more often.
        let kept = total as f64 - (ratio * total as f64).ceil();
        Self { offloaded, kept: kept as usize, before: 0 }
    }

    /// Returns the tier for the next trainable parameter, which has `numel`
    /// elements.
    pub(crate) fn next(&mut self, numel: usize) -> Tier {
        self.before = self.before.saturating_add(numel);
        if self.before > self.kept { self.offloaded } else { Tier::Device }
    }
}

/// Assigns a tier to the shard of each parameter, in module order.
#[derive(Debug, Clone)]
pub(crate) struct ShardTiers {
    /// The plan's offload; the device below stage 3.
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
    /// With NVMe the first `max_in_cpu` elements stay in host memory. As in
    /// DeepSpeed (`_create_fp16_partitions_with_defragmentation` of
    /// `stage3.py`) all preceding shards count, even those that did not fit.
    /// Here they are counted one by one, in DeepSpeed in groups of
    /// `sub_group_size`.
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

/// Creates the file for the states of this rank.
///
/// It is preallocated with `bytes` bytes and has no name, so a full disk is
/// found now and a killed run leaves nothing behind.
///
/// # Errors
///
/// Returns an error if the folder cannot be used or has too little space.
fn create_file(nvme: &NvmePlan, bytes: u64) -> Result<SwapFile, SwapError> {
    SwapFile::create(&nvme.file.folder, bytes, &io_policy(&nvme.file))
}

/// Returns the I/O policy of a file.
pub(crate) fn io_policy(file: &SwapFilePlan) -> IoPolicy {
    let SwapFilePlan { block_size, queue_depth, .. } = *file;
    IoPolicy { block_size, queue_depth, ..IoPolicy::default() }
}

/// Returns the largest size of a gradient element in bytes. With one
/// micro-batch it may be in the communication type.
fn gradient_bytes(precision: &PrecisionPlan) -> usize {
    let types = [precision.communication, precision.accumulation].map(element_type);
    types.map(|dtype| DType::from(dtype).size()).into_iter().fold(0, usize::max)
}

/// Returns the size of the file in which each rank keeps its part of the states
/// of `parameters`, in bytes; 0 without NVMe offload.
///
/// # Panics
///
/// Panics if `ranks` is 0.
///
/// The sum covers shards on NVMe, masters, moments and gradient sums, each
/// array padded to whole blocks of direct I/O. Every rank's file has the same
/// size, because shards are padded to the same length.
pub fn swap_bytes(
    parameters: &[ParameterSize],
    zero: &ZeroPlan,
    ranks: usize,
    precision: &PrecisionPlan,
) -> u64 {
    let OptimizerOffload::Nvme(nvme) = &zero.optimizer_states else { return 0 };
    let masters = usize::from(precision.compute != Precision::Fp32);
    let piece = PIECE.min(nvme.sub_group_size);
    let mut tiers = ShardTiers::new(zero);
    let of_one = |parameter: &ParameterSize| {
        let shards = if zero.stage.shards_optimizer() { ranks } else { 1 };
        let len = Partition::new(parameter.numel as usize, shards).shard_len();
        let layout = |element_bytes| PieceLayout { len, piece, element_bytes };
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
