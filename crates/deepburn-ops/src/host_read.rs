//! Reading tensors into host memory.

use burn_backend::{Backend, read_sync};
use bytes::Bytes;

use crate::host::{HostBytes, host_bytes};

/// Reads the elements of a tensor into host memory, in flat order and in the tensor's own type. A contiguous flex
/// tensor shares its memory with the result. Tensors on other devices are copied, and the call waits for the copy. The
/// copy must not stay pending while the device runs other ops, because CubeCL's wgpu runtime may reuse the mapped
/// staging buffer.
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
