//! Conversion between tensors and host memory.
//!
//! If the device of a backend is the host, neither direction copies, unless the tensor is shared.

use std::collections::VecDeque;

use burn_backend::ops::TransactionPrimitive;
use burn_backend::{
    AllocationProperty, Backend, DType, Shape, Slice, TensorData, TensorMetadata, read_sync,
};
use bytes::Bytes;

use crate::is_without_data;

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

/// The largest number of bytes of a copy from a device. CubeCL copies into pinned host memory,
/// which it keeps: pages of at most 5.3 GB for a tensor of more than 340 MB, and of about 100 MB
/// for arrays of this size (with 80 GB of device memory).
const COPY_BYTES: usize = 4 << 20;

/// The number of bytes after which the host waits for its copies.
const READ_BYTES: usize = 16 << 20;

/// Returns the data of `tensor` in its own type. Waits for the device, for each 16 MiB of a large
/// tensor.
///
/// # Panics
/// Panics if the device fails.
pub fn read_float<B: Backend>(tensor: B::FloatTensorPrimitive) -> TensorData {
    read_together::<B>(vec![tensor]).remove(0)
}

/// Returns the data of tensors. Waits for the device once for each 16 MiB of all of them.
fn read_together<B: Backend>(tensors: Vec<B::FloatTensorPrimitive>) -> Vec<TensorData> {
    // Without CubeCL, pieces would only be copied once more.
    if !cfg!(feature = "cube") || is_in_host_memory::<B>() {
        return tensors.into_iter().flat_map(|tensor| read_at_once::<B>(vec![tensor])).collect();
    }
    let forms: Vec<_> = tensors.iter().map(|tensor| (tensor.shape(), tensor.dtype())).collect();
    let tensors = tensors.into_iter().enumerate();
    let mut waiting: VecDeque<_> = tensors
        .flat_map(|(index, it)| pieces::<B>(it).into_iter().map(move |it| (index, it)))
        .collect();
    let mut data: Vec<Vec<TensorData>> = forms.iter().map(|_| Vec::new()).collect();
    while !waiting.is_empty() {
        let mut bytes = 0;
        let mut fits = |(_, piece): &(usize, B::FloatTensorPrimitive)| {
            bytes += bytes_of::<B>(piece);
            bytes <= READ_BYTES
        };
        // A piece fits alone.
        let count = waiting.iter().take_while(|piece| fits(piece)).count();
        let (indices, batch): (Vec<_>, Vec<_>) = waiting.drain(..count.max(1)).unzip();
        for (index, piece) in indices.into_iter().zip(read_at_once::<B>(batch)) {
            data[index].push(piece);
        }
    }
    data.into_iter()
        .zip(forms)
        .map(|(pieces, (shape, dtype))| joined(pieces, shape, dtype))
        .collect()
}

/// Reads tensors, and waits for their copies once.
fn read_at_once<B: Backend>(tensors: Vec<B::FloatTensorPrimitive>) -> Vec<TensorData> {
    let transaction = TransactionPrimitive::new(tensors, vec![], vec![], vec![]);
    match read_sync(B::tr_execute(transaction)) {
        Ok(data) => data.read_floats,
        Err(error) => panic!("reading a tensor from its device failed: {error:?}"),
    }
}

/// Returns the pieces of a tensor of more than [`COPY_BYTES`] in flat order, or the tensor itself.
fn pieces<B: Backend>(tensor: B::FloatTensorPrimitive) -> Vec<B::FloatTensorPrimitive> {
    let (len, at_once) = (tensor.shape().num_elements(), COPY_BYTES / tensor.dtype().size());
    if len <= at_once {
        return vec![tensor];
    }
    let flat = B::float_reshape(tensor, Shape::from(vec![len]));
    let piece = |start: usize| Slice::from(start..len.min(start + at_once));
    (0..len).step_by(at_once).map(|start| B::float_slice(flat.clone(), &[piece(start)])).collect()
}

/// Returns the data of a tensor from the data of its pieces.
fn joined(mut pieces: Vec<TensorData>, shape: Shape, dtype: DType) -> TensorData {
    if pieces.len() == 1 {
        return pieces.remove(0);
    }
    // The elements are copied as integers of their size, so that the memory is aligned for them.
    let bytes = match dtype.size() {
        2 => joined_as::<u16>(&pieces),
        4 => joined_as::<u32>(&pieces),
        _ => joined_as::<u64>(&pieces),
    };
    TensorData::from_bytes(bytes, shape, dtype)
}

/// Returns the elements of all pieces, which have the size of `E`.
fn joined_as<E: bytemuck::Pod + Send + Sync>(pieces: &[TensorData]) -> burn_backend::Bytes {
    let len: usize = pieces.iter().map(|piece| piece.bytes.len()).sum();
    let mut elements = vec![E::zeroed(); len / size_of::<E>()];
    let mut rest: &mut [u8] = bytemuck::cast_slice_mut(&mut elements);
    for piece in pieces {
        let (start, end) = rest.split_at_mut(piece.bytes.len());
        start.copy_from_slice(&piece.bytes);
        rest = end;
    }
    burn_backend::Bytes::from_elems(elements)
}

/// Returns the size of the elements of a tensor.
fn bytes_of<B: Backend>(tensor: &B::FloatTensorPrimitive) -> usize {
    tensor.shape().num_elements() * tensor.dtype().size()
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

/// Passes the bytes of each tensor to `each`, in order, as [`float_bytes`] returns them. The host
/// waits for a device once for each 16 MiB, and not for each tensor. Tensors are dropped as soon as
/// they are read. On a backend without data, there are no bytes.
///
/// # Errors
/// Returns the first error of `each`.
///
/// # Panics
/// Panics if the device fails.
pub fn each_float_bytes<B: Backend, E>(
    tensors: impl IntoIterator<Item = B::FloatTensorPrimitive>,
    mut each: impl FnMut(Bytes) -> Result<(), E>,
) -> Result<(), E> {
    let mut tensors = tensors.into_iter().peekable();
    while let Some(first) = tensors.next() {
        if is_without_data::<B>() {
            each(Bytes::new())?;
            continue;
        }
        if is_in_host_memory::<B>() {
            each(float_bytes::<B>(first))?;
            continue;
        }
        let (mut bytes, mut batch) = (bytes_of::<B>(&first), vec![first]);
        while let Some(next) = tensors.next_if(|it| bytes + bytes_of::<B>(it) <= READ_BYTES) {
            bytes += bytes_of::<B>(&next);
            batch.push(next);
        }
        let data = read_together::<B>(batch).into_iter();
        data.map(|data| Bytes::from_owner(HostBytes(data))).try_for_each(&mut each)?;
    }
    Ok(())
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
