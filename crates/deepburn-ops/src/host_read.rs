//! Reading tensors into host memory.

use burn_backend::{Backend, read_sync};
use bytes::Bytes;

use crate::host::{HostBytes, host_bytes};

/// Reads the elements of a tensor in their flat order, in its own type. A contiguous tensor of flex shares its memory
/// with the result; a tensor of another device is copied, and the call waits for it. A copy that is left pending while
/// the device runs other ops is not safe: CubeCL's wgpu runtime may use the mapped staging buffer again.
///
/// # Panics
///
/// Panics if the device fails.
pub fn read_to_host<B: Backend>(tensor: B::FloatTensorPrimitive) -> Bytes {
    if let Some(bytes) = host_bytes(&tensor) {
        return bytes;
    }
    match read_sync(B::float_into_data(tensor)) {
        Ok(data) => Bytes::from_owner(HostBytes(data)),
        Err(error) => panic!("reading a tensor from its device failed: {error:?}"),
    }
}
