//! The parts of a parameter that this rank holds, and their tiers.
//!
//! Main type: [`ParameterState`]. Every part carries its own ledger entry, so a
//! change of state updates the ledger.

use std::sync::Arc;

use burn_backend::{Backend, DType};
use deepburn_nvme::SwapError;

use crate::gather::{Fetch, LiveElements};
use crate::parked::{ParkedArray, ParkedRead, ParkedTensor};
use crate::tensor::FullTensor;

/// The parts of a parameter that this rank holds.
#[derive(Debug)]
pub(super) enum ParameterState<B: Backend> {
    /// All elements, in the parameter's shape.
    Whole(FullTensor<B>),
    /// This rank's flat chunk, and the state of the gathered copy beside it.
    Sharded { shard: Shard<B>, copy: WholeCopy<B> },
    /// Nothing: the optimizer has taken the values.
    CheckedOut,
}

/// This rank's flat chunk of a parameter on its tier.
#[derive(Debug, Clone)]
pub(crate) enum Shard<B: Backend> {
    /// On the device.
    Device(FullTensor<B>),
    /// In host memory beside a device, or on NVMe, in the parameter's type.
    Parked(Arc<ParkedArray>),
}

/// The gathered copy of a sharded parameter.
#[derive(Debug)]
pub(super) enum WholeCopy<B: Backend> {
    /// There is none, or it is outdated.
    Absent,
    /// Being gathered together with other parameters. Keeps the fetch alive.
    Fetching(Arc<Fetch<B>>),
    /// Gathered in this pass and kept for another op, as long as the gatherer
    /// decides.
    Gathered { whole: FullTensor<B>, _live: LiveElements },
    /// Kept until the optimizer changes the shard (`stage3_param_persistence_threshold`).
    Persistent(FullTensor<B>),
}

impl<B: Backend> Shard<B> {
    /// Starts to copy the shard, with elements of type `dtype`, to the device.
    ///
    /// # Errors
    ///
    /// Returns an error if a buffer cannot be allocated or an earlier write
    /// failed.
    pub(crate) fn start_read(self, dtype: DType) -> Result<ShardRead<B>, SwapError> {
        Ok(match self {
            Self::Device(shard) => ShardRead::Device(shard.into_inner()),
            Self::Parked(array) => {
                ShardRead::Parked(ParkedTensor { array: &array, dtype }.start()?)
            }
        })
    }

    /// Returns the memory that a read needs in bytes; 0 if the shard is on the
    /// device.
    pub(crate) fn read_bytes(&self, dtype: DType) -> usize {
        match self {
            Self::Device(_) => 0,
            Self::Parked(array) => array.len() * dtype.size(),
        }
    }
}

/// A shard that is being copied to the device.
#[derive(Debug)]
pub(crate) enum ShardRead<B: Backend> {
    /// The shard was already on the device.
    Device(B::FloatTensorPrimitive),
    /// The shard is being read from host memory or NVMe.
    Parked(ParkedRead),
}

impl<B: Backend> ShardRead<B> {
    /// Waits for the shard on `device`.
    ///
    /// # Errors
    ///
    /// Returns an error if the disk fails.
    pub(crate) fn wait(self, device: &B::Device) -> Result<B::FloatTensorPrimitive, SwapError> {
        match self {
            Self::Device(shard) => Ok(shard),
            Self::Parked(read) => read.wait::<B>(device),
        }
    }
}
