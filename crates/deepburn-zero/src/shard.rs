//! A rank's flat chunk of a parameter, and its read.

use std::sync::Arc;

use burn_backend::{Backend, DType};
use deepburn_nvme::SwapError;

use crate::leased::FullTensor;
use crate::parked::{ParkedArray, ParkedRead, ParkedTensor};

/// This rank's flat chunk of a parameter on its tier.
#[derive(Debug, Clone)]
pub(crate) enum Shard<B: Backend> {
    /// On the device.
    Device(FullTensor<B>),
    /// In host memory beside a device, or on NVMe, in the parameter's type.
    Parked(Arc<ParkedArray>),
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
