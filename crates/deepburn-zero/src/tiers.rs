//! Where a rank keeps its model states outside of the device, and how many bytes of a file they need.

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

/// Where a rank parks arrays, and how its steps come at them.
#[derive(Debug)]
pub(crate) struct Parking {
    pub(crate) store: Store,
    pub(crate) policy: PipelinePolicy,
    /// Most elements of a piece.
    piece: usize,
    /// Bytes of an element of an accumulated gradient, at most.
    gradient_bytes: usize,
}

impl Parking {
    /// Creates the file of this rank, where the plan asks for one; `None` where everything is on the device.
    ///
    /// # Errors
    /// The folder cannot be used, or has too little space.
    pub(crate) fn new(
        zero: &ZeroPlan,
        precision: &PrecisionPlan,
        bytes: u64,
    ) -> Result<Option<Self>, ZeroError> {
        let offload = &zero.optimizer_states;
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

    /// The layout of an array of `len` elements of at most `element_bytes` bytes.
    pub(crate) fn layout(&self, len: usize, element_bytes: usize) -> PieceLayout {
        PieceLayout { len, piece: self.piece, element_bytes }
    }

    /// A place for the gradient sum of a parameter of which this rank updates `len` elements.
    ///
    /// # Errors
    /// The file is full.
    pub(crate) fn sum_home(&self, len: usize, ledger: &Ledger) -> Result<SumHome, SwapError> {
        let layout = self.layout(len, self.gradient_bytes);
        let array = ParkedArray::zeros(&self.store, layout, ledger, Category::Gradients)?;
        Ok(SumHome::Parked(array))
    }

    /// A place for the shard of a parameter, of `len` elements of type `dtype`, on `tier`.
    ///
    /// # Errors
    /// The file is full.
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

    /// Where arrays are parked.
    pub(crate) fn store(&self) -> &Store {
        &self.store
    }
}

/// Says on which tier the optimizer states and the gradient sum of each trainable parameter are kept, in the
/// order of the model.
#[derive(Debug, Clone)]
pub(crate) struct StateTiers {
    offloaded: Tier,
    /// Elements of parameters whose states may stay on the device.
    kept: usize,
    /// Elements of the trainable parameters before.
    before: usize,
}

impl StateTiers {
    /// Returns the tiers of a model with these parameters.
    ///
    /// With a `ratio` below 1 the states of the first parameters stay on the device, up to the first one with
    /// which they would be more than `1 - ratio` of all elements. DeepSpeed's `stage3.py` counts sub-groups of
    /// `sub_group_size` elements likewise, with `i >= int((1 - ratio) * count)`. Elements are counted without
    /// padding, so that the cut is the same for every number of ranks.
    pub(crate) fn new(parameters: &[ParameterSize], zero: &ZeroPlan) -> Self {
        let trainable = parameters.iter().filter(|parameter| parameter.is_trainable());
        let total = trainable.fold(0, |sum: u64, parameter| sum.saturating_add(parameter.numel));
        let (offloaded, ratio) = match zero.optimizer_states {
            OptimizerOffload::Device => (Tier::Device, 1.0),
            OptimizerOffload::Host { ratio, .. } => (Tier::Host, ratio),
            OptimizerOffload::Nvme(_) => (Tier::Disk, 1.0),
        };
        // `(1 - ratio) * total` would be rounded to just below a whole number more often.
        let kept = total as f64 - (ratio * total as f64).ceil();
        Self { offloaded, kept: kept as usize, before: 0 }
    }

    /// The tier of the states of the next trainable parameter, of `numel` elements.
    pub(crate) fn next(&mut self, numel: usize) -> Tier {
        self.before = self.before.saturating_add(numel);
        if self.before > self.kept { self.offloaded } else { Tier::Device }
    }
}

/// Says on which tier the shard of each parameter is kept, in the order of the model.
#[derive(Debug, Clone)]
pub(crate) struct ShardTiers {
    offload: ParameterOffload,
    /// Elements of the shards before.
    before: usize,
}

impl ShardTiers {
    pub(crate) fn new(zero: &ZeroPlan) -> Self {
        let offload = match zero.stage.shards_parameters() {
            true => zero.parameter_shards,
            false => ParameterOffload::Device,
        };
        Self { offload, before: 0 }
    }

    /// The tier of the next shard, of `len` elements, padding included.
    ///
    /// With NVMe the first `max_in_cpu` elements stay in host memory. As in DeepSpeed
    /// (`_create_fp16_partitions_with_defragmentation` of `stage3.py`) shards are counted from the first on,
    /// whether or not they fit; here one by one, there in groups of `sub_group_size`.
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

/// A file for the states of this rank.
fn create_file(nvme: &NvmePlan, bytes: u64) -> Result<SwapFile, SwapError> {
    SwapFile::create(&nvme.file.folder, bytes, &io_policy(&nvme.file))
}

/// How a file is read and written.
pub(crate) fn io_policy(file: &SwapFilePlan) -> IoPolicy {
    let SwapFilePlan { block_size, queue_depth, .. } = *file;
    IoPolicy { block_size, queue_depth, ..IoPolicy::default() }
}

/// Bytes of an element of an accumulated gradient: one micro-batch may be in the type in which it travelled.
fn gradient_bytes(precision: &PrecisionPlan) -> usize {
    let types = [precision.communication, precision.accumulation].map(element_type);
    types.map(|dtype| DType::from(dtype).size()).into_iter().fold(0, usize::max)
}

/// Bytes of the file in which each rank keeps its share of the states of `parameters`; 0 where the plan asks
/// for none.
///
/// # Panics
/// When `ranks` is 0.
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
