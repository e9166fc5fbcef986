//! Where a rank keeps its model states outside of the device, and how many bytes of a file they need.

use burn_backend::DType;
use deepburn_comm::Partition;
use deepburn_config::{
    NvmePlan, OptimizerOffload, OptimizerPlan, Precision, PrecisionPlan, ZeroPlan,
};
use deepburn_nvme::{IoPolicy, IoStatistics, SwapError, SwapFile};

use std::sync::Arc;

use crate::estimate::ParameterSize;
use crate::ledger::{Category, Ledger};
use crate::optimizer::moments;
use crate::parked::{Layout, PIECE, ParkedArray, PipelinePolicy, Store};
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
    ) -> Result<Option<Self>, SwapError> {
        let offload = &zero.optimizer_states;
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
    pub(crate) fn layout(&self, len: usize, element_bytes: usize) -> Layout {
        Layout { len, piece: self.piece, element_bytes }
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

    /// What was read from the file and written to it, and for how long this rank waited.
    pub(crate) fn io_statistics(&self) -> Option<IoStatistics> {
        match &self.store {
            Store::Host => None,
            Store::Disk(file) => Some(file.statistics()),
        }
    }
}

/// A file for the states of this rank.
fn create_file(nvme: &NvmePlan, bytes: u64) -> Result<SwapFile, SwapError> {
    let NvmePlan { block_size, queue_depth, .. } = *nvme;
    let policy = IoPolicy { block_size, queue_depth, ..IoPolicy::default() };
    SwapFile::create(&nvme.folder, bytes, &policy)
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
    optimizer: &OptimizerPlan,
    precision: &PrecisionPlan,
) -> u64 {
    let OptimizerOffload::Nvme(nvme) = &zero.optimizer_states else { return 0 };
    let masters = usize::from(precision.compute != Precision::Fp32);
    let arrays = moments(optimizer).len() + masters;
    let piece = PIECE.min(nvme.sub_group_size);
    let of_one = |parameter: &ParameterSize| {
        if !parameter.trainable {
            return 0;
        }
        let shards = if zero.stage.shards_optimizer() { ranks } else { 1 };
        let len = Partition::new(parameter.numel as usize, shards).shard_len();
        let layout = |element_bytes| Layout { len, piece, element_bytes };
        let states = layout(size_of::<f32>()).file_bytes().saturating_mul(arrays as u64);
        states.saturating_add(layout(gradient_bytes(precision)).file_bytes())
    };
    parameters.iter().map(of_one).fold(0, u64::saturating_add)
}
