//! Tensors as host memory and back.
//!
//! On a backend whose device is the host both ways are free of copies as long as nobody else
//! holds the tensor.

use burn_backend::{Backend, TensorData, read_sync};
use bytes::Bytes;

/// The f32 elements of `tensor`, in flat order.
pub fn float_into_host<B: Backend>(tensor: B::FloatTensorPrimitive) -> Vec<f32> {
    read_float::<B>(tensor)
        .convert::<f32>()
        .into_vec()
        .expect("the data was converted to f32 just before")
}

/// The data of `tensor`, in its own type.
pub fn read_float<B: Backend>(tensor: B::FloatTensorPrimitive) -> TensorData {
    match read_sync(B::float_into_data(tensor)) {
        Ok(data) => data,
        Err(error) => panic!("reading a tensor from its device failed: {error:?}"),
    }
}

/// The bytes of a tensor, shape by shape in its flat order.
///
/// A contiguous tensor of flex is in host memory already: its bytes are shared, not copied, and stay as
/// they are, because an op copies what is shared before it writes. Others are read from their device.
pub fn float_bytes<B: Backend>(tensor: B::FloatTensorPrimitive) -> Bytes {
    match host_bytes(&tensor) {
        Some(bytes) => bytes,
        None => Bytes::from_owner(HostBytes(read_float::<B>(tensor))),
    }
}

/// The bytes of a tensor that is contiguous and in host memory already: shared, not copied. `None` of others.
pub fn shared_bytes<B: Backend>(tensor: &B::FloatTensorPrimitive) -> Option<Bytes> {
    host_bytes(tensor)
}

/// A tensor that was read into host memory.
pub(crate) struct HostBytes(pub(crate) TensorData);

impl AsRef<[u8]> for HostBytes {
    fn as_ref(&self) -> &[u8] {
        &self.0.bytes
    }
}

/// The bytes of a tensor that lies in host memory in its flat order; `None` of others.
#[cfg(not(feature = "flex"))]
pub(crate) fn host_bytes(_: &dyn std::any::Any) -> Option<Bytes> {
    None
}

/// The bytes of a tensor that lies in host memory in its flat order; `None` of others.
#[cfg(feature = "flex")]
pub(crate) fn host_bytes(tensor: &dyn std::any::Any) -> Option<Bytes> {
    struct Shared(std::sync::Arc<burn_backend::Bytes>);

    impl AsRef<[u8]> for Shared {
        fn as_ref(&self) -> &[u8] {
            &self.0
        }
    }

    let tensor = tensor.downcast_ref::<burn_flex::FlexTensor>()?;
    let (start, end) = tensor.layout().contiguous_offsets()?;
    let size = tensor.dtype().size();
    Some(Bytes::from_owner(Shared(tensor.data_arc())).slice(start * size..end * size))
}

/// The elements of an index tensor.
pub fn int_into_host<B: Backend>(tensor: B::IntTensorPrimitive) -> Vec<i64> {
    match read_sync(B::int_into_data(tensor)) {
        Ok(data) => data.iter::<i64>().collect(),
        Err(error) => panic!("reading indices from their device failed: {error:?}"),
    }
}

/// An index tensor of `indices`, shape `[k]`, in the integer type of `device`.
pub fn int_from_host<B: Backend>(indices: Vec<i64>, device: &B::Device) -> B::IntTensorPrimitive {
    let len = indices.len();
    let dtype = burn_backend::get_device_settings::<B>(device).int_dtype;
    B::int_from_data(TensorData::new(indices, vec![len]).convert_dtype(dtype.into()), device)
}

/// A tensor of `data` on `device`.
pub fn float_from_host<B: Backend>(
    data: TensorData,
    device: &B::Device,
) -> B::FloatTensorPrimitive {
    B::float_from_data(data, device)
}
