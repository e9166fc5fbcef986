//! Conversion between tensors and host memory.
//!
//! If the device of a backend is the host, neither direction copies, unless the tensor is shared.

use burn_backend::{
    AllocationProperty, Backend, Shape, Slice, TensorData, TensorMetadata, read_sync,
};
use bytes::Bytes;

/// Returns the elements of `tensor` as f32, in flat order. f16 and bf16 are widened exactly; f64 is
/// rounded. Waits for the device.
///
/// # Panics
/// Panics if the device fails.
pub fn float_into_host<B: Backend>(tensor: B::FloatTensorPrimitive) -> Vec<f32> {
    read_float::<B>(tensor)
        .convert::<f32>()
        .into_vec()
        .expect("the data was converted to f32 just before")
}

/// The number of bytes that are read from a device at once. CubeCL reads into pinned host memory,
/// which it keeps: pages of at most 5.3 GB for a tensor of more than 340 MB, and of about 100 MB
/// for arrays of this size (with 80 GB of device memory).
const READ_BYTES: usize = 4 << 20;

/// Returns the data of `tensor` in its own type. Waits for the device, for each 4 MiB of a large
/// tensor.
///
/// # Panics
/// Panics if the device fails.
pub fn read_float<B: Backend>(tensor: B::FloatTensorPrimitive) -> TensorData {
    let (shape, dtype) = (tensor.shape(), tensor.dtype());
    // Without CubeCL, pieces would only be copied once more.
    let is_small = shape.num_elements() * dtype.size() <= READ_BYTES;
    if !cfg!(feature = "cube") || is_in_host_memory::<B>() || is_small {
        return read_at_once::<B>(tensor);
    }
    // The elements are copied as integers of their size, so that the memory is aligned for them.
    let bytes = match dtype.size() {
        2 => read_in_pieces::<B, u16>(tensor),
        4 => read_in_pieces::<B, u32>(tensor),
        8 => read_in_pieces::<B, u64>(tensor),
        _ => return read_at_once::<B>(tensor),
    };
    TensorData::from_bytes(bytes, shape, dtype)
}

/// Reads a tensor with one copy.
fn read_at_once<B: Backend>(tensor: B::FloatTensorPrimitive) -> TensorData {
    match read_sync(B::float_into_data(tensor)) {
        Ok(data) => data,
        Err(error) => panic!("reading a tensor from its device failed: {error:?}"),
    }
}

/// Reads a tensor whose elements have the size of `E` in pieces of [`READ_BYTES`].
fn read_in_pieces<B: Backend, E: bytemuck::Pod + Send + Sync>(
    tensor: B::FloatTensorPrimitive,
) -> burn_backend::Bytes {
    let (len, at_once) = (tensor.shape().num_elements(), READ_BYTES / size_of::<E>());
    let flat = B::float_reshape(tensor, Shape::from(vec![len]));
    let mut elements = vec![E::zeroed(); len];
    for (index, elements) in elements.chunks_mut(at_once).enumerate() {
        let start = index * at_once;
        let piece = Slice::from(start..start + elements.len());
        let piece = read_at_once::<B>(B::float_slice(flat.clone(), &[piece]));
        bytemuck::cast_slice_mut::<E, u8>(elements).copy_from_slice(&piece.bytes);
    }
    burn_backend::Bytes::from_elems(elements)
}

/// Returns the data of `tensor` in its own type, for reading. Waits for the device.
///
/// Unlike [`read_float`], it does not copy a contiguous flex tensor that is shared. Writing to the
/// data copies it.
///
/// # Panics
/// Panics if the device fails.
pub fn view_float<B: Backend>(tensor: B::FloatTensorPrimitive) -> TensorData {
    match host_bytes(&tensor) {
        Some(bytes) => {
            let bytes = burn_backend::Bytes::from_shared(bytes, AllocationProperty::Native);
            TensorData::from_bytes(bytes, tensor.shape(), tensor.dtype())
        }
        None => read_float::<B>(tensor),
    }
}

