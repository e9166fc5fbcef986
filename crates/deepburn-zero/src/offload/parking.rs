//! Creates the store of a rank's offloaded model states and allocates arrays in it.

use std::sync::Arc;

use burn_backend::DType;
use deepburn_config::{NvmePlan, OptimizerOffload, ParameterOffload, ZeroPlan};
use deepburn_nvme::{SwapError, SwapFile};
use deepburn_ops::{SumOps, is_without_data};

use crate::error::ZeroError;
use crate::ledger::{Category, Ledger, Tier};
use crate::offload::{CHUNK, ChunkLayout, ParkedArray, PipelinePolicy, Store, io_policy};

/// The store of a rank's offloaded arrays and the pipeline policy of its steps.
#[derive(Debug)]
pub(crate) struct Parking {
    /// The store of optimizer states and gradient sums, and of shards on NVMe.
    pub(crate) store: Store,
    /// Which transfers of a step overlap with its updates.
    pub(crate) policy: PipelinePolicy,
    /// The largest number of elements in a chunk.
    chunk: usize,
    /// The largest element size of an accumulated gradient in bytes.
    gradient_bytes: usize,
}

impl Parking {
    /// Creates the store and, if the plan offloads to NVMe, the file of this rank. Returns `None`
    /// if everything is on the device. `gradient_bytes` is the largest element size of an
    /// accumulated gradient, and `bytes` the size of the file.
    ///
    /// # Errors
    /// Returns an error if the folder cannot be used or has too little space.
    pub(crate) fn new<B: SumOps>(
        zero: &ZeroPlan,
        gradient_bytes: usize,
        bytes: u64,
    ) -> Result<Option<Self>, ZeroError> {
        let offload = &zero.optimizer_states;
        // Shards use the store of the optimizer states, so they can only be offloaded together with
        // the states.
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
        let (store, sub_group_size, reads_ahead, writes_behind) = match offload {
            OptimizerOffload::Device => return Ok(None),
            OptimizerOffload::Host { sub_group_size, .. } => {
                let store = match is_without_data::<B>() {
                    true => Store::Counted(Tier::Host),
                    false => Store::Host,
                };
                (store, *sub_group_size, false, false)
            }
            OptimizerOffload::Nvme(nvme) => {
                let store = match is_without_data::<B>() {
                    true => Store::Counted(Tier::Disk),
                    false => Store::Disk(Arc::new(create_file(nvme, bytes)?)),
                };
                (store, nvme.sub_group_size, nvme.pipeline_read, nvme.pipeline_write)
            }
        };
        Ok(Some(Self {
            store,
            policy: PipelinePolicy { reads_ahead, writes_behind },
            chunk: CHUNK.min(sub_group_size),
            gradient_bytes,
        }))
    }

    /// Returns the layout of an array of `len` elements of at most `element_bytes` bytes each.
    pub(crate) fn layout(&self, len: usize, element_bytes: usize) -> ChunkLayout {
        ChunkLayout { len, chunk: self.chunk, element_bytes }
    }

    /// Allocates the accumulated gradient of a parameter of which this rank updates `len` elements.
    ///
    /// # Errors
    /// Returns an error if the file is full.
    pub(crate) fn gradient_sum(
        &self,
        len: usize,
        ledger: &Ledger,
    ) -> Result<Arc<ParkedArray>, SwapError> {
        let layout = self.layout(len, self.gradient_bytes);
        ParkedArray::zeros(&self.store, layout, ledger, Category::Gradients)
    }

    /// Allocates the shard of a parameter on `tier`, with `len` elements of type `dtype`.
    ///
    /// # Errors
    /// Returns an error if the file is full.
    pub(crate) fn shard(
        &self,
        tier: Tier,
        (len, dtype): (usize, DType),
        ledger: &Ledger,
    ) -> Result<Arc<ParkedArray>, SwapError> {
        let store = match (tier, &self.store) {
            (Tier::Host, Store::Counted(_)) => Store::Counted(tier),
            // With `max_in_cpu`, some shards are in host memory although the store is a file.
            (Tier::Host, _) => Store::Host,
            (_, store) => store.clone(),
        };
        let layout = self.layout(len, dtype.size());
        ParkedArray::zeros(&store, layout, ledger, Category::Parameters)
    }
}

/// Creates the file for the states of this rank.
///
/// The file is preallocated with `bytes` bytes, so a full disk is detected here. It has no name, so
/// a killed run leaves no file behind.
///
/// # Errors
/// Returns an error if the folder cannot be used or has too little space.
fn create_file(nvme: &NvmePlan, bytes: u64) -> Result<SwapFile, SwapError> {
    SwapFile::create(&nvme.file.folder, bytes, &io_policy(&nvme.file))
}
