//! What this rank holds of a parameter, and on which tier.
//!
//! Main type: [`ParameterState`]. Whatever holds memory in it carries its own entry in the ledger, so a
//! change of state is a change of the ledger.

use std::sync::Arc;

use burn_backend::{Backend, DType};
use deepburn_nvme::SwapError;

use crate::gather::{Fetch, LiveElements};
use crate::parked::{ParkedArray, ParkedRead, ParkedTensor};
use crate::tensor::FullTensor;

/// What this rank holds of a parameter.
#[derive(Debug)]
pub(super) enum ParameterState<B: Backend> {
    /// All elements, in the parameter's shape.
    Whole(FullTensor<B>),
    /// This rank's flat chunk, and what there is of the whole values beside it.
    Sharded { shard: Shard<B>, copy: WholeCopy<B> },
    /// Nothing: the optimizer has it.
    CheckedOut,
}

/// This rank's flat chunk of a parameter, on the tier where it stays.
#[derive(Debug, Clone)]
pub(crate) enum Shard<B: Backend> {
    /// On the device.
    Device(FullTensor<B>),
    /// In host memory beside a device, or on NVMe, in the parameter's type.
    Parked(Arc<ParkedArray>),
}

/// The whole values of a sharded parameter.
#[derive(Debug)]
pub(super) enum WholeCopy<B: Backend> {
    /// There are none, or they are out of date.
    Absent,
    /// Being gathered together with other parameters. Keeps the fetch alive.
    Fetching(Arc<Fetch<B>>),
    /// Gathered in this pass and kept for another op, for as long as the gatherer decides.
    Gathered { whole: FullTensor<B>, _live: LiveElements },
    /// Kept until the optimizer changes the shard (`stage3_param_persistence_threshold`).
    Persistent(FullTensor<B>),
}

impl<B: Backend> Shard<B> {
    /// Starts to read the shard, whose elements are of type `dtype`, onto the device.
    ///
    /// # Errors
    /// There is no memory for a buffer, or an earlier write failed.
    pub(crate) fn start_read(self, dtype: DType) -> Result<ShardRead<B>, SwapError> {
        Ok(match self {
            Self::Device(shard) => ShardRead::Device(shard.into_inner()),
            Self::Parked(array) => {
                ShardRead::Parked(ParkedTensor { array: &array, dtype }.start()?)
            }
        })
    }

    /// Bytes of memory that a read takes, in elements of type `dtype`: none where the shard is on the device.
    pub(crate) fn read_bytes(&self, dtype: DType) -> usize {
        match self {
            Self::Device(_) => 0,
            Self::Parked(array) => array.len() * dtype.size(),
        }
    }
}

/// A shard on its way to the device.
#[derive(Debug)]
pub(crate) enum ShardRead<B: Backend> {
    /// It is there.
    Device(B::FloatTensorPrimitive),
    /// It is read from where it is parked.
    Parked(ParkedRead),
}

impl<B: Backend> ShardRead<B> {
    /// The shard on `device`.
    ///
    /// # Errors
    /// The disk fails.
    pub(crate) fn wait(self, device: &B::Device) -> Result<B::FloatTensorPrimitive, SwapError> {
        match self {
            Self::Device(shard) => Ok(shard),
            Self::Parked(read) => read.wait::<B>(device),
        }
    }
}