/// Returns the bytes of a tensor in flat order.
///
/// A contiguous flex tensor is already in host memory. Its bytes are shared instead of copied and
/// do not change, because an op copies shared memory before it writes. Other tensors are read from
/// their device, and the call waits for the copy. The copy must not stay pending while the device
/// runs other ops, because CubeCL's wgpu runtime may reuse the mapped staging buffer.
///
/// # Panics
/// Panics if the device fails.
pub fn float_bytes<B: Backend>(tensor: B::FloatTensorPrimitive) -> Bytes {
    match host_bytes(&tensor) {
        Some(bytes) => bytes,
        None => Bytes::from_owner(HostBytes(read_float::<B>(tensor))),
    }
}

/// Returns the bytes of a contiguous tensor in host memory without a copy; `None` for other
/// tensors.
pub fn shared_bytes<B: Backend>(tensor: &B::FloatTensorPrimitive) -> Option<Bytes> {
    host_bytes(tensor)
}

/// Returns true if the tensors of `B` are flex tensors, which the host reads in place.
#[cfg(not(feature = "flex"))]
pub fn is_in_host_memory<B: Backend>() -> bool {
    false
}

/// Returns true if the tensors of `B` are flex tensors, which the host reads in place.
#[cfg(feature = "flex")]
pub fn is_in_host_memory<B: Backend>() -> bool {
    use std::any::TypeId;
    TypeId::of::<B::FloatTensorPrimitive>() == TypeId::of::<burn_flex::FlexTensor>()
}

/// The data of a tensor that was read into host memory, as the owner of shared [`Bytes`].
struct HostBytes(TensorData);

impl AsRef<[u8]> for HostBytes {
    fn as_ref(&self) -> &[u8] {
        &self.0.bytes
    }
}

/// Returns the bytes of a contiguous tensor in host memory; `None` for other tensors.
#[cfg(not(feature = "flex"))]
pub(crate) fn host_bytes(_: &dyn std::any::Any) -> Option<Bytes> {
    None
}

/// Returns the bytes of a contiguous tensor in host memory; `None` for other tensors.
#[cfg(feature = "flex")]
pub(crate) fn host_bytes(tensor: &dyn std::any::Any) -> Option<Bytes> {
    struct Shared(std::sync::Arc<burn_backend::Bytes>);

    impl AsRef<[u8]> for Shared {
        fn as_ref(&self) -> &[u8] {
            &self.0
        }
    }

    // The type is known at run time only, because callers are generic over the backend.
    let tensor = tensor.downcast_ref::<burn_flex::FlexTensor>()?;
    let (start, end) = tensor.layout().contiguous_offsets()?;
    let size = tensor.dtype().size();
    Some(Bytes::from_owner(Shared(tensor.data_arc())).slice(start * size..end * size))
}

/// Returns the elements of an index tensor as 64-bit integers, in flat order. Waits for the device.
///
/// # Panics
/// Panics if the device fails.
pub fn int_into_host<B: Backend>(tensor: B::IntTensorPrimitive) -> Vec<i64> {
    match read_sync(B::int_into_data(tensor)) {
        Ok(data) => data.iter::<i64>().collect(),
        Err(error) => panic!("reading indices from their device failed: {error:?}"),
    }
}

/// Returns an index tensor of shape `[k]` in the integer type of `device`.
pub fn int_from_host<B: Backend>(indices: Vec<i64>, device: &B::Device) -> B::IntTensorPrimitive {
    let len = indices.len();
    // Backends differ in their default integer type.
    let dtype = burn_backend::get_device_settings::<B>(device).int_dtype;
    B::int_from_data(TensorData::new(indices, vec![len]).convert_dtype(dtype.into()), device)
}

/// Returns a tensor with `data` on `device`.
pub fn float_from_host<B: Backend>(
    data: TensorData,
    device: &B::Device,
) -> B::FloatTensorPrimitive {
    B::float_from_data(data, device)
}
