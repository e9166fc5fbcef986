//! A rank's shard of a parameter, and the transfer that copies it to the device.

use std::sync::Arc;

use burn_backend::DType;
use deepburn_nvme::SwapError;
use deepburn_ops::SumOps;

use crate::offload::{ParkedArray, ParkedRead, ParkedTensor};
use crate::session::FullTensor;

/// This rank's flat shard of a parameter on its tier.
#[derive(Debug, Clone)]
pub(crate) enum Shard<B: SumOps> {
    /// On the device.
    Device(FullTensor<B>),
    /// Offloaded to host memory or NVMe, in the parameter's type.
    Parked(Arc<ParkedArray>),
}

impl<B: SumOps> Shard<B> {
    /// Starts to copy the shard, with elements of type `dtype`, to the device.
    ///
    /// # Errors
    /// Returns an error if a buffer cannot be allocated or an earlier write failed.
    pub(crate) fn start_read(self, dtype: DType) -> Result<ShardRead<B>, SwapError> {
        Ok(match self {
            Self::Device(shard) => ShardRead::Device(shard.into_inner()),
            Self::Parked(array) => {
                ShardRead::Parked(ParkedTensor { array: &array, dtype }.start()?)
            }
        })
    }

    /// Returns the memory in bytes that a read needs; 0 if the shard is on the device.
    pub(crate) fn read_bytes(&self, dtype: DType) -> usize {
        match self {
            Self::Device(_) => 0,
            Self::Parked(array) => array.len() * dtype.size(),
        }
    }
}

/// A shard that is being copied to the device.
#[derive(Debug)]
pub(crate) enum ShardRead<B: SumOps> {
    /// The shard was already on the device.
    Device(B::FloatTensorPrimitive),
    /// The shard is being read from host memory or NVMe.
    Parked(ParkedRead),
}

impl<B: SumOps> ShardRead<B> {
    /// Waits for the read and returns the shard on `device`.
    ///
    /// # Errors
    /// Returns an error if the disk fails.
    pub(crate) fn wait(self, device: &B::Device) -> Result<B::FloatTensorPrimitive, SwapError> {
        match self {
            Self::Device(shard) => Ok(shard),
            Self::Parked(read) => read.wait::<B>(device),
        }
    }
}
